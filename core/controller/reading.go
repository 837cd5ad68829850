package controller

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// reading is a read on a unit in this process. Its cells are pinned; those on disk are read by Wait.
type reading struct {
	cells unit.Cells
	err   error
	loads bool
}

// Read implements node.
func (n inside) Read(q *unit.Query) unit.Reading {
	r := &reading{}
	groups := [][]string{q.Fields}
	if q.Apart {
		groups = groups[:0]
		for k := range q.Fields {
			groups = append(groups, q.Fields[k:k+1])
		}
	}
	for _, fields := range groups {
		l, err := n.Pin(q.Partition, fields, q.Samples)
		if err != nil {
			r.cells.Release()
			return &reading{err: err}
		}
		r.cells.Leases = append(r.cells.Leases, l)
		r.loads = r.loads || !q.Later && store.Loads(l)
	}
	return r
}

// Ready implements unit.Reading.
func (r *reading) Ready() bool { return !r.loads }

// Wait implements unit.Reading.
func (r *reading) Wait(ctx context.Context) (*unit.Cells, error) {
	if r.err != nil {
		return nil, r.err
	}
	for _, l := range r.cells.Leases {
		if err := r.load(ctx, l); err != nil {
			r.cells.Release()
			return nil, err
		}
		r.cells.Columns = append(r.cells.Columns, l.Columns()...)
	}
	return &r.cells, nil
}

func (r *reading) load(ctx context.Context, l store.Lease) error {
	if !r.loads || !store.Loads(l) {
		return nil
	}
	if ctx.Err() != nil {
		return ctxError(ctx, "reading values from disk")
	}
	return store.Load(l)
}

// foundInPieces answers a get when neither memory nor disk has room for what it would load, which is full: the reply carries
// the bytes, so that what is stored can be read. full is returned when they are too many for that.
func (c *call) foundInPieces(ctx context.Context, req *wire.GetRequest, full error) (any, error) {
	plain := *req
	plain.Views, plain.Inline = false, -1
	r := &read{s: c.s, later: true}
	if err := r.begin(&plain, c.remote, c.machine()); err != nil {
		return nil, err
	}
	err := r.wait(ctx, req.Partition)
	defer r.release()
	if err != nil {
		return nil, err
	}
	reply := &wire.GetReply{Rows: len(r.sel.Samples), Columns: r.stitch()}
	c.samples = reply.Rows
	total := int64(0)
	for i := range reply.Columns {
		column := schema.Column(reply.Columns[i].Column)
		total += column.Bytes()
		reply.Columns[i].Runs = nil
	}
	if total > wire.MaxPayload {
		return nil, full
	}
	payload, err := r.inPieces(ctx, len(reply.Columns), total)
	return payloadReply{reply, payload}, c.s.named(req.Partition, err)
}

// inPieces copies the bytes of all columns, those on disk without loading them.
func (r *read) inPieces(ctx context.Context, columns int, total int64) ([]byte, error) {
	r.s.mapped.RLock()
	defer r.s.mapped.RUnlock()
	payload := make([]byte, 0, total)
	put := func(data []byte) error {
		payload = append(payload, data...)
		return nil
	}
	groups := make([]leasedGroup, len(r.shares))
	cursors := make([][]runCursor, len(r.shares))
	for i := range groups {
		groups[i] = leasedGroup{unit: r.shares[i].unit, cells: r.cells[i]}
		cursors[i] = groups[i].begin()
	}
	for k := range columns {
		for _, p := range r.order {
			if err := groups[p.share].writeColumn(ctx, k, &cursors[p.share][k], p.rows, nil, put); err != nil {
				return nil, err
			}
		}
	}
	return payload, nil
}
