//go:build go1.25

package controller_test

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// host is a unit in a process of its own, but for the process.
type host struct {
	name   string
	server *remote.Server
	net    *memnet.Network
	peer   atomic.Uint64 // of the controller's latest connection
	dead   atomic.Bool
	// stopped makes every further answer get lost, until the connection is found to be gone.
	stopped atomic.Bool
	disk    *unit.Disk
}

// answering is a connection whose answers come from goroutines of their own, in any order, as from another process.
type answering struct {
	transport.Poster
	host *host
	m    *mortal // the process at this end, nil: it does not die
}

func (c answering) Post(req *wire.Request, done func(*wire.Reply, error)) {
	post := func() error {
		c.Poster.Post(req, func(reply *wire.Reply, err error) {
			if c.host.stopped.Load() {
				reply, err = nil, tqerr.New(tqerr.Unavailable, "the process was killed")
			}
			go done(reply, err)
		})
		return nil
	}
	if c.m == nil {
		_ = post()
	} else if err := c.m.do(post); err != nil {
		go done(nil, err)
	}
}

func (s *system) addHost(i int, o setup, samples int64) *host {
	s.t.Helper()
	disk := s.diskOf(i, o)
	h := &host{name: fmt.Sprintf("unit-%d", i), disk: disk}
	var err error
	h.server, err = remote.NewServer(remote.Options{Name: h.name, MemoryLimit: o.limit, SampleLimit: samples, Disk: disk, Jobs: s.jobs})
	require.NoError(s.t, err)
	h.net = memnet.New(uint64(i), h.server)
	s.hosts, s.units = append(s.hosts, h), append(s.units, h.server.Unit())
	return h
}

// dial connects the present process of the controller with its units.
func (s *system) dial() func(context.Context, *wire.UnitAddress) (remote.Conn, error) {
	process := s.mortal
	return func(_ context.Context, at *wire.UnitAddress) (remote.Conn, error) {
		for _, h := range s.hosts {
			if h.name == at.Name && !h.dead.Load() {
				peer := client.NewID()
				h.peer.Store(peer)
				conn, err := h.net.Dial(peer)
				return answering{conn, h, process}, err
			}
		}
		return nil, tqerr.New(tqerr.Unavailable, "no server at socket %q", at.Socket)
	}
}

func (h *host) address() wire.UnitAddress {
	return wire.UnitAddress{Name: h.name, Socket: "/" + h.name, Secret: []byte("s"), Host: "here"}
}

// joinHosts makes all hosts known to the controller.
func (s *system) joinHosts() {
	s.t.Helper()
	if len(s.hosts) == 0 {
		return
	}
	var req wire.JoinUnitsRequest
	for _, h := range s.hosts {
		req.Units = append(req.Units, h.address())
	}
	admin := s.user()
	admin.ask(wire.OpJoinUnits, &req, nil)
	require.NoError(s.t, admin.Close())
	s.users = s.users[:len(s.users)-1]
}

// kill ends a host as SIGKILL ends a process: its connection is gone, and nothing answers any more.
func (s *system) kill(i int) {
	s.hosts[i].dead.Store(true)
	_ = s.hosts[i].net.Close()
}

func (s *system) isDead(i int) bool { return i < len(s.hosts) && s.hosts[i].dead.Load() }

func (s *system) closeHosts() {
	for _, h := range s.hosts {
		_ = h.net.Close()
	}
}
