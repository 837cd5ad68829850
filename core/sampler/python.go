package sampler

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// Python is a sampler that a Python thread runs, one call after the other. It is not called with the catalog locked: who
// serves a fetch takes a Turn, makes an offer, asks, delivers, and ends the turn. A call that takes longer than the limit, or
// than its fetch, is given up and its result dropped, and the next call is made by another thread.
//
// What happens to samples that were handed out is told to the object with the next call, in order and each thing once, also
// when a call is given up.
type Python struct {
	name  string
	id    uint64
	ship  []byte
	queue Runner
	limit time.Duration
	turn  chan struct{} // has an element while nobody has the turn
	calls atomic.Uint64 // that were answered with samples, and loads

	mu struct {
		sync.Mutex
		first []byte          // a state to load before anything else
		known map[string]bool // partitions that it was asked about; nil: all
		news  []newsBatch     // not known to have arrived; the last one may grow
		open  bool            // the last one was not sent yet
		next  uint64
	}
}

// Runner runs a job; a jobs.Queue.
type Runner interface {
	Run(ctx context.Context, job *jobs.Job) ([]jobs.Data, error)
	Recycle(columns []jobs.Data)
}

var ids atomic.Uint64

// NewPython makes one from the pickled object, which is loaded where the queue's threads are.
func NewPython(name string, pickled []byte, queue Runner, limit time.Duration) *Python {
	p := &Python{name: name, id: ids.Add(1), ship: pickled, queue: queue, limit: limit, turn: make(chan struct{}, 1)}
	p.turn <- struct{}{}
	p.mu.known = map[string]bool{}
	return p
}

// Name is the name of the class.
func (p *Python) Name() string { return p.name }

// Turn waits until no other call is made, and returns what ends the turn.
func (p *Python) Turn(ctx context.Context) (done func(), err error) {
	select {
	case <-p.turn:
		return func() { p.turn <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, tqerr.New(tqerr.CodeOf(ctx.Err()), "the sampler %s was busy with other calls", p.name)
	}
}

// Calls counts the answers that may have made it remember something.
func (p *Python) Calls() uint64 { return p.calls.Load() }

// call is the request of a job, read by python/transfer_queue/_sampler_jobs.py.
type call struct {
	Sampler   uint64
	Method    string // "sample", "save" or "load"
	Partition string
	Task      string
	Size      int
	Sampling  []byte
	Ready     wire.Ints
	Births    wire.Ints // of the ready ones, nil: they are their own
	Final     bool
	State     []byte
	LimitMS   int64
	News      []newsBatch
}

// newsBatch is what happened to one partition.
type newsBatch struct {
	Number    uint64
	Partition string
	Gone      bool      // the whole partition; what follows is younger
	Cleared   wire.Ints // samples
	Reset     wire.Strings
}

// result is what a job brings.
type result struct {
	Remembered bool
	Sampled    wire.Ints
	Consumed   wire.Ints
	End        bool
	State      []byte
}

// Ask has the object pick from what is ready. remembered says that it has given this answer before. Who asks has the turn.
//
// Errors: what the object raised, as Failed or InvalidArgument; DeadlineExceeded and Cancelled.
func (p *Python) Ask(ctx context.Context, r Request, offer *catalog.Offer) (pick Pick, remembered bool, err error) {
	p.mu.Lock()
	first := p.mu.first
	if p.mu.known != nil {
		p.mu.known[r.Partition] = true
	}
	p.mu.Unlock()
	if first != nil {
		if err := p.LoadInTurn(ctx, first); err != nil {
			return Pick{}, false, err
		}
	}
	out, err := p.call(ctx, &call{
		Method: "sample", Partition: r.Partition, Task: r.Task, Size: r.N, Sampling: r.Sampling,
		Ready: offer.Ready, Births: offer.Births, Final: offer.Final,
	})
	if err != nil {
		return Pick{}, false, err
	}
	if len(out.Sampled) > 0 || out.End {
		p.calls.Add(1)
	}
	return Pick{Sampled: out.Sampled, Consumed: out.Consumed, End: out.End}, out.Remembered, nil
}

// call runs one method.
func (p *Python) call(ctx context.Context, c *call) (*result, error) {
	limited, cancel := context.WithTimeout(ctx, p.limit)
	defer cancel()
	begun := time.Now()
	c.Sampler, c.News = p.id, p.unsent()
	c.LimitMS = p.limit.Milliseconds()
	if deadline, ok := limited.Deadline(); ok {
		c.LimitMS = max(time.Until(deadline).Milliseconds(), 1)
	}
	body, err := wire.Marshal(c)
	if err != nil {
		return nil, err
	}
	columns, err := p.queue.Run(limited, &jobs.Job{Kind: jobs.Sample, Callable: p.ship, Partition: c.Partition, Request: body, Rows: 1})
	switch code := tqerr.CodeOf(err); code {
	case tqerr.OK:
	case tqerr.DeadlineExceeded, tqerr.Cancelled:
		return nil, tqerr.New(code, "the sampler %s gave no answer within %s", p.name, time.Since(begun).Round(time.Millisecond))
	case tqerr.Failed, tqerr.InvalidArgument:
		p.arrived(c.News)
		return nil, tqerr.Wrap(code, err, "the sampler %s failed in %s", p.name, c.Method)
	default:
		return nil, err
	}
	p.arrived(c.News)
	defer p.queue.Recycle(columns)
	if len(columns) != 1 || columns[0].Column.Rows != 1 {
		return nil, tqerr.New(tqerr.Internal, "the sampler %s gave %d columns, want one object", p.name, len(columns))
	}
	out := &result{}
	if err := wire.Unmarshal(columns[0].Bytes, out); err != nil {
		return nil, tqerr.Wrap(tqerr.Internal, err, "the answer of the sampler %s", p.name)
	}
	return out, nil
}

// tell makes something known with the next call.
func (p *Python) tell(partition string, change func(*newsBatch)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.known != nil && !p.mu.known[partition] {
		return
	}
	if last := len(p.mu.news) - 1; !p.mu.open || last < 0 || p.mu.news[last].Partition != partition {
		p.mu.next++
		p.mu.news = append(p.mu.news, newsBatch{Number: p.mu.next, Partition: partition})
		p.mu.open = true
	}
	change(&p.mu.news[len(p.mu.news)-1])
}

// unsent returns a copy of what has to be told.
func (p *Python) unsent() []newsBatch {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.open = false
	return slices.Clone(p.mu.news)
}

// arrived forgets what was told.
func (p *Python) arrived(told []newsBatch) {
	if len(told) == 0 {
		return
	}
	last := told[len(told)-1].Number
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.news = slices.DeleteFunc(p.mu.news, func(n newsBatch) bool { return n.Number <= last })
}

// Cleared tells that samples of a partition are gone.
func (p *Python) Cleared(partition string, indexes []int64) {
	if len(indexes) > 0 {
		p.tell(partition, func(n *newsBatch) { n.Cleared = append(n.Cleared, indexes...) })
	}
}

// Reset tells that the consumption of a task was forgotten, or with "" that of all.
func (p *Python) Reset(partition, task string) {
	p.tell(partition, func(n *newsBatch) {
		if !slices.Contains(n.Reset, task) {
			n.Reset = append(n.Reset, task)
		}
	})
}

// ClearPartition tells that a partition is gone.
func (p *Python) ClearPartition(partition string) {
	p.tell(partition, func(n *newsBatch) { *n = newsBatch{Number: n.Number, Partition: partition, Gone: true} })
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.mu.known, partition)
}

// savedPython is the saved form, a message of package wire.
type savedPython struct {
	Sampler string
	State   []byte
}

// Save asks the object for its state. It waits for a call that is made, so the catalog must not be locked.
func (p *Python) Save() ([]byte, error) {
	var out []byte
	err := p.inTurn(func(ctx context.Context) (err error) {
		out, err = p.SaveInTurn(ctx)
		return err
	})
	return out, err
}

// SaveInTurn is Save for who has the turn, which ensures that no pick is on its way.
func (p *Python) SaveInTurn(ctx context.Context) ([]byte, error) {
	out, err := p.call(ctx, &call{Method: "save"})
	if err != nil {
		return nil, err
	}
	return wire.Marshal(&savedPython{p.name, out.State})
}

// Load gives the object a state; see Save. InvalidArgument for the state of a sampler of another class.
func (p *Python) Load(state []byte) error {
	return p.inTurn(func(ctx context.Context) error { return p.LoadInTurn(ctx, state) })
}

// LoadInTurn is Load for who has the turn.
func (p *Python) LoadInTurn(ctx context.Context, state []byte) error {
	var saved savedPython
	if err := wire.Unmarshal(state, &saved); err != nil {
		return tqerr.Wrap(tqerr.InvalidArgument, err, "state of the sampler %s", p.name)
	}
	if saved.Sampler != p.name {
		return tqerr.New(tqerr.InvalidArgument, "state of a sampler %q, want %q", saved.Sampler, p.name)
	}
	if _, err := p.call(ctx, &call{Method: "load", State: saved.State}); err != nil {
		return err
	}
	p.calls.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.known, p.mu.first = nil, nil
	return nil
}

// Restore gives the object a state before its first call.
func (p *Python) Restore(state []byte) {
	p.calls.Add(1) // so that it is asked for what it may remember
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.first = state
}

func (p *Python) inTurn(do func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*p.limit)
	defer cancel()
	done, err := p.Turn(ctx)
	if err != nil {
		return err
	}
	defer done()
	return do(ctx)
}
