package controller

import (
	"context"
	"errors"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// read is a get in progress: what was selected, and what each unit has found of it.
type read struct {
	s        *Server
	sel      *catalog.Selection
	shares   []share
	order    []piece
	readings []unit.Reading
	cells    []*unit.Cells // of each share
	later    bool          // what lies on disk is not loaded
}

func (r *read) release() {
	for _, cells := range r.cells {
		cells.Release()
	}
}

func (c *call) get() (any, error) {
	var req wire.GetRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	c.s.identify(req.Partition, req.Samples)
	r := &read{s: c.s}
	if err := r.begin(&req, c.remote, c.machine()); err != nil {
		return nil, err
	}
	if !r.waits(c.remote) {
		return c.found(c.ctx, r, &req)
	}
	return c.later(func(ctx context.Context) (any, error) { return c.found(ctx, r, &req) })
}

// begin resolves and puts the reads in line under the read lock, so that all rows and fields are of one moment. With views every
// field has leases of its own; a client that cannot map all of the memory has no use for that.
func (r *read) begin(req *wire.GetRequest, streams bool, machine string) (err error) {
	s := r.s
	s.mu.RLock()
	defer s.mu.RUnlock()
	if req.Samples != nil {
		r.sel, err = s.mu.cat.SelectSamples(samplesOf(req.Samples), req.Partition, req.Fields)
	} else {
		r.sel, err = s.mu.cat.SelectKeys(req.Partition, req.Keys, req.Fields, req.Strict)
	}
	if err != nil || len(r.sel.Fields) == 0 {
		return err
	}
	r.shares = (&txn{s: s}).split(r.sel.Units)
	for k := range r.shares {
		if err := r.shares[k].unit.Lost(); err != nil {
			return err
		}
	}
	r.order = pieces(r.shares)
	req.Views = req.Views && (!streams || r.mayView(machine))
	inline := req.Inline
	if req.Views {
		inline = -1
	}
	for k := range r.shares {
		r.readings = append(r.readings, r.shares[k].unit.Read(&unit.Query{
			Partition: req.Partition, Fields: r.sel.Fields, Samples: pickRuns(r.sel.Samples, r.shares[k].runs), Apart: req.Views,
			// Several units may have little each and much together.
			Inline: inline, Keep: len(r.shares) > 1, Later: r.later,
		}))
	}
	return nil
}

// waits reports that a unit has not answered yet, or may have to be asked for its memory, which streams need.
func (r *read) waits(streams bool) bool {
	return slices.ContainsFunc(r.readings, func(reading unit.Reading) bool { return !reading.Ready() }) ||
		streams && slices.ContainsFunc(r.shares, func(sh share) bool { return sh.unit.waits() })
}

// wait collects what the units have found, all or nothing.
func (r *read) wait(ctx context.Context, partition string) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, reading := range r.readings {
		cells, failed := reading.Wait(ctx)
		if failed == nil {
			r.cells = append(r.cells, cells)
			continue
		}
		cancel() // the others are only given up
		if err == nil {
			err = r.s.named(partition, missing(partition, failed))
		}
	}
	return err
}

// found makes the reply: with the bytes when they are few, else with leases.
func (c *call) found(ctx context.Context, r *read, req *wire.GetRequest) (any, error) {
	if err := r.wait(ctx, req.Partition); err != nil {
		r.release()
		if tqerr.CodeOf(err) == tqerr.ResourceExhausted {
			return c.foundInPieces(ctx, req, err)
		}
		return nil, err
	}
	columns := r.stitch()
	reply := &wire.GetReply{Rows: len(r.sel.Samples), Columns: columns}
	c.samples = reply.Rows
	total := int64(0)
	for i := range columns {
		column := schema.Column(columns[i].Column)
		total += column.Bytes()
	}
	if !req.Views && total <= req.Inline {
		payload, err := r.copyOut(columns, total)
		r.release()
		return payloadReply{reply, payload}, err
	}
	reply.Grants = r.readGrants()
	if c.remote {
		if err := c.s.shareRead(r, columns); err != nil {
			r.release()
			return nil, err
		}
	}
	return reply, c.keepRead(r, req, reply)
}

// keepRead registers the leases with the client: one number for all, or one per column for views.
func (c *call) keepRead(r *read, req *wire.GetRequest, reply *wire.GetReply) error {
	groups := make([][]store.Lease, 1)
	if req.Views {
		groups = make([][]store.Lease, len(reply.Columns))
	}
	for _, cells := range r.cells {
		for k, l := range cells.Leases {
			groups[k] = append(groups[k], l)
		}
	}
	ids := make([]uint64, len(groups))
	c.undo = func() {
		for _, id := range ids {
			c.client.releaseLease(id)
		}
	}
	for k, group := range groups {
		id, err := c.client.keepLeases(group)
		if err != nil {
			r.release()
			return err
		}
		ids[k] = id
		if req.Views {
			reply.Columns[k].Lease = id
		} else {
			reply.Lease = id
		}
	}
	return nil
}

// missing turns a cell that the unit does not have into the error a reader expects.
func missing(partition string, err error) error {
	var m *store.MissingError
	if errors.As(err, &m) {
		return tqerr.New(tqerr.SampleGone, "partition %q: sample %d: field %q is not stored any more", partition, m.Sample.Index, m.Field)
	}
	return err
}

// stitch joins the columns of all units in row order.
func (r *read) stitch() []wire.GetColumn {
	if len(r.cells) == 0 {
		return nil
	}
	out := make([]wire.GetColumn, len(r.sel.Fields))
	for f := range out {
		if len(r.shares) == 1 {
			one := &r.cells[0].Columns[f]
			out[f].Column = wire.Column(one.Column)
			for _, run := range one.Runs {
				out[f].Runs = append(out[f].Runs, wireRun(r.shares[0].unit, run))
			}
			continue
		}
		b := schema.NewBuilder(r.sel.Fields[f])
		cursors := make([]runCursor, len(r.shares))
		for k := range cursors {
			cursors[k] = newRunCursor(&r.cells[k].Columns[f])
		}
		for _, p := range r.order {
			column := &r.cells[p.share].Columns[f].Column
			b.Append(column.Slice(p.at, p.at+p.rows))
			cursors[p.share].take(p.rows, func(run store.Run) {
				out[f].Runs = append(out[f].Runs, wireRun(r.shares[p.share].unit, run))
			})
		}
		out[f].Column = wire.Column(b.Column())
	}
	return out
}

func wireRun(u node, run store.Run) wire.Run {
	b := run.Block
	return wire.Run{Rows: run.Rows, Unit: u.ID(), Block: wire.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size}}
}

// runCursor walks the runs of a leased column and cuts them where a stretch of rows ends.
type runCursor struct {
	runs    []store.Run
	offsets []int64 // byte offsets of the column's rows
	row     int     // rows taken so far
	inRun   int     // rows taken of runs[0]
}

func newRunCursor(l *store.Leased) runCursor {
	return runCursor{runs: l.Runs, offsets: l.Column.Offsets()}
}

func (c *runCursor) take(rows int, yield func(store.Run)) {
	for rows > 0 {
		run := c.runs[0]
		n := min(rows, run.Rows-c.inRun)
		start := c.offsets[c.row] - c.offsets[c.row-c.inRun]
		block := run.Block
		block.Offset += start
		block.Size = c.offsets[c.row+n] - c.offsets[c.row]
		yield(store.Run{Rows: n, Block: block, OnDisk: run.OnDisk})
		c.row, c.inRun, rows = c.row+n, c.inRun+n, rows-n
		if c.inRun == run.Rows {
			c.runs, c.inRun = c.runs[1:], 0
		}
	}
}

// copyOut packs the bytes of all columns and drops the runs. A unit that has sent its bytes has sent them column by column, in
// the order of its rows, which is that of the runs.
func (r *read) copyOut(columns []wire.GetColumn, total int64) ([]byte, error) {
	if len(r.cells) == 1 && r.cells[0].Filled {
		for i := range columns {
			columns[i].Runs = nil
		}
		return r.cells[0].Payload, nil
	}
	r.s.mapped.RLock()
	defer r.s.mapped.RUnlock()
	sent := map[uint32]*unit.Cells{}
	for k, cells := range r.cells {
		if cells.Filled {
			sent[r.shares[k].unit.ID()] = cells
		}
	}
	payload := make([]byte, 0, total)
	for i := range columns {
		for _, run := range columns[i].Runs {
			if from := sent[run.Unit]; from != nil {
				payload = append(payload, from.Payload[:run.Block.Size]...)
				from.Payload = from.Payload[run.Block.Size:]
				continue
			}
			b := store.Block{Segment: run.Block.Segment, Offset: run.Block.Offset, Size: run.Block.Size}
			data, err := r.s.node(run.Unit).Bytes(b)
			if err != nil {
				return nil, err
			}
			payload = append(payload, data...)
		}
		columns[i].Runs = nil
	}
	return payload, nil
}

func (c *call) release() (any, error) {
	var req wire.ReleaseRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	for _, id := range req.Leases {
		c.client.releaseLease(uint64(id))
	}
	return nil, nil
}
