//go:build zmq

package session_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/machine"
	"transferqueue/core/session"
	"transferqueue/core/wire"
)

// on makes what is opened next believe that it is on a host.
func on(t *testing.T, host string) { t.Setenv(machine.Variable, host) }

// spawnOn starts a unit that believes so, and listens for the others.
func spawnOn(t *testing.T, cfg *session.Config, name, host string) func() *process {
	return spawn(t, in(asUnit(cfg, name), func(c *session.Config) { c.Listen = "tcp://127.0.0.1:0" }), machine.Variable+"="+host)
}

// joinAway makes units of other hosts known to a session.
func joinAway(s *session.Session, units ...*process) error {
	var req wire.JoinUnitsRequest
	for _, p := range units {
		req.Units = append(req.Units, wire.UnitAddress{
			Name: p.name(), Socket: p.Info.Socket, Secret: p.Info.Secret, Host: p.Info.Machine, Address: p.Info.Address, Machine: p.Info.Machine,
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
func TestExactlyOnceOnOtherHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	cfg.PayloadPort = freePort(t)
	var ports []int
	var started []func() *process
	for _, name := range []string{"b", "c"} {
		payload := freePort(t)
		ports = append(ports, payload)
		started = append(started, spawn(t, in(asUnit(cfg, "unit-"+name), func(c *session.Config) {
			c.Listen, c.PayloadPort = "tcp://127.0.0.1:0", payload
		}), machine.Variable+"="+name))
	}
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	ports = append(ports, portOf(t, here.Info.Address), cfg.PayloadPort)
	var units []*process
	for _, start := range started {
		u := start()
		ports = append(ports, portOf(t, u.Info.Address))
		u.Info.Address = strings.Replace(u.Info.Address, "127.0.0.1", proxyHost, 1)
		units = append(units, u)
	}
	p := &proxy{cut: 0.02, twice: 0.1, delay: 3 * time.Millisecond}
	startProxy(t, p, ports...)
	require.NoError(t, joinAway(here, units...))
	on(t, "d")
	exactlyOnce(t, cfg, here, p)
	requireClean(t, here) // before the proxy ends
}
