package controller

import (
	"bytes"
	"context"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (c *call) commit() (any, error) {
	var r wire.TxnRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	t := c.client.takeTxn(r.Txn)
	if t == nil {
		return nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", r.Txn)
	}
	return c.apply(t)
}

func (c *call) abort() (any, error) {
	var r wire.TxnRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if t := c.client.takeTxn(r.Txn); t != nil { // its lane may be in use again
		t.abort()
	}
	c.client.callOff(c, r.Txn)
	c.observe(tqerr.OK)
	return nil, errLater
}

// apply makes a staged write visible, or hands it to what computes its bytes first.
func (c *call) apply(t *txn) (any, error) {
	c.samples, t.origin = t.rows, c.origin()
	if t.transforms() {
		return c.transform(t)
	}
	if t.writesDisk() {
		return c.later(func(ctx context.Context) (any, error) {
			if err := t.prepare(ctx); err != nil {
				return nil, err
			}
			return c.applyPrepared(t)
		})
	}
	return c.applyPrepared(t)
}

// applyPrepared makes visible what is staged, on disk too.
func (c *call) applyPrepared(t *txn) (any, error) {
	w := &instant{
		cells: t.cells,
		conflict: func(ctx context.Context) error {
			if err := t.restage(ctx, c.stageWhenRoom); err != nil {
				return err
			}
			return t.prepare(ctx)
		},
		giveUp: t.abort,
	}
	w.do = func() (any, error) {
		result, err := t.applyLocked(replyResult)
		if err != nil && tqerr.CodeOf(err) != tqerr.Conflict {
			t.abort()
		}
		if err != nil {
			return nil, err
		}
		reply := &wire.PutReply{Result: result}
		if confirms(t.shares) {
			w.rest = func(context.Context) (any, error) { return reply, confirm(t.shares) }
		}
		return reply, nil
	}
	return c.writing(w)
}

// restage moves staged rows to the units where they belong now: another client has created one of the keys meanwhile, or a
// sample was cleared and made anew.
func (t *txn) restage(ctx context.Context, stage stager) error {
	old := *t
	defer old.abort()
	t.shares = nil
	s := t.s
	rooms := s.rooms()
	s.mu.RLock()
	units, err := s.mu.cat.Check(&t.write)
	if err == nil {
		err = s.mu.cat.Place(units, t.from, t.storedSizes(), rooms)
	}
	s.mu.RUnlock()
	if err != nil {
		return s.explain(err)
	}
	t.units, t.shares = units, t.split(units)
	for i := range t.shares {
		sh := &t.shares[i]
		if len(old.shares) == 0 || old.shares[0].staged == nil {
			continue
		}
		if sh.staged, err = stage(ctx, sh.unit, t.write.Partition, sh.cols); err != nil {
			t.abort()
			return err
		}
	}
	if t.misplaced() {
		t.abort()
		t.shares, t.units, old.shares = old.shares, old.units, nil
		return t.restage(ctx, stage)
	}
	if err := t.copyFrom(ctx, &old); err != nil {
		t.abort()
		return err
	}
	return nil
}

// misplaced reports whether rows were staged where they do not belong any more. What is told to go elsewhere before anybody waits
// for it cannot keep a unit from becoming empty, or come to it when it is.
func (t *txn) misplaced() bool {
	if !t.s.cordoned.Load() || len(t.shares) == 0 || t.shares[0].staged == nil {
		return false
	}
	t.s.mu.RLock()
	defer t.s.mu.RUnlock()
	return tqerr.CodeOf(t.s.mu.cat.Settled(&t.write, t.units)) == tqerr.Conflict
}

// copyFrom copies staged bytes row by row from another staging of the same write.
func (t *txn) copyFrom(ctx context.Context, old *txn) error {
	t.s.mapped.RLock()
	defer t.s.mapped.RUnlock()
	if len(old.shares) == 0 || old.shares[0].staged == nil {
		return nil
	}
	sources := make([][][]byte, len(t.write.Columns)) // of each row
	for k := range sources {
		sources[k] = make([][]byte, t.rows)
	}
	err := eachRow(old.shares, func(sh *share) ([][]byte, error) { return sh.stagedBytes(ctx) }, func(k, row int, data []byte) {
		sources[k][row] = data
	})
	if err != nil {
		return err
	}
	var flushes []func(context.Context) error
	err = eachRow(t.shares, func(sh *share) ([][]byte, error) {
		blocks, flush, err := sh.toFill()
		flushes = append(flushes, flush)
		return blocks, err
	}, func(k, row int, data []byte) { copy(data, sources[k][row]) })
	for i := 0; err == nil && i < len(flushes); i++ {
		err = flushes[i](ctx)
	}
	return err
}

// eachRow gives the bytes of every row of every column of shares, whose blocks find returns.
func eachRow(shares []share, find func(*share) ([][]byte, error), give func(column, row int, data []byte)) error {
	blocks := make([][][]byte, len(shares))
	for i := range shares {
		var err error
		if blocks[i], err = find(&shares[i]); err != nil {
			return err
		}
	}
	for _, p := range pieces(shares) {
		sh := &shares[p.share]
		for k, data := range blocks[p.share] {
			offsets := sh.cols[k].Offsets()
			for i := range p.rows {
				at := rowIn(&sh.cols[k], p.at+i)
				give(k, int(p.from)+i, data[offsets[at]:offsets[at+1]])
			}
		}
	}
	return nil
}

// cells names what the write touches among the samples that exist. Called with mu held.
func (t *txn) cells() *writeSet {
	fields := make([]string, len(t.write.Columns))
	for i := range t.write.Columns {
		fields[i] = t.write.Columns[i].Field
	}
	return newWriteSet(t.write.Partition, fields, t.s.mu.cat.Existing(&t.write), false)
}

// applyLocked changes the catalog and commits the units. Called with mu held.
func (t *txn) applyLocked(reply uint8) (*wire.PutResult, error) {
	if err := t.reachable(); err != nil {
		return nil, err
	}
	change, err := t.s.notePutsLocked(reply, t)
	if err != nil {
		return nil, err
	}
	return t.commitLocked(change)
}

// reachable fails when a unit is gone on which something is staged.
func (t *txn) reachable() error {
	for _, sh := range t.shares {
		if sh.staged == nil {
			continue
		}
		if err := sh.unit.Lost(); err != nil {
			return err
		}
	}
	return nil
}

// commitLocked is the second half of applyLocked, which nothing but an invalid write can fail.
func (t *txn) commitLocked(change uint64) (*wire.PutResult, error) {
	t.write.Unwatched = len(t.s.mu.watches[t.write.Partition]) == 0
	applied, err := t.s.mu.cat.Apply(&t.write, t.units)
	if err != nil {
		return nil, t.s.noted(err)
	}
	for _, sh := range t.shares {
		if sh.staged == nil {
			continue
		}
		samples := applied.Samples
		if sh.rows != len(samples) {
			samples = make([]schema.Sample, 0, sh.rows)
			for r := 0; r < len(sh.runs); r += 2 {
				samples = append(samples, applied.Samples[sh.runs[r]:sh.runs[r+1]]...)
			}
		}
		store.CommitChange(sh.staged, samples, change)
	}
	t.s.changed(t.write.Partition, applied.Events)
	result := putResult(applied)
	if t.req.Brief && t.write.Tags != nil && slices.EqualFunc(applied.Tags, t.write.Tags, bytes.Equal) {
		result.Tags, result.AsSent = nil, true
	}
	t.s.doneLocked(t.origin, &wire.PutReply{Result: result})
	return result, nil
}

func putResult(applied *catalog.Applied) *wire.PutResult {
	result := &wire.PutResult{Fields: applied.Fields, Tags: someTags(applied.Tags)}
	result.Indexes, result.Generations = indexLists(applied.Samples)
	return result
}

// someTags returns nil when no row has a tag, which spares the client a thousand empty dicts.
func someTags(tags [][]byte) [][]byte {
	if slices.ContainsFunc(tags, func(tag []byte) bool { return len(tag) > 1 }) { // an empty map has one byte
		return tags
	}
	return nil
}

func indexLists(samples []schema.Sample) (wire.Ints, wire.Ints) {
	indexes, generations := make(wire.Ints, len(samples)), make(wire.Ints, len(samples))
	for i, s := range samples {
		indexes[i], generations[i] = s.Index, int64(s.Generation)
	}
	return indexes, generations
}
