package main

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
	"transferqueue/core/guard"
	"transferqueue/core/jobs"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
)

// queue collects completions for one event loop or one waiting thread.
type queue struct {
	fd int // eventfd, readable while completions wait
	mu struct {
		sync.Mutex
		next    uint64
		started map[uint64]client.Started
		done    []completion
		closed  bool
	}
}

type completion struct {
	ticket uint64
	result *client.Result
}

func init() { guard.OnPoison(wakeAll) }

// wakeAll lets every waiting thread and loop find out that the library is out of use: the request it waits for may have
// died in the panic.
func wakeAll() {
	for _, v := range handles.all() {
		if q, ok := v.(*queue); ok {
			q.mu.Lock()
			if !q.mu.closed {
				q.wakeLocked()
			}
			q.mu.Unlock()
		}
	}
}

func newQueue() (*queue, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "eventfd")
	}
	q := &queue{fd: fd}
	q.mu.next = 1
	q.mu.started = map[uint64]client.Started{}
	return q, nil
}

// submit starts a request and returns its ticket and what to wait for.
func (q *queue) submit(c *client.Client, req *client.Request) (uint64, int, error) {
	if c == nil {
		return 0, -1, tqerr.New(tqerr.InvalidState, "this session is a storage unit and sends no requests")
	}
	q.mu.Lock()
	ticket := q.mu.next
	q.mu.next++
	q.mu.started[ticket] = client.Started{Cancel: func() {}}
	q.mu.Unlock()
	started, err := c.Start(req, func(r *client.Result) { q.push(ticket, r) })
	q.mu.Lock()
	defer q.mu.Unlock()
	if err != nil {
		delete(q.mu.started, ticket)
		return 0, q.fd, err
	}
	if _, running := q.mu.started[ticket]; running {
		q.mu.started[ticket] = started
	}
	if started.Advance != nil {
		return ticket, started.FD, nil
	}
	return ticket, q.fd, nil
}

// advance lets the caller's thread finish what it waited for itself.
func (q *queue) advance() {
	q.mu.Lock()
	var steps []func() bool
	for _, s := range q.mu.started {
		if s.Advance != nil {
			steps = append(steps, s.Advance)
		}
	}
	q.mu.Unlock()
	for _, step := range steps {
		step()
	}
}

func (q *queue) push(ticket uint64, r *client.Result) {
	q.mu.Lock()
	defer q.mu.Unlock()
	quiet := q.mu.started[ticket].Advance != nil // its caller is here and takes it
	delete(q.mu.started, ticket)
	if q.mu.closed {
		discard(r)
		return
	}
	q.mu.done = append(q.mu.done, completion{ticket, r})
	if !quiet {
		q.wakeLocked()
	}
}

// wakeLocked makes the eventfd readable.
func (q *queue) wakeLocked() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(q.fd, one[:]) // fails only when 2^64-1 completions wait
}

// take removes up to n completions. The eventfd counts completions; the reader has taken its count, so what stays behind
// is announced again.
func (q *queue) take(n int) []completion {
	q.advance()
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, len(q.mu.done))
	out := q.mu.done[:n:n]
	q.mu.done = q.mu.done[n:]
	if len(q.mu.done) > 0 {
		q.wakeLocked()
	}
	return out
}

func (q *queue) cancel(ticket uint64) {
	q.mu.Lock()
	cancel := q.mu.started[ticket].Cancel
	q.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

func (q *queue) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, s := range q.mu.started {
		s.Cancel()
		if s.Advance != nil {
			guard.Go("abandoned request", func() { finish(s.Advance) })
		}
	}
	for _, done := range q.mu.done {
		discard(done.result)
	}
	q.mu.done, q.mu.closed = nil, true
	return unix.Close(q.fd)
}

// finish brings a cancelled request to its end, which its connection shows at once.
func finish(advance func() bool) {
	for !advance() {
		time.Sleep(time.Millisecond)
	}
}

// discard gives back what a result that nobody takes holds.
func discard(r *client.Result) {
	for i := range r.Columns {
		client.Release(r.Columns[i].Token)
		client.Release(r.Columns[i].OffsetsToken)
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
		case *queue:
			out = append(out, v.fd)
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
