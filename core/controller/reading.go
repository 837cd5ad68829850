package controller

import (
	"context"

	"transferqueue/core/store"
	"transferqueue/core/unit"
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
