//go:build go1.25

package calls

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// network is a Sender whose frames the test reads.
type network struct {
	frames chan wire.Frame
	mu     sync.Mutex
	fail   error
	room   chan struct{}
}

func (n *network) Send(f *wire.Frame, limited bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.fail != nil:
		return n.fail
	case limited && n.room != nil:
		return ErrFull
	}
	n.frames <- *f
	return nil
}

func (n *network) Room() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.room == nil {
		n.room = make(chan struct{})
		close(n.room)
		defer func() { n.room = nil }()
	}
	return n.room
}

// fill lets nothing more through, until the returned function is called.
func (n *network) fill() (drain func()) {
	full := make(chan struct{})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.room = full
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.room = nil
		close(full)
	}
}

func (n *network) breaks(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail = err
}

// check runs a test in a bubble. No call is left in its table.
func check(t *testing.T, run func(t *testing.T, table *Table, n *network)) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{frames: make(chan wire.Frame, 1000)}
		table := New("the server", n)
		run(t, table, n)
		require.Empty(t, table.mu.waiting)
		for range 100 {
			w := table.waiters.Get().(*waiter)
			require.Empty(t, w.reply, "a waiter that is used again has no reply of another call")
		}
	})
}

func answer(f wire.Frame) *wire.Frame { return (&wire.Reply{Body: f.Body}).Frame(f.ID) }

func TestRepliesReachTheirCallers(t *testing.T) {
	check(t, func(t *testing.T, table *Table, n *network) {
		first := table.Begin(t.Context(), &wire.Request{Op: wire.OpPut, Body: []byte("first")})
		second := table.Begin(t.Context(), &wire.Request{Op: wire.OpGet, Body: []byte("second")})
		posted := make(chan error, 2)
		table.Post(&wire.Request{Body: []byte("third")}, func(r *wire.Reply, err error) {
			require.Nil(t, r)
			posted <- err
		})
		a, b, c := <-n.frames, <-n.frames, <-n.frames
		require.Equal(t, []wire.FrameType{wire.FrameRequest, wire.FrameRequest}, []wire.FrameType{a.Type, c.Type})
		require.EqualValues(t, wire.OpPut, a.Op)
		require.False(t, first.Ready())
		table.Answer(&wire.Frame{Type: wire.FrameReply, ID: 99})
		table.Answer(answer(b))
		table.Answer(answer(a))
		table.Answer(answer(a)) // a second reply is dropped
		table.Answer(wire.ErrorReply(tqerr.New(tqerr.NotFound, "nothing here")).Frame(c.ID))
		require.True(t, first.Ready())
		for want, p := range map[string]interface {
			Wait(context.Context) (*wire.Reply, error)
		}{"first": first, "second": second} {
			reply, err := p.Wait(t.Context())
			require.NoError(t, err)
			require.Equal(t, want, string(reply.Body))
		}
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(<-posted))
		require.NoError(t, table.Notify(&wire.Request{Op: wire.OpRelease}))
		require.Equal(t, wire.FrameNotify, (<-n.frames).Type)
	})
}

func TestTheEndOfTheConnectionReachesAllCallers(t *testing.T) {
	check(t, func(t *testing.T, table *Table, n *network) {
		waiting := table.Begin(t.Context(), &wire.Request{})
		drain := n.fill()
		defer drain()
		late := table.Begin(t.Context(), &wire.Request{})
		posted := make(chan error, 1)
		table.Post(&wire.Request{}, func(_ *wire.Reply, err error) { posted <- err })
		released := 0
		for _, cause := range []error{errors.New("the first reason"), errors.New("the second")} {
			table.End(cause, func(lost error) {
				released++
				<-table.Done()
				require.False(t, waiting.Ready(), "what ends with the connection has ended before they hear of it")
				require.ErrorContains(t, lost, "the first reason")
			})
		}
		require.Equal(t, 1, released)
		for _, p := range []interface {
			Wait(context.Context) (*wire.Reply, error)
		}{waiting, late, table.Begin(t.Context(), &wire.Request{})} {
			_, err := p.Wait(t.Context())
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
			require.ErrorContains(t, err, "the connection to the server is gone: the first reason")
		}
		require.ErrorContains(t, <-posted, "the first reason")
		table.Post(&wire.Request{}, func(_ *wire.Reply, err error) { posted <- err })
		require.ErrorContains(t, <-posted, "the first reason")
	})
}

func TestACallWaitsForRoom(t *testing.T) {
	check(t, func(t *testing.T, table *Table, n *network) {
		drain := n.fill()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := table.Call(ctx, &wire.Request{})
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "no reply after 1m0s")
		p := table.Begin(t.Context(), &wire.Request{Body: []byte("patient")})
		done := make(chan error, 1)
		guard.Go("test: wait", func() {
			_, err := p.Wait(t.Context())
			done <- err
		})
		synctest.Wait()
		require.Empty(t, n.frames)
		table.Post(&wire.Request{Body: []byte("not limited")}, func(*wire.Reply, error) {})
		table.Answer(answer(<-n.frames))
		drain()
		f := <-n.frames
		require.Equal(t, "patient", string(f.Body))
		table.Answer(answer(f))
		require.NoError(t, <-done)
	})
}

func TestACallThatEndsFirstIsCalledOff(t *testing.T) {
	check(t, func(t *testing.T, table *Table, n *network) {
		ctx, cancel := context.WithCancel(t.Context())
		p := table.Begin(ctx, &wire.Request{})
		cancel()
		_, err := p.Wait(ctx)
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
		f, off := <-n.frames, <-n.frames
		require.Equal(t, wire.FrameCancel, off.Type)
		require.Equal(t, f.ID, off.ID)
		table.Answer(answer(f))
		_, err = table.Call(ctx, &wire.Request{})
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
		require.Empty(t, n.frames, "one that has ended sends nothing")
	})
}

func TestAFrameThatCannotBeSent(t *testing.T) {
	check(t, func(t *testing.T, table *Table, n *network) {
		posted := make(chan error, 1)
		for want, fails := range map[string]error{
			"too large": tqerr.New(tqerr.InvalidArgument, "too large"), "the connection to the server is gone": errors.New("broken pipe"),
		} {
			n.breaks(fails)
			_, err := table.Call(t.Context(), &wire.Request{})
			require.EqualError(t, err, want)
			table.Post(&wire.Request{}, func(_ *wire.Reply, err error) { posted <- err })
			require.EqualError(t, <-posted, want)
			require.EqualError(t, table.Notify(&wire.Request{}), want)
		}
	})
}

// Replies, deadlines and the end come in any order; each call ends once.
func TestEveryCallEndsOnce(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	check(t, func(t *testing.T, table *Table, n *network) {
		random := rand.New(rand.NewPCG(seed, 0))
		var callers sync.WaitGroup
		for range 200 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(20))*time.Millisecond)
			pause := time.Duration(random.IntN(20)) * time.Millisecond
			callers.Add(1)
			guard.Go("test: call", func() {
				defer callers.Done()
				defer cancel()
				time.Sleep(pause)
				reply, err := table.Call(ctx, &wire.Request{})
				require.Equal(t, reply == nil, err != nil)
			})
		}
		answered := make(chan struct{})
		guard.Go("test: answer", func() {
			defer close(answered)
			pauses := rand.New(rand.NewPCG(seed, 1))
			for f := range n.frames {
				time.Sleep(time.Duration(pauses.IntN(300)) * time.Microsecond)
				table.Answer(answer(f))
			}
		})
		time.Sleep(18 * time.Millisecond)
		n.breaks(errors.New("broken"))
		table.End(nil, func(error) {})
		callers.Wait()
		close(n.frames)
		<-answered
	})
}
