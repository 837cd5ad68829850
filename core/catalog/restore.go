package catalog

import (
	"transferqueue/core/internal/bitset"
	"transferqueue/core/tqerr"
)

// BirthOrder returns the order in which the samples of a partition came to be, for a checkpoint: triples of the first index of
// a stretch, the one behind its last, and the birth number of the first. Complete says that its production is. Read-only.
func (c *Catalog) BirthOrder(partition string) (triples []int64, complete bool) {
	p := c.partitions[partition]
	if p == nil {
		return nil, false
	}
	for _, s := range p.births.list {
		triples = append(triples, s.from, s.to, s.birth)
	}
	return triples, p.complete
}

// RestoreBirths sets the order of a partition whose samples are there. Without triples it is that of the indexes. Corruption
// when they do not fit the samples; nothing has changed then.
func (c *Catalog) RestoreBirths(partition string, triples []int64, complete bool) error {
	p, err := c.lookup(partition)
	if err != nil {
		return err
	}
	var fresh births
	if len(triples) == 0 {
		fresh.add(p.active.Members(nil), &p.active)
	} else if fresh, err = birthsOf(triples, &p.active); err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "partition %q: order of birth", partition)
	}
	p.births, p.complete = fresh, complete
	return nil
}

func birthsOf(triples []int64, active *bitset.Set) (b births, err error) {
	if len(triples)%3 != 0 {
		return b, tqerr.New(tqerr.Corruption, "%d numbers, want triples", len(triples))
	}
	limit := int64(0)
	for at := 0; at < len(triples); at += 3 {
		s := stretch{triples[at], triples[at+1], triples[at+2]}
		limit += s.to - s.from
		if s.from < 0 || s.to <= s.from || s.birth < 0 || s.to-s.from > maxStretch || limit > maxStretch {
			return b, tqerr.New(tqerr.Corruption, "stretch %v", s)
		}
		b.list = append(b.list, s)
		b.high = max(b.high, s.to)
		b.next = max(b.next, s.birth+s.to-s.from)
	}
	return b, b.verify(active)
}

// maxStretch bounds what a damaged checkpoint can make verify do.
const maxStretch = 1 << 31
