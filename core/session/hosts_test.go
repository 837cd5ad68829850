//go:build zmq

package session_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/guard"
	"transferqueue/core/internal/machine"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// on makes what is opened next believe that it is on a host.
func on(t *testing.T, host string) { t.Setenv(machine.Variable, host) }

// spawnOn starts a unit that believes so, and listens for the others.
func spawnOn(t *testing.T, cfg *session.Config, name, host string) func() *process {
	return spawnWith(t, cfg, name, host, 0)
}

func spawnWith(t *testing.T, cfg *session.Config, name, host string, payloadPort int) func() *process {
	return spawn(t, in(asUnit(cfg, name), func(c *session.Config) {
		c.Listen, c.PayloadPort = "tcp://127.0.0.1:0", payloadPort
	}), machine.Variable+"="+host)
}

func (p *process) behindProxy() *process {
	p.Info.Address = strings.Replace(p.Info.Address, "127.0.0.1", proxyHost, 1)
	return p
}

// joinAway makes units of other hosts known to a session.
func joinAway(s *session.Session, units ...*process) error {
	var req wire.JoinUnitsRequest
	for _, p := range units {
		req.Units = append(req.Units, wire.UnitAddress{
			Name: p.name(), Socket: p.Info.Socket, Secret: p.Info.Secret, Host: p.Info.Machine, Address: p.Info.Address, Machine: p.Info.Machine, Key: p.Info.Key,
		})
	}
	return ask(s, wire.OpJoinUnits, &req, nil)
}

// Units on two other hosts than the controller, and clients on each of the three.
func TestUnitsOnOtherHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	startedB, startedC := spawnOn(t, cfg, "unit-b", "b"), spawnOn(t, cfg, "unit-c", "c")
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	b, c := startedB(), startedC()
	require.NoError(t, joinAway(here, b, c))
	require.NoError(t, joinAway(here, b, c), "again")
	require.Equal(t, map[string]string{"unit-b": "ACTIVE", "unit-c": "ACTIVE"}, states(t, here))
	writers := map[string]*writer{"a": {here, foreigntest.New(t, 300<<20)}}
	for _, host := range []string{"b", "c"} {
		on(t, host)
		writers[host] = &writer{open(t, reaching(cfg, here.Info.Address)), foreigntest.New(t, 300<<20)}
	}
	for from, w := range writers {
		for _, width := range []int{narrow, wide, 5 << 20} {
			require.NoError(t, w.put(putBody{Keys: wire.Strings{"a", "b", "c"}}, width, 1, 2, 3), from)
			require.NoError(t, w.put(putBody{Keys: wire.Strings{"b"}, Update: true, Merge: "add"}, width, 40), from)
			for at, r := range writers {
				got, err := r.values("c", "b", "a")
				require.NoError(t, err, "%s to %s", from, at)
				require.Equal(t, []int64{3, 42, 1}, got)
			}
			require.NoError(t, w.clear("a", "b", "c"))
		}
	}
	for _, host := range []string{"b", "c"} {
		require.NoError(t, writers[host].s.Close(time.Second))
	}
}

// The network of the controller to its units, of clients to the units, and of clients to the controller delays, cuts and repeats.
// One of the units has its values on disk, and asks the controller for advice.
func TestExactlyOnceOnOtherHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	cfg.PayloadPort = freePort(t)
	var ports []int
	var started []func() *process
	for name, disk := range map[string]session.Disk{"b": {}, "c": {Enabled: true, Path: t.TempDir(), Threshold: 1000}} {
		payload := freePort(t)
		ports = append(ports, payload)
		started = append(started, spawnWith(t, in(cfg, func(c *session.Config) { c.Disk = disk }), "unit-"+name, name, payload))
	}
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	ports = append(ports, portOf(t, here.Info.Address), cfg.PayloadPort)
	var units []*process
	for _, start := range started {
		u := start()
		ports = append(ports, portOf(t, u.Info.Address))
		units = append(units, u.behindProxy())
	}
	p := &proxy{cut: 0.02, twice: 0.1, delay: 3 * time.Millisecond}
	startProxy(t, p, ports...)
	require.NoError(t, joinAway(here, units...))
	on(t, "d")
	exactlyOnce(t, cfg, here, p)
	requireClean(t, here) // before the proxy ends
}

// soon runs something that must be over within the time in which a host that is gone is noticed.
func soon(t *testing.T, what func() error) error {
	t.Helper()
	began := time.Now()
	err := what()
	require.Less(t, time.Since(began), 5500*time.Millisecond)
	return err
}

// A network that is away for a moment holds calls up. When it is away for longer, the unit is unavailable; it keeps its cells, and
// has them when it joins again.
func TestTheNetworkToAUnitGoesAwayAndComesBack(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	payload := freePort(t)
	start := spawnWith(t, cfg, "unit-b", "b", payload)
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	unit := start()
	p := &proxy{}
	p.calm.Store(true)
	startProxy(t, p, payload, portOf(t, unit.Info.Address))
	require.NoError(t, joinAway(here, unit.behindProxy()))
	w := &writer{here, foreigntest.New(t, 64<<20)}
	for _, width := range []int{narrow, wide} {
		key := fmt.Sprint("w", width)
		require.NoError(t, w.put(putBody{Keys: wire.Strings{key}}, width, 7))
		p.cutAll()
		time.AfterFunc(500*time.Millisecond, func() { p.down.Store(false) })
		got, err := w.values(key)
		require.NoError(t, err)
		require.Equal(t, []int64{7}, got)
		require.NoError(t, w.put(putBody{Keys: wire.Strings{key}, Update: true, Merge: "add"}, width, 1))
		_, err = w.values(key)
		require.NoError(t, err)
	}
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"late"}}, narrow, 1))
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"late"}, Update: true, Merge: "add"}, narrow, 1))
	p.cutAll() // perhaps before the unit has it
	err := soon(t, func() error {
		_, err := w.values("w4")
		return err
	})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit-b")
	require.Equal(t, map[string]string{"unit-b": "UNAVAILABLE"}, states(t, here))
	p.down.Store(false)
	require.NoError(t, joinAway(here, unit))
	require.Equal(t, map[string]string{"unit-b": "ACTIVE"}, states(t, here))
	for _, width := range []int{narrow, wide} {
		got, err := w.values(fmt.Sprint("w", width))
		require.NoError(t, err, "it has kept its cells")
		require.Equal(t, []int64{8}, got)
	}
	if got, err := w.values("late"); err != nil {
		require.ErrorContains(t, err, "lost")
	} else {
		require.Equal(t, []int64{2}, got, "an earlier version never comes back")
	}
	requireClean(t, here)
}

// A unit whose process dies is unavailable at once; one of the same name that comes back is used again, and has nothing.
func TestAUnitOnAnotherHostDiesAndComesBack(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	first, second := spawnOn(t, cfg, "unit-b", "b"), spawnOn(t, cfg, "unit-b", "b")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	doomed, fresh := first(), second()
	require.NoError(t, joinAway(here, doomed))
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(joinAway(here, fresh)), "its name is in use")
	on(t, "c")
	there := &writer{open(t, reaching(cfg, here.Info.Address)), foreigntest.New(t, 64<<20)}
	near := &writer{here, foreigntest.New(t, 64<<20)}
	for _, w := range []*writer{there, near} {
		require.NoError(t, w.put(putBody{Keys: wire.Strings{"a"}}, wide, 1))
	}
	require.NoError(t, doomed.cmd.Process.Kill())
	for _, w := range []*writer{there, near} {
		err := soon(t, func() error { return w.put(putBody{Keys: wire.Strings{"a"}}, wide, 2) })
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "unit-b")
		_, err = w.values("a")
		require.Error(t, err)
		require.ErrorContains(t, err, "unit-b")
	}
	require.NoError(t, joinAway(here, fresh))
	for _, w := range []*writer{there, near} {
		_, err := w.values("a")
		require.Error(t, err, "it was lost with the process")
	}
	for i, w := range []*writer{there, near} {
		require.NoError(t, w.put(putBody{Keys: wire.Strings{"a"}}, wide, int64(i)))
		got, err := w.values("a")
		require.NoError(t, err)
		require.Equal(t, []int64{int64(i)}, got)
	}
	require.NoError(t, there.s.Close(time.Second))
	requireClean(t, here)
}

// However many requests find the controller gone, each fails in time: they do not try to reach it one after another.
func TestEverybodyHearsInTimeThatTheControllerIsGone(t *testing.T) {
	checkRemote(t)
	start := spawn(t, listening(config(t)))
	owner := start()
	there := open(t, reaching(config(t), owner.Info.Address))
	alive(t, there)
	require.NoError(t, owner.cmd.Process.Kill())
	const requests = 8
	errs := make(chan error, requests)
	require.Error(t, soon(t, func() error {
		for range requests {
			guard.Go("test: request", func() { errs <- ask(there, wire.OpPartitions, nil, nil) })
		}
		var err error
		for range requests {
			err = <-errs
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		}
		return err
	}))
}

// What is dumped of units on other hosts is written and read where the controller is.
func TestDumpsOfUnitsOnOtherHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	startedB, startedC := spawnOn(t, cfg, "unit-b", "b"), spawnOn(t, cfg, "unit-c", "c")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	require.NoError(t, joinAway(here, startedB(), startedC()))
	w := &writer{here, foreigntest.New(t, 128<<20)}
	keys := wire.Strings{"a", "b", "c", "d"}
	for i, key := range keys { // each where there is most room
		require.NoError(t, w.put(putBody{Keys: wire.Strings{key}}, 1<<20, int64(i)))
	}
	dump := filepath.Join(t.TempDir(), "dump")
	require.NoError(t, ask(here, wire.OpDumpRows, &wire.DumpRequest{Path: dump, Partition: "p", Keys: keys}, nil))
	for _, key := range keys {
		require.NoError(t, w.put(putBody{Keys: wire.Strings{key}}, 1<<20, 9))
	}
	require.NoError(t, w.clear("b"))
	require.NoError(t, ask(here, wire.OpLoadRows, &wire.LoadRowsRequest{Path: dump}, nil))
	got, err := w.values(keys...)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 1, 2, 3}, got)
	requireClean(t, here)
}

// A write that has to move because its key was created elsewhere meanwhile is copied from host to host.
func TestAWriteMovesBetweenHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	startedB, startedC := spawnOn(t, cfg, "unit-b", "b"), spawnOn(t, cfg, "unit-c", "c")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	require.NoError(t, joinAway(here, startedB(), startedC()))
	const writers, rounds = 4, 25
	var all []*writer
	for i := range writers {
		on(t, []string{"b", "c"}[i%2])
		all = append(all, &writer{open(t, reaching(cfg, here.Info.Address)), foreigntest.New(t, 16<<20)})
	}
	for round := range rounds { // of different hosts, which prefer different units
		key := wire.Strings{fmt.Sprint("k", round)}
		errs := make(chan error, writers)
		for i, w := range all {
			guard.Go("test: writer", func() { errs <- w.put(putBody{Keys: key}, wide, int64(i)) })
		}
		for range writers {
			require.NoError(t, <-errs)
		}
		got, err := all[0].values(key...)
		require.NoError(t, err, "its elements are of one write")
		require.Less(t, got[0], int64(writers))
	}
	for _, w := range all {
		require.NoError(t, w.s.Close(time.Second))
	}
	requireClean(t, here)
}

// With CURVE everything that crosses between three hosts is encrypted: requests of the controller to its units, and payload.
func TestUnitsOnOtherHostsEncrypt(t *testing.T) {
	checkRemote(t)
	cfg := in(listening(config(t)), func(c *session.Config) { c.Security, c.KeyFile = "curve", filepath.Join(t.TempDir(), "key") })
	start := spawnOn(t, cfg, "unit-b", "b")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	unit := start()
	require.NotEmpty(t, unit.Info.Key)
	plain := *unit
	plain.Info.Key = nil
	require.Error(t, joinAway(here, &plain), "it does not speak to who does not encrypt")
	other := *unit
	other.Info.Key = bytes.Repeat([]byte{9}, len(unit.Info.Key))
	require.Error(t, joinAway(here, &other), "and nobody else is taken for it")
	require.NoError(t, joinAway(here, unit))
	on(t, "c")
	there := open(t, in(reaching(cfg, here.Info.Address), func(c *session.Config) {
		c.Token = fmt.Appendf(nil, "%s %x", token, here.Info.Key)
	}))
	w := &writer{there, foreigntest.New(t, 64<<20)}
	for _, width := range []int{narrow, wide, 2 << 20} {
		require.NoError(t, w.put(putBody{Keys: wire.Strings{"a"}}, width, 5))
		got, err := w.values("a")
		require.NoError(t, err)
		require.Equal(t, []int64{5}, got)
	}
	require.NoError(t, there.Close(time.Second))
	requireClean(t, here)
}
