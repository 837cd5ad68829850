package controller

import (
	"context"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// movedPart is cells of samples that move which lie in one tier and go to one: fields of some of the samples. It has a lease of
// its own, or that of the samples when it is all of them.
type movedPart struct {
	leasedGroup
	own    bool // the lease
	rows   int  // how many of the samples
	tier   int  // where they lie
	onDisk bool // where they go
}

// giveUp ends the lease when it is its own.
func (p *movedPart) giveUp() {
	if p.own {
		p.leasedGroup.giveUp()
	}
}

// count adds the cells. A value that several samples share counts for each.
func (p *movedPart) count(c *drain.Counted) {
	c.Cells[p.tier] += int64(p.rows * len(p.Fields))
	for k := range p.cells.Columns {
		c.Bytes[p.tier] += p.cells.Columns[k].Column.Offsets()[p.rows]
	}
}

// tierMask says of each of the first rows of a leased column whether it lies on disk.
func tierMask(c *store.Leased, rows int) []byte {
	mask := make([]byte, 0, rows)
	for _, run := range c.Runs {
		for range min(run.Rows, rows-len(mask)) {
			if run.OnDisk {
				mask = append(mask, 1)
			} else {
				mask = append(mask, 0)
			}
		}
	}
	return mask
}

// plan divides the cells of the first rows of a group by tier: fields that lie alike stay together.
func (m *mover) plan(ctx context.Context, g *leasedGroup, rows int) ([]*movedPart, error) {
	if g.cells == nil {
		return nil, nil
	}
	byMask := map[string][]string{}
	var masks []string
	for k := range g.cells.Columns {
		mask := string(tierMask(&g.cells.Columns[k], rows))
		if byMask[mask] == nil {
			masks = append(masks, mask)
		}
		byMask[mask] = append(byMask[mask], g.Fields[k])
	}
	var parts []*movedPart
	for _, mask := range masks {
		for tier := range drain.NumTiers {
			var samples []schema.Sample
			for row := range rows {
				if int(mask[row]) == tier {
					samples = append(samples, g.Samples[row])
				}
			}
			if len(samples) > 0 {
				parts = append(parts, m.part(g, byMask[mask], samples, tier))
			}
		}
	}
	if len(parts) == 1 {
		parts[0].leasedGroup = *g
		return parts, nil
	}
	for _, p := range parts {
		p.own = true
		p.read()
	}
	var err error
	for _, p := range parts {
		if err == nil {
			err = m.lease(ctx, &p.leasedGroup)
		}
	}
	if err != nil {
		for _, p := range parts {
			p.giveUp()
		}
		return nil, err
	}
	return parts, nil
}

func (m *mover) part(g *leasedGroup, fields []string, samples []schema.Sample, tier int) *movedPart {
	p := &movedPart{tier: tier, rows: len(samples), onDisk: m.tierFor(tier) == drain.LocalDisk}
	p.leasedGroup = leasedGroup{Group: catalog.Group{Partition: g.Partition, Unit: g.Unit, Fields: fields, Samples: samples}, unit: g.unit}
	return p
}

// tierFor is where cells go that lie in a tier.
func (m *mover) tierFor(tier int) int {
	switch m.tiers {
	case toMemory:
		return drain.Memory
	case toDisk:
		return drain.LocalDisk
	}
	return tier
}

// copy stages copies of all parts on a unit, ready to be committed, or none. source tells that an error is not due to that unit.
func (m *mover) copy(ctx context.Context, to node, partition string, parts []*movedPart) (shares []share, source bool, err error) {
	to = unmetered(to)
	defer func() {
		for i := range shares {
			if sh := &shares[i]; err != nil && sh.staged != nil {
				sh.staged.Abort()
			}
		}
	}()
	stored := make([][][]int64, len(parts))
	for i, p := range parts {
		sh := share{unit: to, runs: []int64{0, int64(p.rows)}, rows: p.rows}
		sh.cols, stored[i] = p.toStage()
		if p.onDisk {
			sh.staged, err = to.StageOnDisk(ctx, partition, sh.cols)
		} else {
			sh.staged, err = to.Stage(ctx, partition, sh.cols, nil)
		}
		if err != nil {
			return shares, false, err
		}
		shares = append(shares, sh)
	}
	m.s.mapped.RLock()
	defer m.s.mapped.RUnlock()
	for i, p := range parts {
		if source, err = m.fill(ctx, &shares[i], p, stored[i]); err != nil {
			return shares, source, err
		}
	}
	return shares, false, nil
}

// toStage is the columns as they are staged, and which rows of each are stored; a row that several of the samples share is stored
// once.
func (p *movedPart) toStage() (columns []schema.Column, stored [][]int64) {
	columns, stored = make([]schema.Column, len(p.cells.Columns)), make([][]int64, len(p.cells.Columns))
	for k := range columns {
		leased := &p.cells.Columns[k]
		columns[k] = leased.Column.Slice(0, p.rows)
		if pairs, share := schema.StoredOnce(firstShared(leased.Runs), []int64{0, int64(p.rows)}); share != nil {
			columns[k] = selectRuns([]schema.Column{leased.Column}, pairs)[0]
			columns[k].Share, stored[k] = share, pairs
		}
	}
	return columns, stored
}

// fill copies the bytes of a part straight into the memory where they are staged, and writes to disk what goes there.
func (m *mover) fill(ctx context.Context, sh *share, p *movedPart, stored [][]int64) (source bool, err error) {
	blocks, flush, err := sh.toFill()
	if err != nil {
		return false, err
	}
	cursors := p.begin()
	for k := range cursors {
		to := blocks[k]
		put := func(bytes []byte) error {
			if len(bytes) > len(to) {
				return tqerr.New(tqerr.Corruption, "partition %q: field %q: more bytes than it said", p.Partition, p.Fields[k])
			}
			to = to[copy(to, bytes):]
			return nil
		}
		if err := p.writeColumn(ctx, k, &cursors[k], p.rows, slices.Clone(stored[k]), put); err != nil {
			return true, m.payloadError(ctx, m.cellError(&p.leasedGroup, err))
		}
	}
	if err := flush(ctx); err != nil {
		return false, err
	}
	return false, store.PrepareAndShed(ctx, sh.staged)
}
