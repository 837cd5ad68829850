package client

import (
	"context"
	"slices"

	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/wire"
)

const (
	ownBlock  = 1 << 20  // a column of this size has memory of its own, so that dropping it gives it back
	viewBytes = 64 << 10 // a smaller column is copied: it shares its pages with others
	align     = 64
)

// got moves the bytes of the rows that were asked for into result memory.
func (c *Client) got(ctx context.Context, flags Flags, answer *wire.Reply, err error) *Result {
	if err != nil {
		return &Result{Err: err}
	}
	var reply wire.GetReply
	if err := wire.Unmarshal(answer.Body, &reply); err != nil {
		return &Result{Err: err}
	}
	g := newGetting(ctx, c, &reply, answer.Payload)
	var columns []ResultColumn
	if err = checkGet(&reply, answer.Payload, !c.remote()); err == nil {
		columns, err = g.build(flags)
	}
	if len(g.leases) > 0 {
		c.release(g.leases)
	}
	if err != nil {
		for _, col := range columns {
			Release(col.Token)
			Release(col.OffsetsToken)
		}
		return &Result{Err: err}
	}
	names := make(wire.Strings, len(columns))
	for i := range columns {
		names[i] = columns[i].Column.Field
	}
	body, err := wire.Marshal(&wire.NamesReply{Names: names})
	return &Result{Err: err, Body: body, Rows: reply.Rows, Columns: columns}
}

// getting is the state of one get while its result is built.
type getting struct {
	c       *Client
	ctx     context.Context
	reply   *wire.GetReply
	payload []byte
	leases  wire.Ints // to be released when everything is copied; those of views are taken out
}

func newGetting(ctx context.Context, c *Client, reply *wire.GetReply, payload []byte) *getting {
	g := &getting{c: c, ctx: ctx, reply: reply, payload: payload}
	if reply.Lease != 0 {
		g.leases = append(g.leases, int64(reply.Lease))
	}
	for i := range reply.Columns {
		if lease := reply.Columns[i].Lease; lease != 0 {
			g.leases = append(g.leases, int64(lease))
		}
	}
	return g
}

func (g *getting) build(flags Flags) ([]ResultColumn, error) {
	g.c.segments.using.RLock()
	defer g.c.segments.using.RUnlock()
	out := make([]ResultColumn, len(g.reply.Columns))
	for i := range out {
		out[i].Column = schema.Column(g.reply.Columns[i].Column)
		out[i].shape(flags&DenseLayout != 0)
	}
	if err := g.layOut(out, flags&Views != 0); err != nil {
		return out, err
	}
	if g.payload == nil && g.reply.Lease != 0 && g.c.remote() {
		return out, g.receive(out)
	}
	at := int64(0)
	for i := range out {
		size := out[i].Column.Bytes()
		if g.payload != nil {
			out[i].place(g.payload[at : at+size])
			at += size
			continue
		}
		if err := g.copyRuns(&out[i], g.reply.Columns[i].Runs); err != nil {
			return out, err
		}
	}
	return out, nil
}

// layOut gives every column its memory: a view, a block of its own, or a piece of the block that the small ones share.
func (g *getting) layOut(out []ResultColumn, views bool) error {
	shared := &packer{}
	for i := range out {
		r := &out[i]
		size := r.Column.Bytes()
		if size == 0 || (views && g.view(r, g.reply.Columns[i].Runs, g.reply.Columns[i].Lease)) {
			continue
		}
		if size < ownBlock && r.Form != ObjectRows {
			shared.add(size, func(data []byte, token uint64) { r.Data, r.Token = data, token })
			continue
		}
		data, err := g.c.opts.Pool.Get(size)
		if err != nil {
			return err
		}
		r.Data, r.Token = data, hold(g.c.pooled(data))
	}
	g.addOffsets(out, shared)
	return shared.place(g.c)
}

// addOffsets gives jagged columns with equal lengths one offsets array.
func (g *getting) addOffsets(out []ResultColumn, shared *packer) {
	for i := range out {
		r := &out[i]
		if r.Form != Jagged {
			continue
		}
		r.OffsetsID = uint64(i) + 1
		for j := range i {
			if out[j].Form == Jagged && out[j].sameLengths(r) {
				r.OffsetsID = out[j].OffsetsID
				break
			}
		}
		if r.OffsetsID != uint64(i)+1 {
			continue
		}
		shared.add(int64(r.Column.Rows+1)*8, func(data []byte, token uint64) {
			offsets := ints(data)
			r.fillOffsets(offsets)
			r.Offsets, r.OffsetsToken = offsets, token
		})
	}
}

// pooled is memory that goes back to the pool with its last holder.
func (c *Client) pooled(data []byte) *memory {
	return &memory{data: data, free: func() { c.opts.Pool.Put(data) }}
}

// packer collects pieces that share one block.
type packer struct {
	size   int64
	pieces []piece
}

type piece struct {
	at, size int64
	give     func(data []byte, token uint64)
}

func (p *packer) add(size int64, give func([]byte, uint64)) {
	p.pieces = append(p.pieces, piece{p.size, size, give})
	p.size += (size + align - 1) / align * align
}

func (p *packer) place(c *Client) error {
	if p.size == 0 {
		return nil
	}
	data, err := c.opts.Pool.Get(p.size)
	if err != nil {
		return err
	}
	m := c.pooled(data)
	for _, piece := range p.pieces {
		piece.give(data[piece.at:piece.at+piece.size], hold(m))
	}
	return nil
}

// view maps a column that lies in one piece of unit memory, when nobody in this process views its pages already.
func (g *getting) view(r *ResultColumn, runs []wire.Run, lease uint64) bool {
	size := r.Column.Bytes()
	if lease == 0 || size < viewBytes || r.Ragged > 1 || r.Form == ObjectRows || !contiguous(runs) {
		return false
	}
	first := runs[0]
	m, err := g.c.mapping(g.ctx, first.Unit, first.Block.Segment)
	whole := wire.Block{Segment: first.Block.Segment, Offset: first.Block.Offset, Size: size}
	if err != nil || checkBlock(m, whole) != nil {
		return false
	}
	data, ok := m.Lease(first.Block.Offset, size)
	if !ok {
		return false
	}
	g.leases = slices.DeleteFunc(g.leases, func(l int64) bool { return l == int64(lease) })
	view := &memory{data: data}
	view.free = func() { g.c.endView(view, first.Block.Offset, lease) }
	g.c.segments.addView(view, m)
	r.Data, r.view, r.Token = data, true, hold(view)
	return true
}

// endView ends the lease of a view and drops the pages that its reader wrote. The lease goes first and at once, so that a
// clear that follows finds the memory free. It may be called in a finalizer, so what takes time is done elsewhere.
func (c *Client) endView(view *memory, offset int64, lease uint64) {
	m, closed := c.segments.dropView(view)
	if !closed {
		c.release(wire.Ints{int64(lease)})
	}
	finish := m.StartEnd(offset, int64(len(view.data)))
	guard.Go("client view", func() { c.segments.endView(m, finish) })
}

func contiguous(runs []wire.Run) bool {
	for i := 1; i < len(runs); i++ {
		a, b := &runs[i-1], &runs[i]
		if a.Unit != b.Unit || a.Block.Segment != b.Block.Segment || a.Block.Offset+a.Block.Size != b.Block.Offset {
			return false
		}
	}
	return len(runs) > 0
}

// copyRuns copies a column out of unit memory; a view needs nothing.
func (g *getting) copyRuns(r *ResultColumn, runs []wire.Run) error {
	if len(r.Data) == 0 || r.view {
		return nil
	}
	if r.Form == Jagged && r.Ragged > 1 {
		return g.copyInterleaved(r, runs)
	}
	return g.copyTo(r.Data, runs)
}

func (g *getting) copyTo(dst []byte, runs []wire.Run) error {
	for _, run := range runs {
		if err := g.c.read(g.ctx, dst, run.Unit, run.Block); err != nil {
			return err
		}
		dst = dst[run.Block.Size:]
	}
	return nil
}

// copyInterleaved packs the rows first and then places them along their ragged dimension.
func (g *getting) copyInterleaved(r *ResultColumn, runs []wire.Run) error {
	packed := make([]byte, len(r.Data))
	if err := g.copyTo(packed, runs); err != nil {
		return err
	}
	r.place(packed)
	return nil
}

// place fills the column from rows that lie tightly one after another. Rows that are ragged on a later dimension are
// interleaved: values() of such a tensor has them side by side along it.
func (r *ResultColumn) place(packed []byte) {
	if r.Form != Jagged || r.Ragged <= 1 {
		copy(r.Data, packed)
		return
	}
	c, dim := &r.Column, int(r.Ragged)-1
	outer, inner := int64(1), c.DType.Size()
	for i, d := range c.Shape {
		if i < dim {
			outer *= d
		} else if i > dim {
			inner *= d
		}
	}
	total, before, from := r.Dims[dim]*inner, int64(0), int64(0)
	for _, shape := range c.Shapes() {
		n := shape[dim] * inner
		for o := range outer {
			copy(r.Data[o*total+before:o*total+before+n], packed[from:from+n])
			from += n
		}
		before += n
	}
}
