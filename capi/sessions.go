package main

import (
	"context"
	"sync"

	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/client"
	"transferqueue/core/guard"
	"transferqueue/core/jobs"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
)

func init() { guard.OnPoison(wakeAll) }

// wakeAll lets every waiting thread and loop find out that the library is out of use.
func wakeAll() {
	for _, v := range handles.all() {
		if q, ok := v.(*client.Completions); ok {
			q.Wake()
		}
	}
}

// opening are the sessions that are being opened, by the key of their callers.
var opening = &attempts{cancels: map[uint64]context.CancelFunc{}}

type attempts struct {
	mu      sync.Mutex
	cancels map[uint64]context.CancelFunc
}

func (a *attempts) begin(key uint64) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	a.mu.Lock()
	a.cancels[key] = cancel
	a.mu.Unlock()
	return ctx, func() {
		cancel()
		a.mu.Lock()
		delete(a.cancels, key)
		a.mu.Unlock()
	}
}

func (a *attempts) abort(key uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if cancel := a.cancels[key]; cancel != nil {
		cancel()
	}
}

// openedSession is a session with a handle.
type openedSession struct{ *session.Session }

func openSession(config []byte) (*openedSession, []byte, error) {
	var cfg session.Config
	if err := msgpack.Unmarshal(config, &cfg); err != nil {
		return nil, nil, tqerr.Wrap(tqerr.InvalidArgument, err, "session options")
	}
	ctx, done := opening.begin(cfg.Key)
	defer done()
	s, err := session.Open(ctx, &cfg)
	if err != nil {
		return nil, nil, err
	}
	data, err := msgpack.Marshal(&s.Info)
	return &openedSession{s}, data, err
}

// jobsOf returns the Python work of a session's units.
func jobsOf(handle uint64) (*jobs.Queue, error) {
	s, err := get[*openedSession](handle)
	switch {
	case err != nil:
		return nil, tqerr.New(tqerr.InvalidState, "the session has ended")
	case s.Jobs == nil:
		return nil, tqerr.New(tqerr.InvalidState, "this process hosts no units")
	}
	return s.Jobs, nil
}

// descriptors lists what a forked child must close.
func descriptors() []int {
	var out []int
	for _, v := range handles.all() {
		switch v := v.(type) {
		case *openedSession:
			out = append(out, v.Descriptors()...)
		case *client.Completions:
			out = append(out, v.FD())
		}
	}
	return out
}

// tally is the body of tq_counters.
type tally struct {
	Handles     int   `msgpack:"handles"`
	ResultsHeld int   `msgpack:"results_held"`
	PoolLive    int64 `msgpack:"pool_live_bytes"`
	PoolIdle    int64 `msgpack:"pool_idle_bytes"`
	InlineLimit int64 `msgpack:"inline_limit_bytes"`
}

func counters(handle uint64) ([]byte, error) {
	out := tally{Handles: len(handles.all()), ResultsHeld: client.Held(), InlineLimit: client.InlineLimit}
	if handle != 0 {
		s, err := get[*openedSession](handle)
		if err != nil {
			return nil, err
		}
		out.PoolLive, out.PoolIdle = s.Pool.Stats()
	}
	return msgpack.Marshal(&out)
}
