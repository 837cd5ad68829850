package controller

import (
	"context"
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// inlineMerge is the largest operand that is merged on the goroutine that reads the connection.
const inlineMerge = 1 << 20

// transform computes what is stored from what came: stored = merge(stored, new), or parser(new). While it runs it holds the
// cells in a write set, so that updates of one cell happen one after another and none is lost; readers see the old values.
func (c *call) transform(t *txn) (any, error) {
	s := c.s
	s.mu.Lock()
	set := t.cells()
	granted := s.mu.writes.enter(set)
	s.mu.Unlock()
	if granted && t.quick() {
		result, err := t.run(c.ctx, set, stageAtOnce)
		if code := tqerr.CodeOf(err); code != tqerr.ResourceExhausted && code != tqerr.Conflict {
			s.leave(set)
			t.abort()
			return result, err
		}
	}
	return c.later(func(ctx context.Context) (any, error) {
		defer t.abort() // the operand; what is stored is staged apart
		for {
			mine, err := s.claim(ctx, set, t.cells)
			if err != nil {
				return nil, err
			}
			s.mu.Unlock()
			result, err := t.run(ctx, mine, c.stageWhenRoom)
			s.leave(mine)
			if tqerr.CodeOf(err) != tqerr.Conflict {
				return result, err
			}
			if err := t.restage(ctx, c.stageWhenRoom); err != nil {
				return nil, err
			}
			s.mu.Lock()
			set = t.cells()
			s.mu.writes.enter(set)
			s.mu.Unlock()
		}
	})
}

// quick reports that the work is little and all of it is done here.
func (t *txn) quick() bool {
	return t.req.Merge != "" && len(t.req.Callable) == 0 && t.operandBytes() <= inlineMerge && !t.onDisk() &&
		!slices.ContainsFunc(t.shares, func(sh share) bool { return sh.unit.waits() })
}

func (s *Server) leave(set *writeSet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.writes.leave(set)
}

func (t *txn) operandBytes() int64 {
	n := int64(0)
	for i := range t.write.Columns {
		n += t.write.Columns[i].Bytes()
	}
	return n
}

// stager reserves memory for a result on a unit.
type stager func(ctx context.Context, u node, partition string, columns []schema.Column) (store.Staged, error)

func stageAtOnce(ctx context.Context, u node, partition string, columns []schema.Column) (store.Staged, error) {
	return u.Stage(ctx, partition, columns, nil)
}

// stageWhenRoom waits for memory to be freed.
func (c *call) stageWhenRoom(ctx context.Context, u node, partition string, columns []schema.Column) (staged store.Staged, err error) {
	err = c.whenRoom(ctx, nil, func() (err error) {
		staged, err = u.Stage(ctx, partition, columns, nil)
		return err
	})
	return staged, err
}

// run computes, stages and commits the results of all units, all or nothing. Conflict means that the rows have moved, or have
// come to mean samples that the write set does not hold.
func (t *txn) run(ctx context.Context, set *writeSet, stage stager) (any, error) {
	samples, err := t.samplesToTransform()
	if err != nil {
		return nil, err
	}
	results := make([]*unit.Transformed, len(t.shares))
	limit := 1
	if slices.ContainsFunc(t.shares, func(sh share) bool { return sh.unit.waits() }) {
		limit = len(t.shares)
	}
	err = together(ctx, len(t.shares), limit, func(ctx context.Context, i int) (err error) {
		results[i], err = t.transformShare(ctx, &t.shares[i], samples, stage)
		return t.s.named(t.write.Partition, err)
	})
	var reply *wire.PutReply
	if err == nil {
		err = t.prepareResults(ctx, results)
	}
	if err == nil {
		reply, err = t.store(set, results)
	}
	if err == nil {
		return reply, confirm(sharesOf(t.shares, results))
	}
	for _, r := range results {
		if r != nil {
			r.Staged.Abort()
		}
	}
	return nil, err
}

// samplesToTransform returns the samples of an update, in the order of its rows.
func (t *txn) samplesToTransform() (samples []schema.Sample, err error) {
	s := t.s
	s.mu.RLock()
	defer s.mu.RUnlock()
	units, err := s.mu.cat.Check(&t.write)
	switch {
	case err != nil || !t.req.Update:
		return nil, err
	case !slices.Equal(units, t.units):
		return nil, tqerr.New(tqerr.Conflict, "samples have moved since the update began")
	}
	return s.mu.cat.Existing(&t.write), nil
}

// store makes the results of all units visible.
func (t *txn) store(set *writeSet, results []*unit.Transformed) (*wire.PutReply, error) {
	stored := *t
	stored.write.Columns = stitchColumns(t.shares, results)
	stored.shares = sharesOf(t.shares, results)
	s := t.s
	s.mu.Lock()
	defer s.mu.Unlock()
	// Samples that existed when the set was granted cannot have changed; only when some did not, look again.
	if len(set.samples) < t.rows && !set.covers(t.cells()) {
		return nil, tqerr.New(tqerr.Conflict, "samples were created since the write began")
	}
	result, err := stored.applyLocked(replyColumns)
	if err != nil {
		return nil, err
	}
	for i := range stored.write.Columns {
		result.Columns = append(result.Columns, wire.Column(stored.write.Columns[i]))
	}
	return &wire.PutReply{Result: result}, nil
}

// sharesOf are shares with the results in the place of what is staged.
func sharesOf(shares []share, results []*unit.Transformed) []share {
	out := slices.Clone(shares)
	for i := range out {
		out[i].staged = results[i].Staged
	}
	return out
}

func (t *txn) transformShare(ctx context.Context, sh *share, samples []schema.Sample, stage stager) (*unit.Transformed, error) {
	staging := func(columns []schema.Column) (store.Staged, error) {
		return stage(ctx, unmetered(sh.unit), t.write.Partition, columns)
	}
	keys := pickRuns(t.write.Keys, sh.runs)
	if !t.req.Update {
		return sh.unit.Parse(ctx, &unit.ParseSpec{
			Partition: t.write.Partition, Keys: keys, Rows: sh.rows, Operands: t.operands(sh), Callable: t.req.Callable,
			Stage: staging, Staged: sh.staged, Wait: t.s.opts.PutWait, Dedup: t.req.Dedup,
		})
	}
	return sh.unit.Update(ctx, &unit.UpdateSpec{
		Partition: t.write.Partition, Samples: pickRuns(samples, sh.runs), Keys: keys, Operands: t.operands(sh),
		Merge: t.req.Merge, Callable: t.req.Callable, Stage: staging, Staged: sh.staged, Wait: t.s.opts.PutWait,
	})
}

// operands are the new values of a share: in the request, or in staged memory, whose bytes a unit elsewhere has itself.
func (t *txn) operands(sh *share) []unit.Operand {
	if sh.staged == nil {
		return t.operandsInline(sh)
	}
	out := make([]unit.Operand, len(sh.cols))
	for k := range out {
		out[k].Column = sh.cols[k]
		if !sh.unit.waits() {
			out[k].Bytes, _ = sh.unit.Bytes(sh.staged.Blocks()[k])
		}
	}
	return out
}

// operandsInline are the new values of a share that came with the request.
func (t *txn) operandsInline(sh *share) []unit.Operand {
	out := make([]unit.Operand, len(sh.cols))
	at := int64(0)
	for k := range t.write.Columns {
		column := &t.write.Columns[k]
		data := t.inline[at : at+column.Bytes()]
		at += int64(len(data))
		runs := sh.runsOf(k)
		if sh.rows == column.Rows && len(runs) == 2 && runs[0] == 0 && int(runs[1]) == column.Rows {
			out[k] = unit.Operand{Column: *column, Bytes: data}
			continue
		}
		offsets := column.Offsets()
		packed := make([]byte, 0, sh.cols[k].Bytes())
		for r := 0; r < len(runs); r += 2 {
			packed = append(packed, data[offsets[runs[r]]:offsets[runs[r+1]]]...)
		}
		out[k] = unit.Operand{Column: sh.cols[k], Bytes: packed}
	}
	return out
}

// pickRuns selects pairs [from, to) of a list; nil stays nil.
func pickRuns[T any](list []T, runs []int64) []T {
	if list == nil || (len(runs) == 2 && int(runs[1]-runs[0]) == len(list)) {
		return list
	}
	var out []T
	for r := 0; r < len(runs); r += 2 {
		out = append(out, list[runs[r]:runs[r+1]]...)
	}
	return out
}

// piece is a stretch of consecutive rows of a batch that lies in one share, at rows [at, at+n) of it.
type piece struct {
	from     int64
	share    int
	at, rows int
}

// pieces puts the stretches of all shares in row order.
func pieces(shares []share) []piece {
	var out []piece
	for k, sh := range shares {
		at := 0
		for r := 0; r < len(sh.runs); r += 2 {
			n := int(sh.runs[r+1] - sh.runs[r])
			out = append(out, piece{from: sh.runs[r], share: k, at: at, rows: n})
			at += n
		}
	}
	slices.SortFunc(out, func(a, b piece) int { return int(a.from - b.from) })
	return out
}

// stitchColumns joins the columns of all shares in row order.
func stitchColumns(shares []share, results []*unit.Transformed) []schema.Column {
	if len(results) == 1 {
		return results[0].Columns
	}
	out := make([]schema.Column, len(results[0].Columns))
	order := pieces(shares)
	for k := range out {
		b := schema.NewBuilder(results[0].Columns[k].Field)
		for _, p := range order {
			b.Append(results[p.share].Columns[k].Slice(p.at, p.at+p.rows))
		}
		out[k] = b.Column()
	}
	return out
}
