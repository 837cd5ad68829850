package catalog

import (
	"iter"
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Ready is what a sampler picks from: the samples that have all requested fields and that the task has not consumed. It is
// computed when it is asked for, and valid only during the call of the sampler.
type Ready interface {
	// Len returns their number.
	Len() int
	// First returns the n smallest indexes, ascending, or all when there are fewer.
	First(n int) []int64
	// All returns all indexes, ascending.
	All() []int64
	// Born yields all in the order in which the samples came to be.
	Born() iter.Seq[int64]
	// Groups returns count groups of n samples that came to be one right after another, the oldest groups first, or nil when
	// there are fewer. Groups do not overlap and may begin anywhere. In a partition that grows alone such samples have
	// consecutive indexes.
	Groups(n, count int) []int64
	// Without returns the same without some indexes.
	Without(indexes *bitset.Set) Ready
	// Tags returns the tags of an index as a msgpack map.
	Tags(index int64) []byte
	// Number returns a tag that is a number, otherwise when the sample has no such tag, and InvalidArgument when it is none.
	Number(index int64, tag string, otherwise float64) (float64, error)
	// Final reports that nothing will ever be ready that is not now: production was declared complete, and whatever exists
	// is ready or consumed.
	Final() bool
}

// SampleRequest is the request that a sampler serves.
type SampleRequest struct {
	N         int
	Partition string
	Task      string
	Sampling  []byte // msgpack map of sampling_config, nil: none
}

// Pick is what a sampler decides. Nothing sampled means that there are not enough.
type Pick struct {
	Sampled  []int64 // to hand out, in this order
	Consumed []int64 // that the task has consumed by that, which are usually the same
	End      bool    // there is nothing to hand out and never will be
}

// Sampler decides which samples a fetch hands out and which of them the task has consumed by that. Package sampler has
// the samplers. It is called with the catalog locked and must not call it.
type Sampler interface {
	// Check refuses a request that makes no sense, whatever is ready.
	Check(r SampleRequest) error
	// Sample picks samples. After an error nothing has changed.
	Sample(ready Ready, r SampleRequest) (Pick, error)
	// Cached reports whether Sample may answer the request however few samples are ready: from memory, or with an end.
	Cached(r SampleRequest) bool
}

// FetchRequest asks for N ready samples for a task.
type FetchRequest struct {
	Partition string
	Fields    []string
	N         int
	Task      string
	Sampling  []byte
}

func (r *FetchRequest) check() error {
	if r.Task == "" {
		return tqerr.New(tqerr.InvalidArgument, "fetch needs a task_name")
	}
	if r.N <= 0 {
		return tqerr.New(tqerr.InvalidArgument, "fetch: batch_size %d, want at least 1", r.N)
	}
	return nil
}

// Fetch hands out samples that have all fields, as the sampler chooses, and marks as consumed what the sampler says. It
// returns nil when there are not enough; then nothing has changed. An answer that a sampler remembered comes without the
// samples that were cleared since.
//
// Errors: InvalidArgument for a request without task or number; what the sampler returns.
func (c *Catalog) Fetch(r FetchRequest, s Sampler) (*Described, error) {
	return c.FetchNoted(r, s, nil)
}

// FetchNoted is Fetch with a last word: note is told what is about to be handed out, and an error of it is that of the fetch,
// by which the catalog has not changed.
func (c *Catalog) FetchNoted(r FetchRequest, s Sampler, note func(Pick) error) (*Described, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	request := SampleRequest{r.N, r.Partition, r.Task, r.Sampling}
	if err := s.Check(request); err != nil {
		return nil, err
	}
	p := c.partitions[r.Partition]
	if p == nil {
		return nil, nil
	}
	view := c.ready(p, r.Fields, r.Task)
	if view.query.Count(r.N) < r.N && !s.Cached(request) {
		return nil, nil
	}
	pick, err := s.Sample(view, request)
	if err != nil {
		return nil, err
	}
	return c.hand(p, &r, view, pick, note)
}

// hand carries a pick out.
func (c *Catalog) hand(p *partition, r *FetchRequest, view *readyView, pick Pick, note func(Pick) error) (*Described, error) {
	produced := bitset.Query{All: view.query.All}
	sampled := produced.Filter(pick.Sampled)
	if len(sampled) == 0 && !pick.End {
		return nil, nil
	}
	if note != nil {
		if err := note(pick); err != nil {
			return nil, err
		}
	}
	if pick.End {
		return &Described{End: true}, nil
	}
	taken := c.consume(p, r.Task, pick.Consumed)
	d := c.describe(sampled, p.registeredOf(r.Fields))
	d.Taken = Taken{r.Partition, r.Task, taken, c.resets}
	return d, nil
}

// Hand does again what a fetch has done that had such a pick.
func (c *Catalog) Hand(r FetchRequest, pick Pick) (*Described, error) {
	p, err := c.lookup(r.Partition)
	if err != nil {
		return nil, err
	}
	return c.hand(p, &r, c.ready(p, r.Fields, r.Task), pick, nil)
}

// consume marks samples as consumed and returns those that were not; what does not exist is ignored.
func (c *Catalog) consume(p *partition, task string, indexes []int64) (taken []schema.Sample) {
	done := p.consumed[task]
	if done == nil {
		done = &bitset.Set{}
		p.consumed[task] = done
	}
	for _, i := range indexes {
		if i >= 0 && p.active.Has(i) && done.Add(i) {
			taken = append(taken, c.sample(i))
		}
	}
	return taken
}

// Returnable is the part of what a fetch has taken that its task can have again. What was cleared since is not, and nothing is
// when a task has started over since: others may have what was given out then.
func (c *Catalog) Returnable(t Taken) (samples []schema.Sample) {
	p := c.partitions[t.Partition]
	if p == nil || p.consumed[t.Task] == nil || t.resets != c.resets {
		return nil
	}
	for _, s := range t.Samples {
		if c.owns(p, s) {
			samples = append(samples, s)
		}
	}
	return samples
}

// GiveBack lets a task have samples again that are Returnable, because nobody has got them.
func (c *Catalog) GiveBack(partition, task string, samples []schema.Sample) {
	p := c.partitions[partition]
	if p == nil || p.consumed[task] == nil {
		return
	}
	for _, s := range samples {
		p.consumed[task].Remove(s.Index)
	}
}

// readyView is the Ready of one fetch.
type readyView struct {
	c     *Catalog
	p     *partition
	query bitset.Query
}

var nobody bitset.Set

// ready prepares the view of a fetch; a field that was never written leaves nothing.
func (c *Catalog) ready(p *partition, fields []string, task string) *readyView {
	q := bitset.Query{All: []*bitset.Set{&p.active}}
	for _, name := range fields {
		if f := p.fields[name]; f != nil {
			q.All = append(q.All, &f.has)
		} else {
			q.All = append(q.All, &nobody)
		}
	}
	if done := p.consumed[task]; done != nil {
		q.Not = []*bitset.Set{done}
	}
	return &readyView{c, p, q}
}

func (v *readyView) Len() int { return v.query.Count(-1) }
func (v *readyView) First(n int) []int64 {
	return v.query.Append(make([]int64, 0, min(max(n, 0), pageSize)), max(n, 0))
}
func (v *readyView) All() []int64                { return v.query.Append(nil, -1) }
func (v *readyView) Born() iter.Seq[int64]       { return v.p.births.all(v.query) }
func (v *readyView) Groups(n, count int) []int64 { return v.p.births.groups(v.query, n, count) }
func (v *readyView) Tags(index int64) []byte     { return v.c.tagsOf(index) }

func (v *readyView) Without(indexes *bitset.Set) Ready {
	out := *v
	out.query.Not = append(slices.Clip(v.query.Not), indexes)
	return &out
}

func (v *readyView) Number(index int64, tag string, otherwise float64) (float64, error) {
	n, state := tagNumber(v.c.tags.get(index), tag)
	switch state {
	case tagMissing:
		return otherwise, nil
	case tagNoNumber:
		return 0, tqerr.New(tqerr.InvalidArgument, "partition %q: tag %q of sample %d is no plain number", v.p.name, tag, index)
	}
	return n, nil
}

func (v *readyView) Final() bool {
	if !v.p.complete {
		return false
	}
	open := bitset.Query{All: []*bitset.Set{&v.p.active}, Not: v.query.Not}
	return open.Count(-1) == v.query.Count(-1)
}
