package client

import (
	"context"
	"time"

	"transferqueue/core/foreign"
	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// A server on another host cannot lend its memory, so payload goes over streams: the bytes of a put straight out of the
// caller's tensors, those of a get straight into the result. What lies on several hosts goes to all of them at once.

const (
	// chunk is how many bytes of a put are on their way at a time, and so may have to be sent again.
	chunk = 32 << 20
	// waitingPatience is how long Start sends a caller's memory who does nothing else; others have grantPatience. Then the
	// rest is copied aside and goes on by itself, so that Ctrl-C is answered and an event loop is not held up.
	waitingPatience = 180 * time.Millisecond
)

// remote tells whether the controller, with the units that it maps, is on another host.
func (c *Client) remote() bool {
	_, remote := c.conn().(transport.Streamer)
	return remote
}

// overStreams moves payload, and once more when the connection was lost and there is another one.
func (c *Client) overStreams(ctx context.Context, move func(transport.Streamer) error) error {
	for {
		conn := c.conn()
		s, ok := conn.(transport.Streamer)
		if !ok {
			return tqerr.New(tqerr.Internal, "the connection has no streams")
		}
		err := move(s)
		if err == nil || ctx.Err() != nil || c.opts.Redial == nil || !ended(conn) {
			return err
		}
		if c.redial(ctx, conn) != nil {
			return err
		}
	}
}

// outgoing is the part of a put that has not arrived yet, of what goes to one target.
type outgoing struct {
	target
	offset int64
	pieces [][]byte
}

// delivery is what has to be done with the bytes of a put.
type delivery struct {
	mapped []int // parts that are copied
	sends  []*outgoing
}

// plan decides how the bytes of a put go to their units. They are numbered in the order of the granted blocks.
func (c *Client) plan(ctx context.Context, g *wire.PutReply, inputs []*foreign.Input) (*delivery, error) {
	d := &delivery{}
	for i, part := range g.Parts {
		t, mapped, err := c.targetOf(ctx, part.Unit, g.Grants, g.Txn)
		if err != nil {
			return nil, err
		}
		if mapped {
			d.mapped = append(d.mapped, i)
			continue
		}
		o := d.to(t)
		o.pieces = appendPieces(o.pieces, g, i, inputs)
	}
	return d, nil
}

// appendPieces lists the bytes of a part in the order of its blocks.
func appendPieces(pieces [][]byte, g *wire.PutReply, part int, inputs []*foreign.Input) [][]byte {
	for k := range g.Parts[part].Blocks {
		rows := g.RowsOf(part, k)
		for r := 0; r+1 < len(rows); r += 2 {
			for piece := range inputs[k].Pieces(int(rows[r]), int(rows[r+1])) {
				if len(piece) > 0 {
					pieces = append(pieces, piece)
				}
			}
		}
	}
	return pieces
}

func (d *delivery) to(t target) *outgoing {
	for _, o := range d.sends {
		if o.target == t {
			return o
		}
	}
	o := &outgoing{target: t}
	d.sends = append(d.sends, o)
	return o
}

// send sends everything, as send of one target does. The first failure ends the others.
func (d *delivery) send(ctx context.Context, c *Client, patience time.Duration) error {
	return eachAtOnce(ctx, len(d.sends), func(ctx context.Context, i int) error { return c.send(ctx, d.sends[i], patience) })
}

// eachAtOnce runs n things at the same time. The first failure ends the others and is returned.
func eachAtOnce(ctx context.Context, n int, run func(ctx context.Context, i int) error) error {
	if n == 1 {
		return run(ctx, 0)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	failed := make(chan error, n)
	for i := range n {
		guard.Go("client payload", func() {
			err := run(ctx, i)
			if err != nil {
				cancel(err)
			}
			failed <- err
		})
	}
	var first error
	for range n {
		if err := <-failed; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// next returns the pieces of the next chunk and the rest.
func (o *outgoing) next() (now, rest [][]byte, size int64) {
	for i, p := range o.pieces {
		if size+int64(len(p)) > chunk {
			n := chunk - size
			now, rest = append(now, p[:n]), append([][]byte{p[n:]}, o.pieces[i+1:]...)
			return now, rest, chunk
		}
		now, size = append(now, p), size+int64(len(p))
	}
	return now, nil, size
}

func (o *outgoing) left() (size int64) {
	for _, p := range o.pieces {
		size += int64(len(p))
	}
	return size
}

// errLate says that a put will take longer than its caller can be held up.
var errLate = tqerr.New(tqerr.DeadlineExceeded, "the rest is sent later")

// send sends until all has arrived. After an error o is what has not. With patience it gives up with errLate at half of it
// when the pace so far does not suffice to be done in time.
func (c *Client) send(ctx context.Context, o *outgoing, patience time.Duration) error {
	begun, sent := time.Now(), int64(0)
	for len(o.pieces) > 0 {
		if spent := time.Since(begun); patience > 0 && spent > patience/2 && (sent == 0 || spent*time.Duration(o.left())/time.Duration(sent) > patience-spent) {
			return errLate
		}
		now, rest, size := o.next()
		if err := o.send(ctx, c, o.offset, now); err != nil {
			return err
		}
		o.pieces, o.offset, sent = rest, o.offset+size, sent+size
	}
	return nil
}

// deliver brings the bytes of a staged put to their units and commits it.
func (c *Client) deliver(
	ctx context.Context, req *Request, put *putRequest, begun time.Time, g granted, inputs []*foreign.Input, done func(*Result),
) {
	patience := grantPatience
	if req.Waits {
		patience = waitingPatience
	}
	started := time.Now()
	short, cancel := context.WithTimeout(ctx, patience)
	d, err := c.planAndFill(short, g.reply, inputs)
	if err == nil {
		err = d.send(short, c, patience)
	}
	late := err != nil && (short.Err() != nil || err == error(errLate))
	cancel()
	if !late || ctx.Err() != nil {
		g.err = err
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
		return
	}
	release, later := c.setAllAside(ctx, d, put, g.reply, inputs, patience-time.Since(started))
	guard.Go("client put", func() {
		defer release()
		g.err = later(ctx, remaining(req.Timeout, begun))
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
	})
}

// planAndFill plans and copies what is copied; what is left are the sends.
func (c *Client) planAndFill(ctx context.Context, g *wire.PutReply, inputs []*foreign.Input) (*delivery, error) {
	d, err := c.plan(ctx, g, inputs)
	if err == nil {
		err = c.fill(ctx, g, d.mapped, inputs)
	}
	if err != nil {
		return nil, err
	}
	return d, nil
}

// deliverAside is deliver for bytes that are the client's own, without haste.
func (c *Client) deliverAside(ctx context.Context, g *wire.PutReply, inputs []*foreign.Input, timeout time.Duration) error {
	ctx, cancel := within(ctx, timeout)
	defer cancel()
	d, err := c.planAndFill(ctx, g, inputs)
	if err == nil {
		err = d.send(ctx, c, 0)
	}
	return err
}

// setAllAside copies what has not arrived yet into memory of our own, which release gives back, and returns what sends it; see
// setAside. Without a plan nothing has arrived.
func (c *Client) setAllAside(
	ctx context.Context, d *delivery, put *putRequest, g *wire.PutReply, inputs []*foreign.Input, patience time.Duration,
) (release func(), later func(context.Context, time.Duration) error) {
	if d == nil {
		aside, release, err := c.copyAside(put, inputs)
		return release, func(ctx context.Context, timeout time.Duration) error {
			if err != nil {
				return err
			}
			return c.deliverAside(ctx, g, aside, timeout)
		}
	}
	releases := make([]func(), len(d.sends))
	// Its context is not that of the others: each says for itself where it has ended.
	err := eachAtOnce(context.WithoutCancel(ctx), len(d.sends), func(_ context.Context, i int) (err error) {
		releases[i] = func() {}
		if len(d.sends[i].pieces) > 0 {
			releases[i], err = c.setAside(ctx, d.sends[i], patience)
		}
		return err
	})
	release = func() {
		for _, fn := range releases {
			fn()
		}
	}
	return release, func(ctx context.Context, timeout time.Duration) error {
		if err != nil {
			return err
		}
		ctx, cancel := within(ctx, timeout)
		defer cancel()
		return d.send(ctx, c, 0)
	}
}

func within(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// incoming is what a get receives from one target.
type incoming struct {
	target
	pieces [][]byte
}

// fetch fills the columns of a get: with copies of memory that is mapped here, and over streams. What comes from a target is
// numbered column by column, in the order of the runs; of a read with views every column has a number of its own.
func (g *getting) fetch(out []ResultColumn) error {
	var all []*incoming
	packed := make([][]byte, len(out))
	for i := range out {
		r := &out[i]
		if len(r.Data) == 0 || r.view {
			continue
		}
		dst := r.Data
		if r.Form == Jagged && r.Ragged > 1 {
			packed[i] = make([]byte, len(r.Data))
			dst = packed[i]
		}
		for _, run := range g.reply.Columns[i].Runs {
			t, mapped, err := g.c.targetOf(g.ctx, run.Unit, g.reply.Grants, g.reply.Lease)
			if err != nil {
				return err
			}
			piece := dst[:run.Block.Size]
			dst = dst[run.Block.Size:]
			if mapped {
				if err := g.c.read(g.ctx, piece, run.Unit, run.Block); err != nil {
					return err
				}
				continue
			}
			if g.reply.Columns[i].Lease != 0 {
				t.id += uint64(i)
			}
			all = from(all, t, piece)
		}
	}
	err := eachAtOnce(g.ctx, len(all), func(ctx context.Context, i int) error { return all[i].receive(ctx, g.c, all[i].pieces) })
	if err != nil {
		return err
	}
	for i, rows := range packed {
		if rows != nil {
			out[i].place(rows)
		}
	}
	return nil
}

func from(all []*incoming, t target, piece []byte) []*incoming {
	for _, in := range all {
		if in.target == t {
			in.pieces = append(in.pieces, piece)
			return all
		}
	}
	return append(all, &incoming{target: t, pieces: [][]byte{piece}})
}

// streamDescriptors lists the descriptors of a connection that has streams; the first one may have been replaced.
func (c *Client) streamDescriptors() []int {
	conn, ok := c.conn().(interface {
		transport.Streamer
		Descriptors() []int
	})
	if !ok {
		return nil
	}
	return conn.Descriptors()
}
