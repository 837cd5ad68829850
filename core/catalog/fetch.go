package catalog

import (
	"transferqueue/core/internal/bitset"
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
	// Tags returns the tags of an index as a msgpack map.
	Tags(index int64) []byte
}

// SampleRequest is the request that a sampler serves.
type SampleRequest struct {
	N         int
	Partition string
	Task      string
	Sampling  []byte // msgpack map of sampling_config, nil: none
}

// Sampler decides which samples a fetch hands out and which of them the task has consumed by that. Package sampler has
// the samplers. It is called with the catalog locked and must not call it.
type Sampler interface {
	// Sample picks samples. An empty answer means that there are not enough.
	Sample(ready Ready, r SampleRequest) (sampled, consumed []int64, err error)
	// Cached reports whether Sample answers the request from memory, however few samples are ready.
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

// Fetch hands out samples that have all fields, as the sampler chooses, and marks as consumed what the sampler says. It
// returns nil when there are not enough; then nothing has changed. An answer that a sampler remembered comes without the
// samples that were cleared since.
//
// Errors: InvalidArgument for a request without task or number; what the sampler returns.
func (c *Catalog) Fetch(r FetchRequest, s Sampler) (*Described, error) {
	if r.Task == "" {
		return nil, tqerr.New(tqerr.InvalidArgument, "fetch needs a task_name")
	}
	if r.N <= 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "fetch: batch_size %d, want at least 1", r.N)
	}
	p := c.partitions[r.Partition]
	if p == nil {
		return nil, nil
	}
	view := c.ready(p, r.Fields, r.Task)
	request := SampleRequest{r.N, r.Partition, r.Task, r.Sampling}
	if view.query.Count(r.N) < r.N && !s.Cached(request) {
		return nil, nil
	}
	sampled, consumed, err := s.Sample(view, request)
	if err != nil {
		return nil, err
	}
	produced := bitset.Query{All: view.query.All}
	sampled = produced.Filter(sampled)
	if len(sampled) == 0 {
		return nil, nil
	}
	c.consume(p, r.Task, consumed)
	return c.describe(sampled, p.registeredOf(r.Fields)), nil
}

// consume marks samples as consumed; what does not exist is ignored.
func (c *Catalog) consume(p *partition, task string, indexes []int64) {
	done := p.consumed[task]
	if done == nil {
		done = &bitset.Set{}
		p.consumed[task] = done
	}
	for _, i := range indexes {
		if i >= 0 && p.active.Has(i) {
			done.Add(i)
		}
	}
}

// readyView is the Ready of one fetch.
type readyView struct {
	c     *Catalog
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
	return &readyView{c, q}
}

func (v *readyView) Len() int { return v.query.Count(-1) }
func (v *readyView) First(n int) []int64 {
	return v.query.Append(make([]int64, 0, min(max(n, 0), pageSize)), max(n, 0))
}
func (v *readyView) All() []int64            { return v.query.Append(nil, -1) }
func (v *readyView) Tags(index int64) []byte { return v.c.tagsOf(index) }
