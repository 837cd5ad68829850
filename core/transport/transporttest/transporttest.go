// Package transporttest is what every transport must do, as one suite of tests.
package transporttest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Net is one server and the way to it.
type Net struct {
	// Dial connects a client.
	Dial func(peerID uint64) (transport.Conn, error)
	// Close ends the server. It may be called twice.
	Close func() error
	// Remote says that clients cannot map the server's memory, and that connections are transport.Streamers.
	Remote bool
}

// Run runs the suite. start puts a handler behind a new server.
func Run(t *testing.T, start func(t *testing.T, h transport.Handler) Net) {
	cases := []struct {
		name string
		run  func(*testing.T, *fixture)
	}{
		{"everything in a request arrives", testRequestArrives},
		{"many calls at once", testManyCalls},
		{"replies out of order", testOutOfOrder},
		{"big payloads", testBigPayloads},
		{"a deadline ends the call and the server's context", testDeadline},
		{"a request's timeout ends the server's context", testRequestTimeout},
		{"cancelling ends the call and the server's context", testCancel},
		{"an ended context calls nothing", testEndedContext},
		{"errors arrive with code, operation and message", testErrorReply},
		{"only the first reply counts", testSecondReply},
		{"a late reply harms nobody", testLateReply},
		{"notify", testNotify},
		{"what is posted keeps its order", testPost},
		{"memory can be reached", testMemory},
		{"memory that does not exist", testNoMemory},
		{"close fails what waits and ends the peer", testClose},
		{"the server's close fails what waits and ends the peers", testServerClose},
		{"a peer with two connections is gone after the second", testTwoConnections},
		{"a peer that comes back is gone again", testComesBack},
		{"a panic is an Internal reply and poisons", testPanic},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			f := newFixture(t)
			f.net = start(t, f)
			t.Cleanup(func() { require.NoError(t, f.net.Close()) })
			c.run(t, f)
		})
	}
}

// serve is the part of a handler that differs between tests.
type serve func(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply))

// fixture is a handler whose behaviour is chosen by each test, and the server in front of it.
type fixture struct {
	t       *testing.T
	net     Net
	serve   serve
	segment func(unit, segment uint32) (int, int64, error)
	lend    func(peer transport.Peer, grant transport.Grant) ([][]byte, func(), error)
	gone    chan transport.Peer
}

func newFixture(t *testing.T) *fixture {
	return &fixture{t: t, serve: echo, gone: make(chan transport.Peer, 64)}
}

func (f *fixture) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	f.serve(ctx, peer, req, reply)
}

func (f *fixture) Gone(peer transport.Peer) { f.gone <- peer }

func (f *fixture) Segment(unit, segment uint32) (int, int64, error) { return f.segment(unit, segment) }

func (f *fixture) Lend(peer transport.Peer, grant transport.Grant, _ func()) ([][]byte, func(), error) {
	return f.lend(peer, grant)
}

func (f *fixture) dial(peerID uint64) transport.Conn {
	c, err := f.net.Dial(peerID)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = c.Close() })
	return c
}

// echo answers with the request's own bytes.
func echo(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	reply(&wire.Reply{Body: req.Body, Payload: req.Payload})
}

// result is what a call returned.
type result struct {
	reply *wire.Reply
	err   error
}
