//go:build zmq

package session_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/guard"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// answering is an address where something answers every connection with the given bytes, or with nothing.
func answering(t *testing.T, answer []byte) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var conns []net.Conn
	done := make(chan struct{})
	guard.Go("test: answer", func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, conn)
			_, _ = conn.Write(answer)
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		<-done
		for _, conn := range conns {
			_ = conn.Close()
		}
	})
	return "tcp://" + l.Addr().String()
}

func TestUnitsThatCannotBeReached(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	start := spawnOn(t, cfg, "unit-b", "b")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	unit := start()
	secret, other := unit.Info.Secret, make([]byte, 32)
	for _, c := range []struct {
		why     string
		at      wire.UnitAddress
		code    tqerr.Code
		explain string
	}{
		{"wrong token", wire.UnitAddress{Address: unit.Info.Address, Secret: other}, tqerr.InvalidArgument, unit.Info.Address},
		{"no token", wire.UnitAddress{Address: unit.Info.Address}, tqerr.InvalidArgument, "secret"},
		{"a short token", wire.UnitAddress{Address: unit.Info.Address, Secret: []byte("x")}, tqerr.InvalidArgument, "token"},
		{"no scheme", wire.UnitAddress{Address: "127.0.0.1:5", Secret: secret}, tqerr.InvalidArgument, "127.0.0.1:5"},
		{"no port", wire.UnitAddress{Address: "tcp://127.0.0.1", Secret: secret}, tqerr.InvalidArgument, "tcp://127.0.0.1"},
		{"no such name", wire.UnitAddress{Address: "tcp://no-such-host.invalid:5", Secret: secret}, tqerr.Unavailable, "no-such-host.invalid"},
		{"nobody", wire.UnitAddress{Address: "tcp://127.0.0.1:1", Secret: secret}, tqerr.Unavailable, "tcp://127.0.0.1:1"},
		{"garbage", wire.UnitAddress{Address: answering(t, make([]byte, 4096)), Secret: secret}, tqerr.Unavailable, "tcp://127.0.0.1:"},
		{"silence", wire.UnitAddress{Address: answering(t, nil), Secret: secret}, tqerr.Unavailable, "tcp://127.0.0.1:"},
	} {
		t.Run(c.why, func(t *testing.T) {
			c.at.Name, c.at.Host, c.at.Machine = "unit-b", "b", "b"
			err := soon(t, func() error {
				return ask(here, wire.OpJoinUnits, &wire.JoinUnitsRequest{Units: []wire.UnitAddress{c.at}}, nil)
			})
			require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, c.explain)
			require.NotContains(t, err.Error(), string(wire.UnitToken(secret)))
		})
	}
	wrongName := wire.UnitAddress{Name: "unit-x", Host: "b", Machine: "b", Address: unit.Info.Address, Secret: secret}
	err := ask(here, wire.OpJoinUnits, &wire.JoinUnitsRequest{Units: []wire.UnitAddress{wrongName}}, nil)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit-x")
	require.Empty(t, states(t, here), "nothing has joined")
	require.NoError(t, joinAway(here, unit), "and nobody is hurt")

	thief := open(t, in(cfg, func(c *session.Config) { c.Units, c.Dir = -1, config(t).Dir }))
	err = joinAway(thief, unit)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err), "it belongs to another session: %v", err)
	require.Equal(t, map[string]string{"unit-b": "ACTIVE"}, states(t, here))
}

func TestAUnitWhosePortIsTaken(t *testing.T) {
	checkRemote(t)
	cfg := config(t)
	taken := answering(t, nil)
	for _, listen := range []string{taken, "127.0.0.1:5", "tcp://no-such-host.invalid:0"} {
		_, err := session.Open(t.Context(), in(asUnit(cfg, "u"), func(c *session.Config) { c.Listen = listen }))
		require.Error(t, err)
		require.NotEqual(t, tqerr.Internal, tqerr.CodeOf(err))
	}
	_, err := session.Open(t.Context(), in(asUnit(cfg, "u"), func(c *session.Config) { c.Listen = taken }))
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, taken)
	require.Empty(t, files(t, cfg.Dir))
}

// Clients that go away in the middle of anything: what was staged and leased for them on units of other hosts ends.
func TestClientsOfUnitsOnOtherHostsGoAwayInEveryState(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	startedB, startedC := spawnOn(t, cfg, "unit-b", "b"), spawnOn(t, cfg, "unit-c", "c")
	on(t, "a")
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	require.NoError(t, joinAway(here, startedB(), startedC()))
	kept := &writer{here, foreigntest.New(t, 16<<20)}
	require.NoError(t, kept.put(putBody{Keys: wire.Strings{"kept"}}, wide, 7))
	mem := foreigntest.New(t, 64<<20)
	for i := range 40 {
		on(t, []string{"b", "c", "d"}[i%3]) // maps one unit, or none
		s, err := session.Open(t.Context(), reaching(cfg, here.Info.Address))
		require.NoError(t, err)
		w, done := &writer{s, mem}, make(chan struct{})
		guard.Go("test: client", func() {
			defer close(done)
			for err := error(nil); err == nil; {
				if err = w.put(putBody{Keys: wire.Strings{fmt.Sprint("k", i)}}, 2<<20, 1); err == nil {
					_, err = w.values("kept", "kept")
				}
			}
		})
		time.Sleep(rand.N(30 * time.Millisecond))
		require.NoError(t, s.Close(time.Second))
		<-done
	}
	got, err := kept.values("kept")
	require.NoError(t, err)
	require.Equal(t, []int64{7}, got)
	requireClean(t, here)
}
