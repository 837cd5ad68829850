package controller

import (
	"context"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (c *call) fetch(r *wire.MetaRequest) (any, error) {
	request := catalog.FetchRequest{Partition: r.Partition, Fields: r.Fields, N: r.BatchSize, Task: r.Task, Sampling: r.Sampling}
	return c.fetchBySampler(request)
}

func waitingForSamples(r *catalog.FetchRequest) string {
	return "waiting for enough samples of partition \"" + r.Partition + "\""
}

// fetchBySampler answers a fetch with whatever sampler the session has by then.
func (c *call) fetchBySampler(r catalog.FetchRequest) (any, error) {
	s := c.s
	var got *catalog.Described
	var failed error
	var python *sampler.Python
	try := func() bool {
		switch current := s.mu.sampler.(type) {
		case *sampler.Python:
			python = current
			return true
		case sampler.Picker:
			got, failed = s.mu.cat.FetchNoted(r, current, c.noteFetch(&r, current, nil))
			c.handedLocked(got)
			if got != nil && !current.Cached(catalog.SampleRequest{N: r.N, Partition: r.Partition, Task: r.Task, Sampling: r.Sampling}) {
				c.returnable(got.Taken)
			}
		default:
			failed = tqerr.New(tqerr.Internal, "sampler %s cannot pick", current.Name())
		}
		return got != nil || failed != nil
	}
	result := func() (any, error) {
		if python != nil {
			return c.later(func(ctx context.Context) (any, error) { return c.fetchByPython(ctx, r, python) })
		}
		return metaReply(got), failed
	}
	if !s.opts.Polling {
		return c.await(r.Partition, try, result, waitingForSamples(&r))
	}
	s.mu.Lock()
	try()
	s.mu.Unlock()
	return result()
}

// returnable has what a fetch hands out given back to its task when nobody gets the reply. A sampler that would answer the
// request from memory must keep it, as it gives the same again. Called with Server.mu held.
func (c *call) returnable(taken catalog.Taken) {
	s := c.s
	from := s.mu.cat
	c.undo = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.mu.cat != from { // a checkpoint was loaded
			return
		}
		record := &giveBackRecord{
			Origin: c.origin(), Partition: taken.Partition, Task: taken.Task, Samples: *wireSamples(from.Returnable(taken)),
		}
		// What cannot be written down stays consumed: the next life of the controller would hand it out again.
		if _, err := s.noteLocked(true, recordGiveBack, record); err == nil {
			s.giveBackLocked(record)
			s.changed(taken.Partition, nil)
		}
	}
}

// giveBackLocked does what a record says. Called with mu held.
func (s *Server) giveBackLocked(r *giveBackRecord) {
	s.mu.cat.GiveBack(r.Partition, r.Task, samplesOf(&r.Samples))
	lane, _ := wire.SplitSequence(r.Origin.Sequence)
	if lanes := s.mu.outcomes[r.Origin.Client]; r.Origin.Sequence != 0 && lanes[lane].sequence == r.Origin.Sequence {
		lanes[lane] = outcome{sequence: r.Origin.Sequence, reply: calledOff()}
	}
}

// asked is what a fetch knew when its sampler was asked.
type asked struct {
	changes uint64 // Server.mu.changes
	calls   uint64 // Python.Calls
}

// fetchByPython answers a fetch with a sampler that must not run under the lock. It is asked only when enough samples are
// ready, or when it may have answered another rank since.
func (c *call) fetchByPython(ctx context.Context, r catalog.FetchRequest, p *sampler.Python) (any, error) {
	s := c.s
	for {
		got, last, err := c.askPython(ctx, r, p)
		if got == nil && !s.samples(p) {
			return c.fetchBySampler(r)
		}
		if tqerr.CodeOf(err) == tqerr.Conflict {
			continue
		}
		if got != nil || err != nil || s.opts.Polling {
			return metaReply(got), err
		}
		s.mu.Lock()
		try := func() bool {
			return s.mu.sampler != sampler.Sampler(p) || s.mu.changes != last.changes && (s.mu.cat.Enough(r) || p.Calls() != last.calls)
		}
		met := try()
		var w *waiter
		if !met {
			w = s.parkLocked(ctx, r.Partition, try)
		}
		s.mu.Unlock()
		if !met {
			if err := s.until(ctx, w, r.Partition, waitingForSamples(&r)); err != nil {
				return nil, err
			}
		}
	}
}

// samples reports whether this is the sampler of the session.
func (s *Server) samples(p sampler.Sampler) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.sampler == p
}

// askPython has the sampler pick, and hands out what it picked; nil when there is not enough.
func (c *call) askPython(ctx context.Context, r catalog.FetchRequest, p *sampler.Python) (*catalog.Described, asked, error) {
	s := c.s
	done, err := p.Turn(ctx)
	if err != nil {
		return nil, asked{}, err
	}
	defer done()
	s.mu.RLock()
	last := asked{s.mu.changes, p.Calls()}
	offer, err := s.mu.cat.Offer(r)
	s.mu.RUnlock()
	if err != nil || offer == nil || len(offer.Ready) < r.N && last.calls == 0 && !offer.Final {
		return nil, last, err
	}
	request := sampler.Request{N: r.N, Partition: r.Partition, Task: r.Task, Sampling: r.Sampling}
	pick, remembered, err := p.Ask(ctx, request, offer)
	if err != nil {
		return nil, last, err
	}
	last.calls = p.Calls()
	var memory []byte
	if s.journal != nil && !remembered {
		// One that cannot say what it remembers begins anew after a restart.
		if memory, err = p.SaveInTurn(ctx); err != nil && ctx.Err() != nil {
			return nil, last, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.sampler != sampler.Sampler(p) {
		return nil, last, nil
	}
	got, err := s.mu.cat.Deliver(r, "the sampler "+p.Name(), offer, pick, remembered, c.noteFetch(&r, p, memory))
	c.handedLocked(got)
	return got, last, err
}
