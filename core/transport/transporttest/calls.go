package transporttest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/internal/machine"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// start calls in the background.
func begin(ctx context.Context, c transport.Conn, req *wire.Request) <-chan result {
	out := make(chan result, 1)
	guard.Go("transporttest: call", func() {
		reply, err := c.Call(ctx, req)
		out <- result{reply, err}
	})
	return out
}

// requireEcho checks that the connection still works.
func requireEcho(t *testing.T, c transport.Conn, text string) {
	reply, err := c.Call(t.Context(), &wire.Request{Op: wire.OpList, Body: []byte(text)})
	require.NoError(t, err)
	require.Equal(t, text, string(reply.Body))
}

func testRequestArrives(t *testing.T, f *fixture) {
	type seen struct {
		peer transport.Peer
		req  wire.Request
		left time.Duration
	}
	got := make(chan seen, 1)
	f.serve = func(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		deadline, _ := ctx.Deadline()
		got <- seen{peer, *req, time.Until(deadline)}
		reply(&wire.Reply{Payload: []byte("out")})
	}
	req := wire.Request{Op: wire.OpPut, Sequence: 1 << 60, Ack: 1<<60 - 3, Timeout: time.Hour, Body: []byte("body"), Payload: []byte("in")}
	reply, err := f.dial(77).Call(t.Context(), &req)
	require.NoError(t, err)
	require.Equal(t, &wire.Reply{Payload: []byte("out")}, reply)
	s := <-got
	if f.net.Remote {
		require.Equal(t, transport.Peer{ID: 77, Machine: machine.ID()}, s.peer)
	} else {
		require.Equal(t, transport.Peer{ID: 77, PID: os.Getpid(), Local: true}, s.peer)
	}
	require.InDelta(t, time.Hour, s.req.Timeout, float64(time.Minute), "what is left of it")
	s.req.Timeout = req.Timeout
	require.Equal(t, req, s.req)
	require.InDelta(t, time.Hour, s.left, float64(time.Minute))
}

func testManyCalls(t *testing.T, f *fixture) {
	const callers, calls = 16, 50
	conns := []transport.Conn{f.dial(1), f.dial(2)}
	errs := make(chan error, callers)
	for i := range callers {
		guard.Go("transporttest: caller", func() {
			var err error
			for j := 0; j < calls && err == nil; j++ {
				text := fmt.Sprintf("%d.%d", i, j)
				var reply *wire.Reply
				reply, err = conns[i%2].Call(t.Context(), &wire.Request{Body: []byte(text), Payload: []byte("p" + text)})
				if err == nil && (string(reply.Body) != text || string(reply.Payload) != "p"+text) {
					err = fmt.Errorf("call %s got %s", text, reply.Body)
				}
			}
			errs <- err
		})
	}
	for range callers {
		require.NoError(t, <-errs)
	}
}

// parked is a request that waits for its reply.
type parked struct {
	ctx   context.Context
	req   *wire.Request
	reply func(*wire.Reply)
}

// park makes the handler keep requests for the test to answer.
func (f *fixture) park() <-chan parked {
	waiting := make(chan parked, 64)
	f.serve = func(ctx context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		waiting <- parked{ctx, req, reply}
	}
	return waiting
}

func testOutOfOrder(t *testing.T, f *fixture) {
	waiting := f.park()
	c := f.dial(1)
	var results []<-chan result
	var requests []parked
	for i := range 5 {
		results = append(results, begin(t.Context(), c, &wire.Request{Body: []byte{byte(i)}}))
		requests = append(requests, <-waiting)
	}
	for i := range requests {
		p := requests[len(requests)-1-i]
		p.reply(&wire.Reply{Body: p.req.Body})
		got := <-results[p.req.Body[0]]
		require.NoError(t, got.err)
		require.Equal(t, p.req.Body, got.reply.Body)
	}
}

func testBigPayloads(t *testing.T, f *fixture) {
	c := f.dial(1)
	big := make([]byte, 24<<20+3)
	for i := range big {
		big[i] = byte(i * 7)
	}
	var sum sync.WaitGroup
	for range 2 {
		sum.Add(1)
		guard.Go("transporttest: big call", func() {
			defer sum.Done()
			reply, err := c.Call(t.Context(), &wire.Request{Body: big[:1<<20], Payload: big})
			if err != nil || !bytes.Equal(reply.Payload, big) || !bytes.Equal(reply.Body, big[:1<<20]) {
				t.Errorf("a big payload came back changed: %v", err)
			}
		})
	}
	sum.Wait()
	requireEcho(t, c, "after")
}

func testDeadline(t *testing.T, f *fixture) {
	waiting := f.park()
	c := f.dial(1)
	for { // a deadline that has passed before the request is on its way ends nothing at the server
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := c.Call(ctx, &wire.Request{Op: wire.OpWait})
		cancel()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "no reply after ")
		select {
		case p := <-waiting:
			<-p.ctx.Done()
			return
		default:
		}
	}
}

func testRequestTimeout(t *testing.T, f *fixture) {
	f.serve = func(ctx context.Context, _ transport.Peer, _ *wire.Request, reply func(*wire.Reply)) {
		guard.Go("transporttest: wait for the timeout", func() {
			<-ctx.Done()
			reply(wire.ErrorReply(tqerr.New(tqerr.CodeOf(ctx.Err()), "3 of 4 keys are there")))
		})
	}
	_, err := f.dial(1).Call(t.Context(), &wire.Request{Timeout: 5 * time.Millisecond})
	require.EqualError(t, err, "3 of 4 keys are there", "the server's own words arrive")
	require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
}

func testCancel(t *testing.T, f *fixture) {
	waiting := f.park()
	ctx, cancel := context.WithCancel(t.Context())
	got := begin(ctx, f.dial(1), &wire.Request{Op: wire.OpWait})
	p := <-waiting
	require.NoError(t, p.ctx.Err())
	cancel()
	err := (<-got).err
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "cancelled after ")
	<-p.ctx.Done()
}

func testEndedContext(t *testing.T, f *fixture) {
	waiting := f.park()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := f.dial(1)
	_, err := c.Call(ctx, &wire.Request{})
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
	_, _, err = c.Segment(ctx, 0, 0)
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
	require.NoError(t, c.Close())
	require.NoError(t, f.net.Close())
	require.Empty(t, waiting)
}

func testErrorReply(t *testing.T, f *fixture) {
	sent := tqerr.WithOp("get", tqerr.New(tqerr.NotFound, `partition "a": no key "k"`))
	f.serve = func(_ context.Context, _ transport.Peer, _ *wire.Request, reply func(*wire.Reply)) {
		reply(wire.ErrorReply(sent))
	}
	reply, err := f.dial(1).Call(t.Context(), &wire.Request{})
	require.Nil(t, reply)
	require.Equal(t, sent, err)
}

func testSecondReply(t *testing.T, f *fixture) {
	f.serve = func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		reply(&wire.Reply{Body: req.Body})
		reply(&wire.Reply{Body: []byte("again")})
	}
	c := f.dial(1)
	for _, text := range []string{"first", "second"} {
		requireEcho(t, c, text)
	}
}

func testLateReply(t *testing.T, f *fixture) {
	waiting := f.park()
	c := f.dial(1)
	ctx, cancel := context.WithCancel(t.Context())
	got := begin(ctx, c, &wire.Request{})
	late := <-waiting
	cancel()
	require.Error(t, (<-got).err)
	late.reply(&wire.Reply{Body: []byte("late")})
	next := begin(t.Context(), c, &wire.Request{})
	p := <-waiting
	late.reply(&wire.Reply{Body: []byte("later")})
	p.reply(&wire.Reply{Body: []byte("mine")})
	r := <-next
	require.NoError(t, r.err)
	require.Equal(t, "mine", string(r.reply.Body))
	require.NoError(t, c.Close())
	late.reply(&wire.Reply{Body: []byte("latest")})
}

func testNotify(t *testing.T, f *fixture) {
	got := make(chan wire.Request, 1)
	f.serve = func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		got <- *req
		reply(&wire.Reply{Body: []byte("nobody reads this")})
	}
	c := f.dial(1)
	sent := wire.Request{Op: wire.OpRelease, Sequence: 4, Ack: 2, Body: []byte("leases")}
	require.NoError(t, c.Notify(&sent))
	require.Equal(t, sent, <-got)
	require.NoError(t, c.Close())
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(c.Notify(&sent)))
}

// What is posted arrives in the order of the calls, however much of it waits for a server that is slow to read.
func testPost(t *testing.T, f *fixture) {
	const n = 3000
	arrived := make(chan uint64, n+1)
	f.serve = func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		arrived <- req.Sequence
		if req.Sequence%7 == 0 {
			reply(wire.ErrorReply(tqerr.New(tqerr.NotFound, "number %d", req.Sequence)))
			return
		}
		reply(&wire.Reply{Body: req.Body})
	}
	conn, ok := f.dial(1).(transport.Poster)
	require.True(t, ok, "every transport has posts")
	answers := make(chan error, n)
	for i := range uint64(n) {
		body := make([]byte, 1+i*7%5000)
		conn.Post(&wire.Request{Op: wire.OpList, Sequence: i, Body: body}, func(r *wire.Reply, err error) {
			if err == nil && len(r.Body) != len(body) {
				err = tqerr.New(tqerr.Internal, "a body of %d bytes", len(r.Body))
			}
			answers <- err
		})
	}
	failed := 0
	for range n {
		if err := <-answers; err != nil {
			require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err), err)
			failed++
		}
	}
	require.Equal(t, (n+6)/7, failed)
	for i := range n {
		require.EqualValues(t, i, <-arrived)
	}
	require.NoError(t, conn.Close())
	<-conn.Done()
	gone := make(chan error, 1)
	conn.Post(&wire.Request{Op: wire.OpList}, func(_ *wire.Reply, err error) { gone <- err })
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-gone))
}
