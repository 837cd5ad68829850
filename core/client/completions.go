package client

import (
	"encoding/binary"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
)

// Completions collects the results of requests for one event loop or one waiting thread. Its methods may be called from
// any goroutine; none blocks. The lock is a leaf.
type Completions struct {
	fd int // eventfd, readable while completions wait
	mu struct {
		sync.Mutex
		next    uint64
		started map[uint64]Started
		done    []Completion
		closed  bool
	}
}

// Completion is one finished request.
type Completion struct {
	Ticket uint64
	Result *Result
}

// NewCompletions makes an empty queue, which must be closed.
func NewCompletions() (*Completions, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "eventfd")
	}
	q := &Completions{fd: fd}
	q.mu.next = 1
	q.mu.started = map[uint64]Started{}
	return q, nil
}

// FD is an eventfd that is readable while completions wait.
func (q *Completions) FD() int { return q.fd }

// Wake makes FD readable although nothing may be finished: the library is out of use, and what somebody waits for may have
// died with it.
func (q *Completions) Wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.mu.closed {
		q.wakeLocked()
	}
}

// Submit starts a request and returns its ticket and what to wait for.
func (q *Completions) Submit(c *Client, req *Request) (uint64, int, error) {
	if c == nil {
		return 0, -1, tqerr.New(tqerr.InvalidState, "this session is a storage unit and sends no requests")
	}
	q.mu.Lock()
	ticket := q.mu.next
	q.mu.next++
	q.mu.started[ticket] = Started{Cancel: func() {}}
	q.mu.Unlock()
	started, err := c.Start(req, func(r *Result) { q.push(ticket, r) })
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
func (q *Completions) advance() {
	q.mu.Lock()
	var steps []Started
	var tickets []uint64
	for ticket, s := range q.mu.started {
		if s.Advance != nil {
			steps, tickets = append(steps, s), append(tickets, ticket)
		}
	}
	q.mu.Unlock()
	for k, s := range steps {
		if !s.Advance() {
			continue
		}
		q.mu.Lock()
		if _, runs := q.mu.started[tickets[k]]; runs { // by itself: its caller waits for FD of q from now on
			s.Advance = nil
			q.mu.started[tickets[k]] = s
		}
		q.mu.Unlock()
	}
}

func (q *Completions) push(ticket uint64, r *Result) {
	q.mu.Lock()
	defer q.mu.Unlock()
	quiet := q.mu.started[ticket].Advance != nil // its caller is here and takes it
	delete(q.mu.started, ticket)
	if q.mu.closed {
		discard(r)
		return
	}
	q.mu.done = append(q.mu.done, Completion{ticket, r})
	if !quiet {
		q.wakeLocked()
	}
}

// wakeLocked makes the eventfd readable.
func (q *Completions) wakeLocked() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(q.fd, one[:]) // fails only when 2^64-1 completions wait
}

// Take removes up to n completions. The eventfd counts completions; the reader has taken its count, so what stays behind
// is announced again.
func (q *Completions) Take(n int) []Completion {
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

// Cancel asks for the early end of a request; one that has ended is left alone.
func (q *Completions) Cancel(ticket uint64) {
	q.mu.Lock()
	cancel := q.mu.started[ticket].Cancel
	q.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// Close cancels what runs and gives back what the results that nobody takes hold.
func (q *Completions) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, s := range q.mu.started {
		s.Cancel()
		if s.Advance != nil {
			guard.Go("abandoned request", func() { finish(s.Advance) })
		}
	}
	for _, done := range q.mu.done {
		discard(done.Result)
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
func discard(r *Result) {
	for i := range r.Columns {
		Release(r.Columns[i].Token)
		Release(r.Columns[i].OffsetsToken)
	}
}
