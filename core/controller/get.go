package controller

import (
	"errors"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// read is a get in progress: what was selected, and what each unit leased of it.
type read struct {
	s      *Server
	sel    *catalog.Selection
	shares []share
	order  []piece
	leases []store.Lease
}

func (r *read) release() {
	for _, l := range r.leases {
		l.Release()
	}
	r.leases = nil
}

func (c *call) get() (any, error) {
	var req wire.GetRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	r := &read{s: c.s}
	columns, err := r.lease(&req)
	if err != nil {
		r.release()
		return nil, err
	}
	reply := &wire.GetReply{Rows: len(r.sel.Samples), Columns: columns}
	total := int64(0)
	for i := range columns {
		column := schema.Column(columns[i].Column)
		total += column.Bytes()
	}
	if c.remote {
		req.Views = false // a client that cannot map memory has no use for them
	}
	if !req.Views && total <= req.Inline {
		payload := r.copyOut(columns, total)
		r.release()
		return payloadReply{reply, payload}, nil
	}
	if c.remote {
		c.s.shareRead(r, columns)
	}
	return reply, c.keepRead(r, &req, reply)
}

// keepRead registers the leases with the client: one number for all, or one per column for views.
func (c *call) keepRead(r *read, req *wire.GetRequest, reply *wire.GetReply) error {
	groups := [][]store.Lease{r.leases}
	if req.Views {
		groups = make([][]store.Lease, len(reply.Columns))
		for i, l := range r.leases {
			k := i % len(reply.Columns)
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

// lease resolves and leases under the read lock, so that all rows and fields are of one moment. With views every field has
// leases of its own, in the order unit by unit, field by field.
func (r *read) lease(req *wire.GetRequest) ([]wire.GetColumn, error) {
	s := r.s
	s.mu.RLock()
	defer s.mu.RUnlock()
	var err error
	if req.Samples != nil {
		r.sel, err = s.mu.cat.SelectSamples(samplesOf(req.Samples), req.Partition, req.Fields)
	} else {
		r.sel, err = s.mu.cat.SelectKeys(req.Partition, req.Keys, req.Fields, req.Strict)
	}
	if err != nil || len(r.sel.Fields) == 0 {
		return nil, err
	}
	r.shares = (&txn{s: s}).split(r.sel.Units)
	r.order = pieces(r.shares)
	groups := [][]string{r.sel.Fields}
	if req.Views {
		groups = groups[:0]
		for _, f := range r.sel.Fields {
			groups = append(groups, []string{f})
		}
	}
	leased := make([][]store.Leased, len(r.shares))
	for k := range r.shares {
		samples := pickRuns(r.sel.Samples, r.shares[k].runs)
		for _, fields := range groups {
			l, err := r.shares[k].unit.Read(req.Partition, fields, samples)
			if err != nil {
				return nil, missing(req.Partition, err)
			}
			r.leases = append(r.leases, l)
			leased[k] = append(leased[k], l.Columns()...)
		}
	}
	return r.stitch(leased), nil
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
func (r *read) stitch(leased [][]store.Leased) []wire.GetColumn {
	out := make([]wire.GetColumn, len(r.sel.Fields))
	for f := range out {
		if len(r.shares) == 1 {
			one := &leased[0][f]
			out[f].Column = wire.Column(one.Column)
			for _, run := range one.Runs {
				out[f].Runs = append(out[f].Runs, wireRun(r.shares[0].unit, run))
			}
			continue
		}
		b := schema.NewBuilder(r.sel.Fields[f])
		cursors := make([]runCursor, len(r.shares))
		for k := range cursors {
			cursors[k] = newRunCursor(&leased[k][f])
		}
		for _, p := range r.order {
			column := &leased[p.share][f].Column
			b.Append(column.Slice(p.at, p.at+p.rows))
			cursors[p.share].take(p.rows, func(run store.Run) {
				out[f].Runs = append(out[f].Runs, wireRun(r.shares[p.share].unit, run))
			})
		}
		out[f].Column = wire.Column(b.Column())
	}
	return out
}

func wireRun(u Unit, run store.Run) wire.Run {
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
		yield(store.Run{Rows: n, Block: block})
		c.row, c.inRun, rows = c.row+n, c.inRun+n, rows-n
		if c.inRun == run.Rows {
			c.runs, c.inRun = c.runs[1:], 0
		}
	}
}

// copyOut packs the bytes of all columns and drops the runs.
func (r *read) copyOut(columns []wire.GetColumn, total int64) []byte {
	payload := make([]byte, 0, total)
	for i := range columns {
		for _, run := range columns[i].Runs {
			b := store.Block{Segment: run.Block.Segment, Offset: run.Block.Offset, Size: run.Block.Size}
			payload = append(payload, r.s.units[run.Unit].Bytes(b)...)
		}
		columns[i].Runs = nil
	}
	return payload
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
