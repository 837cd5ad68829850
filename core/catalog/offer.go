package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/tqerr"
)

// Offer is what a sampler that does not run under the lock picks from.
type Offer struct {
	Ready []int64 // ascending
	// Births numbers them in the order in which they came to be, with gaps where samples are that are not ready; nil when
	// the indexes themselves are such numbers.
	Births []int64
	Final  bool // nothing will ever be ready that is not now
}

// Offer lists the samples that a fetch may hand out. Read-only. It is nil for a partition that does not exist.
func (c *Catalog) Offer(r FetchRequest) (*Offer, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	p := c.partitions[r.Partition]
	if p == nil {
		return nil, nil
	}
	view := c.ready(p, r.Fields, r.Task)
	out := &Offer{Ready: view.All(), Final: view.Final()}
	if len(p.births.list) > 1 {
		out.Births = p.births.numbers(view.query, out.Ready)
	}
	return out, nil
}

// Deliver hands out what a sampler, whose name errors have, picked from an offer that was made a while ago. remembered says
// that the sampler had given this answer before. Samples that were cleared since the offer or since that answer are left out.
// It returns nil when nothing is left.
//
// Errors: Failed for a pick that no sampler may make, Conflict when a sample was consumed since the offer; nothing has
// changed then. note has the last word, as in FetchNoted; nil: nobody.
func (c *Catalog) Deliver(r FetchRequest, name string, offer *Offer, pick Pick, remembered bool, note func(Pick) error) (*Described, error) {
	p := c.partitions[r.Partition]
	if p == nil {
		return nil, nil
	}
	view := c.ready(p, r.Fields, r.Task)
	produced := bitset.Query{All: view.query.All}
	var seen bitset.Set
	for _, i := range pick.Sampled {
		_, offered := slices.BinarySearch(offer.Ready, i)
		switch {
		case i < 0, !offered && !remembered && !produced.Has(i):
			return nil, tqerr.New(tqerr.Failed, "%s returned sample %d, which is not ready in partition %q", name, i, r.Partition)
		case !seen.Add(i):
			return nil, tqerr.New(tqerr.Failed, "%s returned sample %d twice", name, i)
		case offered && !remembered && produced.Has(i) && !view.query.Has(i):
			return nil, tqerr.New(tqerr.Conflict, "sample %d of partition %q was consumed meanwhile", i, r.Partition)
		}
	}
	for _, i := range pick.Consumed {
		if _, offered := slices.BinarySearch(offer.Ready, i); i < 0 || !offered && !remembered && !p.active.Has(i) {
			return nil, tqerr.New(tqerr.Failed, "%s consumed sample %d, which does not exist in partition %q", name, i, r.Partition)
		}
	}
	return c.hand(p, &r, view, pick, note)
}

// Enough reports whether as many samples are ready as a fetch wants, or whether all are that ever will be. Read-only.
func (c *Catalog) Enough(r FetchRequest) bool {
	p := c.partitions[r.Partition]
	if p == nil {
		return false
	}
	view := c.ready(p, r.Fields, r.Task)
	return view.query.Count(r.N) >= r.N || view.Final()
}
