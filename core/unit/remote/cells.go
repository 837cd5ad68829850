package remote

import (
	"context"
	"sync/atomic"
	"time"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// staged is a write on the unit that is not visible yet. It implements store.Staged.
type staged struct {
	u      *Unit
	number uint64
	blocks []store.Block
	writes bool // it has to be prepared
	ended  atomic.Bool
	commit *answer // to the commit
	cells  Cells   // that it writes, when it is committed
}

// Blocks implements store.Staged. The result of a transformation has none.
func (s *staged) Blocks() []store.Block { return s.blocks }

// Commit implements store.Staged.
func (s *staged) Commit(samples []schema.Sample) { s.CommitChange(samples, 0) }

// CommitChange implements store.Numbered.
func (s *staged) CommitChange(samples []schema.Sample, change uint64) {
	if !s.ended.Swap(true) {
		s.cells.Samples = samples
		s.commit = s.u.mustPost(s, wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: s.number, Samples: wireSamples(samples), Change: change})
	}
}

// Txn implements store.Numbered.
func (s *staged) Txn() uint64 { return s.number }

// OnDisk implements store.Numbered. It does not matter: the unit lives on.
func (s *staged) OnDisk() bool { return false }

// Confirms implements store.Confirmer.
func (s *staged) Confirms() bool { return s.u.Durable() }

// Confirm implements store.Confirmer. It waits for the answer of the unit.
func (s *staged) Confirm() error {
	if s.commit == nil {
		return nil
	}
	return s.commit.wait(s.u.ctx)
}

// Abort implements store.Staged.
func (s *staged) Abort() {
	if !s.ended.Swap(true) {
		s.u.post(wire.OpUnitAbort, &wire.TxnRequest{Txn: s.number}, nil)
	}
}

// Writes implements store.Preparer. A result of a transformation is prepared by the unit before it answers.
func (s *staged) Writes() bool { return s.writes }

// Prepare implements store.Preparer. It waits for the unit, which stops when the write is aborted.
func (s *staged) Prepare(ctx context.Context) error { return s.prepare(ctx, false) }

// PrepareAndShed implements store.Shedder.
func (s *staged) PrepareAndShed(ctx context.Context) error { return s.prepare(ctx, true) }

func (s *staged) prepare(ctx context.Context, shed bool) error {
	if !s.writes {
		return nil
	}
	a := s.u.post(wire.OpUnitPrepare, &wire.UnitPrepareRequest{Txn: s.number, Shed: shed}, nil)
	err := a.wait(ctx)
	s.writes = err != nil
	return err
}

// Stage reserves memory for columns, and fills it when payload, which has the bytes of all columns, is not nil.
func (u *Unit) Stage(ctx context.Context, partition string, columns []schema.Column, payload []byte) (store.Staged, error) {
	return u.stage(ctx, columns, &wire.UnitStageRequest{Partition: partition, Filled: payload != nil}, payload)
}

// StageOnDisk is Stage for a batch that goes to disk as a whole.
func (u *Unit) StageOnDisk(ctx context.Context, partition string, columns []schema.Column) (store.Staged, error) {
	return u.stage(ctx, columns, &wire.UnitStageRequest{Partition: partition, OnDisk: true}, nil)
}

func (u *Unit) stage(ctx context.Context, columns []schema.Column, req *wire.UnitStageRequest, payload []byte) (store.Staged, error) {
	s := &staged{u: u, number: u.numbers.Add(1), cells: cellsOf(req.Partition, columns)}
	req.Txn, req.Columns = s.number, wireColumns(columns)
	a := u.post(wire.OpUnitStage, req, payload)
	if err := a.wait(ctx); err != nil {
		switch {
		case ctx.Err() != nil:
			s.Abort()
		case tqerr.CodeOf(err) == tqerr.ResourceExhausted:
			_ = u.Sync(ctx) // a refusal does not say what the unit holds, and placement should not ask it again at once
			u.listen()
		}
		return nil, err
	}
	if len(a.reply.Blocks) != len(columns) {
		s.Abort()
		return nil, tqerr.New(tqerr.Corruption, "unit %q: %d blocks for %d columns", u.at.Name, len(a.reply.Blocks), len(columns))
	}
	s.writes = a.reply.Writes
	s.blocks = make([]store.Block, len(columns))
	for i, b := range a.reply.Blocks {
		s.blocks[i] = store.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size}
	}
	return s, nil
}

// lease is a number by which the unit knows what it has leased.
type lease struct {
	u       *Unit
	number  uint64
	columns []store.Leased
	ended   atomic.Bool
}

// Columns implements store.Lease.
func (l *lease) Columns() []store.Leased { return l.columns }

// Release implements store.Lease.
func (l *lease) Release() {
	if !l.ended.Swap(true) {
		l.u.release([]int64{int64(l.number)})
	}
}

func (u *Unit) release(numbers []int64) {
	u.post(wire.OpUnitRelease, &wire.ReleaseRequest{Leases: numbers}, nil)
}

// Piece reads bytes of a lease, as store.Streamer does.
func (u *Unit) Piece(ctx context.Context, l store.Lease, column int, offset int64, sum uint32, to []byte) (uint32, error) {
	a := u.post(wire.OpUnitPiece, &wire.UnitPieceRequest{
		Lease: l.(*lease).number, Column: column, Offset: offset, Size: int64(len(to)), Sum: sum,
	}, nil)
	if err := a.wait(ctx); err != nil {
		return 0, err
	}
	if err := damagedIn("", &a.reply); err != nil {
		return 0, err
	}
	if len(a.payload) != len(to) {
		return 0, tqerr.New(tqerr.Corruption, "unit %q: %d bytes, asked for %d", u.at.Name, len(a.payload), len(to))
	}
	copy(to, a.payload)
	return a.reply.Sum, nil
}

// reading is a read in line.
type reading struct {
	*answer
	query *unit.Query
	first uint64 // number of the first lease
}

// Read asks for cells. A cell that is not there is a *store.MissingError of Wait.
func (u *Unit) Read(q *unit.Query) unit.Reading {
	leases := uint64(1)
	if q.Apart {
		leases = uint64(len(q.Fields))
	}
	first := u.numbers.Add(leases) - leases + 1
	return &reading{query: q, first: first, answer: u.post(wire.OpUnitRead, &wire.UnitReadRequest{
		Lease: first, Partition: q.Partition, Fields: q.Fields, Samples: wireSamples(q.Samples), Apart: q.Apart, Inline: q.Inline, Keep: q.Keep,
		Later: q.Later,
	}, nil)}
}

// Ready implements unit.Reading.
func (r *reading) Ready() bool { return r.ready() }

// Wait implements unit.Reading.
func (r *reading) Wait(ctx context.Context) (*unit.Cells, error) {
	if err := r.wait(ctx); err != nil {
		if ctx.Err() != nil {
			r.giveUp()
		}
		return nil, err
	}
	if m := r.reply.Missing; m != nil {
		return nil, &store.MissingError{
			Field: m.Field, Sample: schema.Sample{Index: m.Index, Generation: uint32(m.Generation)}, Stale: m.Stale,
		}
	}
	if err := damagedIn(r.query.Partition, &r.reply); err != nil {
		return nil, err
	}
	cells := &unit.Cells{Filled: r.reply.Filled, Payload: r.payload}
	for i := range r.reply.Columns {
		cells.Columns = append(cells.Columns, leasedOf(&r.reply.Columns[i]))
	}
	if err := r.check(cells); err != nil {
		r.giveUp()
		return nil, err
	}
	switch {
	case cells.Filled && !r.query.Keep:
	case r.query.Apart:
		for i := range cells.Columns {
			cells.Leases = append(cells.Leases, &lease{u: r.u, number: r.first + uint64(i), columns: cells.Columns[i : i+1]})
		}
	default:
		cells.Leases = []store.Lease{&lease{u: r.u, number: r.first, columns: cells.Columns}}
	}
	return cells, nil
}

// giveUp ends the leases that the read gets or has got.
func (r *reading) giveUp() {
	numbers := []int64{int64(r.first)}
	if r.query.Apart {
		for i := 1; i < len(r.query.Fields); i++ {
			numbers = append(numbers, int64(r.first)+int64(i))
		}
	}
	r.u.release(numbers)
}

// check refuses an answer that does not fit to the question: it would be cut at wrong places.
func (r *reading) check(cells *unit.Cells) error {
	bad := len(cells.Columns) != len(r.query.Fields)
	total := int64(0)
	for i := range cells.Columns {
		c := &cells.Columns[i]
		rows, size := 0, int64(0)
		for _, run := range c.Runs {
			rows, size = rows+run.Rows, size+run.Block.Size
		}
		bad = bad || c.Column.Rows != rows || rows != len(r.query.Samples) || c.Column.Bytes() != size
		total += size
	}
	if bad || (cells.Filled && total != int64(len(cells.Payload))) {
		return tqerr.New(tqerr.Corruption, "unit %q: what it sent is not what was asked for", r.u.at.Name)
	}
	return nil
}

// damagedIn is the error about a cell that an answer names, or nil.
func damagedIn(partition string, reply *wire.UnitReply) error {
	d := reply.Damaged
	if d == nil {
		return nil
	}
	return &store.DamagedError{
		Partition: partition, Field: d.Field, Sample: schema.Sample{Index: d.Index, Generation: uint32(d.Generation)},
		Cause: tqerr.New(tqerr.Corruption, "%s", d.Cause),
	}
}

func leasedOf(c *wire.UnitColumn) store.Leased {
	out := store.Leased{Column: schema.Column(c.Column), Runs: make([]store.Run, len(c.Runs))}
	for i, run := range c.Runs {
		b := run.Block
		out.Runs[i] = store.Run{Rows: run.Rows, Block: store.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size}, OnDisk: run.OnDisk}
	}
	return out
}

// Delete removes cells; fields nil means all. change is the number of the change in the controller's journal, 0: none.
func (u *Unit) Delete(partition string, fields []string, samples []schema.Sample, change uint64) unit.Deleting {
	return u.post(wire.OpUnitDelete, &wire.UnitDeleteRequest{Partition: partition, Fields: fields, Samples: wireSamples(samples), Change: change}, nil)
}

// Update computes merge(stored, operand) for every cell on the unit and stages the results there.
func (u *Unit) Update(ctx context.Context, spec *unit.UpdateSpec) (*unit.Transformed, error) {
	return u.transform(ctx, spec.Operands, spec.Staged, &wire.UnitTransformRequest{
		Partition: spec.Partition, Samples: wireSamples(spec.Samples), Keys: spec.Keys, Rows: len(spec.Samples), Update: true,
		Merge: spec.Merge, Callable: spec.Callable, WaitMS: spec.Wait.Milliseconds(),
	})
}

// Parse runs a data parser on the unit and stages what it returns there.
func (u *Unit) Parse(ctx context.Context, spec *unit.ParseSpec) (*unit.Transformed, error) {
	return u.transform(ctx, spec.Operands, spec.Staged, &wire.UnitTransformRequest{
		Partition: spec.Partition, Keys: spec.Keys, Rows: spec.Rows, Callable: spec.Callable, WaitMS: spec.Wait.Milliseconds(),
		Dedup: spec.Dedup,
	})
}

func (u *Unit) transform(ctx context.Context, operands []unit.Operand, at store.Staged, req *wire.UnitTransformRequest) (*unit.Transformed, error) {
	var payload []byte
	for i := range operands {
		req.Columns = append(req.Columns, wire.Column(operands[i].Column))
		if at == nil {
			payload = append(payload, operands[i].Bytes...)
		}
	}
	if at, ok := at.(*staged); ok {
		req.Operand = at.number
	}
	result := &staged{u: u, number: u.numbers.Add(1)}
	req.Txn = result.number
	timeout := time.Duration(0)
	if deadline, limited := ctx.Deadline(); limited {
		timeout = max(time.Until(deadline), time.Millisecond)
	}
	a := u.postFor(timeout, wire.OpUnitTransform, req, payload)
	if err := a.waitOut(ctx, result.Abort); err != nil {
		return nil, err
	}
	if err := damagedIn(req.Partition, &a.reply); err != nil {
		return nil, err
	}
	result.cells.Partition = req.Partition
	for i := range req.Columns {
		result.cells.Fields = append(result.cells.Fields, req.Columns[i].Field)
	}
	out := &unit.Transformed{Staged: result}
	for i := range a.reply.Columns {
		out.Columns = append(out.Columns, schema.Column(a.reply.Columns[i].Column))
	}
	if len(out.Columns) != len(operands) {
		result.Abort()
		return nil, tqerr.New(tqerr.Corruption, "unit %q: %d columns for %d", u.at.Name, len(out.Columns), len(operands))
	}
	return out, nil
}

// waitOut is wait for work that the unit ends by itself when time is over, and tells why it has not come to an end; so it
// waits a moment longer for that. stop calls the work off.
func (a *answer) waitOut(ctx context.Context, stop func()) error {
	ended := a.wait(ctx)
	if ctx.Err() == nil {
		return ended
	}
	timer := time.NewTimer(endGrace)
	defer timer.Stop()
	if tqerr.CodeOf(ctx.Err()) != tqerr.DeadlineExceeded {
		stop()
	}
	select {
	case <-a.done:
		if a.err != nil && tqerr.CodeOf(a.err) != tqerr.Cancelled {
			ended = a.err
		}
	case <-timer.C:
	}
	stop()
	if ended == nil {
		ended = unit.Ended(ctx, "waiting for unit \""+a.u.at.Name+"\"")
	}
	return ended
}

// endGrace is less than what a client waits for an answer after the time that it gave.
const endGrace = 100 * time.Millisecond
