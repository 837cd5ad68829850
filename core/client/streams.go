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
// caller's tensors, those of a get straight into the result.

const (
	// chunk is how many bytes of a put are on their way at a time, and so may have to be sent again.
	chunk = 32 << 20
	// waitingPatience is how long Start sends a caller's memory who does nothing else; others have grantPatience. Then the
	// rest is copied aside and goes on by itself, so that Ctrl-C is answered and an event loop is not held up.
	waitingPatience = 180 * time.Millisecond
)

// remote tells whether payload goes over streams.
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

// outgoing is the part of a put that has not arrived yet.
type outgoing struct {
	txn    uint64
	offset int64
	pieces [][]byte
}

// outgoingOf lists the bytes of a put in the order of the granted blocks.
func outgoingOf(g *wire.PutReply, inputs []*foreign.Input) *outgoing {
	o := &outgoing{txn: g.Txn}
	for i, part := range g.Parts {
		for k := range part.Blocks {
			rows := g.RowsOf(i, k)
			for r := 0; r+1 < len(rows); r += 2 {
				for piece := range inputs[k].Pieces(int(rows[r]), int(rows[r+1])) {
					if len(piece) > 0 {
						o.pieces = append(o.pieces, piece)
					}
				}
			}
		}
	}
	return o
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
		err := c.overStreams(ctx, func(s transport.Streamer) error {
			return s.Send(ctx, transport.Grant{Write: true, ID: o.txn}, o.offset, now)
		})
		if err != nil {
			return err
		}
		o.pieces, o.offset, sent = rest, o.offset+size, sent+size
	}
	return nil
}

// putRemote sends the bytes of a staged put and commits it.
func (c *Client) putRemote(ctx context.Context, req *Request, begun time.Time, g granted, inputs []*foreign.Input, done func(*Result)) {
	patience := grantPatience
	if req.Waits {
		patience = waitingPatience
	}
	o := outgoingOf(g.reply, inputs)
	short, cancel := context.WithTimeout(ctx, patience)
	g.err = c.send(short, o, patience)
	late := short.Err() != nil || g.err == error(errLate)
	cancel()
	if g.err == nil || !late {
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
		return
	}
	release, err := c.setAside(o)
	guard.Go("client put", func() {
		defer release()
		if g.err = err; err == nil {
			g.err = c.sendWithin(ctx, o, remaining(req.Timeout, begun))
		}
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
	})
}

// sendWithin is send with a time limit, 0 for none.
func (c *Client) sendWithin(ctx context.Context, o *outgoing, timeout time.Duration) error {
	ctx, cancel := within(ctx, timeout)
	defer cancel()
	return c.send(ctx, o, 0)
}

func within(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// setAside copies what has not arrived yet into memory of our own, which release gives back.
func (c *Client) setAside(o *outgoing) (release func(), err error) {
	buffer, err := c.opts.Pool.Get(o.left())
	if err != nil {
		return func() {}, err
	}
	at := 0
	for _, p := range o.pieces {
		at += copy(buffer[at:], p)
	}
	o.pieces = [][]byte{buffer}
	return func() { c.opts.Pool.Put(buffer) }, nil
}

// receive fills the columns of a get from the memory that its lease holds.
func (g *getting) receive(out []ResultColumn) error {
	var pieces [][]byte
	packed := make([][]byte, len(out))
	for i := range out {
		r := &out[i]
		switch {
		case len(r.Data) == 0:
		case r.Form == Jagged && r.Ragged > 1:
			packed[i] = make([]byte, len(r.Data))
			pieces = append(pieces, packed[i])
		default:
			pieces = append(pieces, r.Data)
		}
	}
	err := g.c.overStreams(g.ctx, func(s transport.Streamer) error {
		return s.Receive(g.ctx, transport.Grant{ID: g.reply.Lease}, pieces)
	})
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
