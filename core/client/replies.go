package client

import (
	"slices"

	"transferqueue/core/arena"
	"transferqueue/core/foreign"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// A reply is checked whole before memory is touched for it: what a server gets wrong is an error of one call, not the end of
// the process.

// checkGet makes sure that a reply describes the bytes of its columns exactly. With runs they are in unit memory that this
// process maps; without, in the payload or behind the lease.
func checkGet(reply *wire.GetReply, payload []byte, runs bool) error {
	total := int64(0)
	for i := range reply.Columns {
		g := &reply.Columns[i]
		c := (*schema.Column)(&g.Column)
		if c.Rows != reply.Rows || c.Form == 0 {
			return badReply("column %q has %d rows of a result of %d", c.Field, c.Rows, reply.Rows)
		}
		size := c.Bytes()
		if total += size; total < 0 {
			return badReply("more bytes than there are")
		}
		if runs && payload == nil {
			if err := checkRuns(g.Runs, c, size); err != nil {
				return err
			}
		}
	}
	switch {
	case payload != nil && int64(len(payload)) != total:
		return badReply("%d bytes for columns of %d", len(payload), total)
	case payload == nil && !runs && reply.Lease == 0 && total > 0:
		return badReply("no bytes for columns of %d", total)
	}
	return nil
}

func checkRuns(runs []wire.Run, c *schema.Column, size int64) error {
	bytes := int64(0)
	for i := range runs {
		b := &runs[i].Block
		if b.Size < 0 || b.Offset < 0 || b.Size > size-bytes {
			return badReply("runs of column %q hold more than its %d bytes", c.Field, size)
		}
		bytes += b.Size
	}
	if bytes != size {
		return badReply("runs of column %q hold %d bytes of %d", c.Field, bytes, size)
	}
	return nil
}

// checkGrant makes sure that the granted blocks are those of the rows that were announced, each once.
func checkGrant(g *wire.PutReply, put *putRequest, inputs []*foreign.Input) error {
	rows := 0
	if len(inputs) > 0 {
		rows = inputs[0].Column.Rows
	}
	granted := 0
	for i := range g.Parts {
		p := &g.Parts[i]
		if len(p.Rows)%2 != 0 || len(p.Blocks) != len(inputs) {
			return badReply("unit %d grants %d blocks for %d columns", p.Unit, len(p.Blocks), len(inputs))
		}
		for r := 0; r < len(p.Rows); r += 2 {
			from, to := p.Rows[r], p.Rows[r+1]
			if from < 0 || to < from || to > int64(rows) || int64(granted)+to-from > int64(rows) {
				return badReply("unit %d grants rows %d to %d of %d", p.Unit, from, to, rows)
			}
			granted += int(to - from)
		}
		if err := checkBlocks(g, i, put, inputs); err != nil {
			return err
		}
	}
	if granted != rows {
		return badReply("%d rows are granted of %d", granted, rows)
	}
	return nil
}

// checkBlocks makes sure that the blocks of a part have room for its rows, those that are the same once.
func checkBlocks(g *wire.PutReply, part int, put *putRequest, inputs []*foreign.Input) error {
	p := &g.Parts[part]
	for k, b := range p.Blocks {
		want := p.Rows
		if pairs, share := schema.StoredOnce(sharedRows(put, k), p.Rows); share != nil {
			want = pairs
		}
		if !slices.Equal(g.RowsOf(part, k), want) {
			return badReply("unit %d grants other rows of field %q than those that differ", p.Unit, inputs[k].Column.Field)
		}
		size := int64(0)
		for r := 0; r < len(want); r += 2 {
			size += inputs[k].Size(int(want[r]), int(want[r+1]))
		}
		if b.Size != size || b.Offset < 0 {
			return badReply("unit %d grants %d bytes for %d of field %q", p.Unit, b.Size, size, inputs[k].Column.Field)
		}
	}
	return nil
}

// checkBlock makes sure that a block lies in its segment.
func checkBlock(m *arena.Mapping, b wire.Block) error {
	if size := int64(len(m.Shared())); b.Offset < 0 || b.Size < 0 || b.Offset > size || b.Size > size-b.Offset {
		return badReply("bytes %d to %d of a segment of %d", b.Offset, b.Offset+b.Size, size)
	}
	return nil
}

func badReply(format string, args ...any) error {
	return tqerr.New(tqerr.Corruption, "reply that makes no sense: "+format, args...)
}
