package client

import (
	"context"
	"time"

	"transferqueue/core/arena"
	"transferqueue/core/foreign"
	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// putBody is the body of a put as the caller gives it: a wire.PutRequest with field names for columns. Keys and tags are only
// passed on, so nobody looks into them here.
type putBody struct {
	Partition string
	Keys      []byte // wire.Strings
	Samples   *wire.Samples
	Insert    int
	Fields    wire.Strings
	Tags      []byte // wire.List
	Update    bool
	Merge     string
	Callable  []byte
	Last      bool
	Dedup     wire.Strings // fields whose equal rows are stored once
	Brief     bool
}

// putRequest is a wire.PutRequest with the bytes of keys and tags.
type putRequest struct {
	Partition string
	Keys      []byte
	Samples   *wire.Samples
	Insert    int
	Columns   []wire.Column
	Tags      []byte
	Update    bool
	Merge     string
	Callable  []byte
	Inline    bool
	Last      bool
	Shared    []wire.Sharing
	Dedup     wire.Strings
	Brief     bool
}

// grantPatience is how long Start waits for unit memory on the caller's thread. When the unit is full the bytes are copied
// aside instead, so that an event loop is not held up, and the write goes on by itself.
const grantPatience = 20 * time.Millisecond

func (c *Client) startPut(ctx context.Context, req *Request, done func(*Result)) (Started, error) {
	var body putBody
	if err := wire.Unmarshal(req.Body, &body); err != nil {
		return Started{}, err
	}
	if len(body.Fields) != len(req.Columns) {
		return Started{}, tqerr.New(tqerr.InvalidArgument, "%d field names for %d columns", len(body.Fields), len(req.Columns))
	}
	put := &putRequest{
		Partition: body.Partition, Keys: body.Keys, Samples: body.Samples, Insert: body.Insert, Tags: body.Tags,
		Update: body.Update, Merge: body.Merge, Callable: body.Callable, Last: body.Last, Brief: body.Brief,
	}
	inputs := make([]*foreign.Input, len(req.Columns))
	for i, field := range body.Fields {
		in, err := foreign.New(field, req.Rows, &req.Columns[i])
		if err != nil {
			return Started{}, err
		}
		inputs[i] = in
		put.Columns = append(put.Columns, wire.Column(in.Column))
	}
	if err := dedup(put, body.Dedup, inputs); err != nil {
		return Started{}, err
	}
	if total := foreign.TotalBytes(inputs); total <= c.inlineLimit() {
		return c.putInline(ctx, req, put, inputs, total, done)
	}
	return Started{}, c.putStaged(ctx, req, put, inputs, done)
}

// putInline sends the bytes with the request.
func (c *Client) putInline(ctx context.Context, req *Request, put *putRequest, inputs []*foreign.Input, total int64, done func(*Result)) (Started, error) {
	put.Inline = true
	payload := make([]byte, total)
	rest := payload
	for _, in := range inputs {
		rest = in.CopyRows(rest, 0, in.Column.Rows)
	}
	body, err := wire.Marshal(put)
	if err != nil {
		return Started{}, err
	}
	sent := c.begin(ctx, wire.OpPut, body, payload, req.Timeout, req.Waits)
	return sent.then("client put", func(reply *wire.Reply, err error) { done(plainResult(reply, err)) }), nil
}

// granted is what the first request of a staged put brings.
type granted struct {
	reply   *wire.PutReply
	err     error
	conn    transport.Conn // on which it was asked for
	life    int            // of the client, then
	staging *staging       // nil: the bytes do not lie where this client can read them back
}

func (c *Client) putStaged(ctx context.Context, req *Request, put *putRequest, inputs []*foreign.Input, done func(*Result)) error {
	body, err := wire.Marshal(put)
	if err != nil {
		return err
	}
	begun, conn, life := time.Now(), c.conn(), c.life()
	staging := &staging{c: c, conn: conn, put: put, request: req, begun: begun, inputs: columnsOf(inputs)}
	grant := make(chan granted, 1)
	c.begin(ctx, wire.OpPut, body, nil, req.Timeout, false).then("client put", func(reply *wire.Reply, err error) {
		g := granted{err: err, conn: conn, life: life}
		if err == nil {
			g.reply = &wire.PutReply{}
			if g.err = wire.Unmarshal(reply.Body, g.reply); g.err == nil {
				g.err = checkGrant(g.reply, put, inputs)
			}
		}
		grant <- g
	})
	timer := time.NewTimer(grantPatience)
	defer timer.Stop()
	select {
	case g := <-grant:
		if g.err == nil && (c.remote() || len(g.reply.Grants) > 0) {
			c.deliver(ctx, req, put, begun, g, inputs, done)
			return nil
		}
		if g.err == nil {
			_, g.err = c.planAndFill(ctx, g.reply, inputs)
			g.staging = staging
		}
		if c.lostBeforeFilled(ctx, &g) {
			again := *req
			again.Timeout = remaining(req.Timeout, begun)
			return c.putStaged(ctx, &again, put, inputs, done)
		}
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
		return nil
	case <-timer.C:
	}
	aside, release, err := c.copyAside(put, inputs)
	guard.Go("client put", func() {
		defer release()
		g := <-grant
		if err != nil {
			c.finish(ctx, granted{reply: g.reply, err: err}, 0, func(*Result) {})
			return
		}
		if g.err == nil {
			g.err = c.deliverAside(ctx, g.reply, aside, remaining(req.Timeout, begun))
			if !c.remote() && len(g.reply.Grants) == 0 {
				g.staging = staging
			}
		}
		if c.lostBeforeFilled(ctx, &g) {
			again := *req
			again.Timeout = remaining(req.Timeout, begun)
			if err := c.putStaged(ctx, &again, put, aside, done); err != nil {
				done(&Result{Err: err})
			}
			return
		}
		c.finish(ctx, g, remaining(req.Timeout, begun), done)
	})
	return err
}

// lostBeforeFilled reports that the server has died between its grant and the filling of what it has granted: another one has not
// granted anything.
func (c *Client) lostBeforeFilled(ctx context.Context, g *granted) bool {
	return g.err != nil && g.reply != nil && !c.remote() && c.lostMeanwhile(ctx, g.conn, g.err)
}

// columnsOf is the inputs without their bytes, which belong to the caller.
func columnsOf(inputs []*foreign.Input) []*foreign.Input {
	out := make([]*foreign.Input, len(inputs))
	for i, in := range inputs {
		out[i] = foreign.Packed(in.Column, nil)
	}
	return out
}

// remaining returns what is left of a timeout, at least a little, so that the server decides the outcome.
func remaining(timeout time.Duration, begun time.Time) time.Duration {
	if timeout == 0 {
		return 0
	}
	return max(timeout-time.Since(begun), 100*time.Millisecond)
}

// copyAside copies the inputs into memory of our own, which release gives back, also after an error.
func (c *Client) copyAside(put *putRequest, inputs []*foreign.Input) (out []*foreign.Input, release func(), err error) {
	out = make([]*foreign.Input, len(inputs))
	var buffers [][]byte
	release = func() {
		for _, b := range buffers {
			c.opts.Pool.Put(b)
		}
	}
	for i, in := range inputs {
		out[i] = foreign.Packed(in.Column, nil)
		size := in.Column.Bytes()
		first := sharedRows(put, i)
		if first != nil {
			size = in.StoredBytes(first)
		}
		if size == 0 {
			continue
		}
		buffer, err := c.opts.Pool.Get(size)
		if err != nil {
			return nil, release, err
		}
		buffers = append(buffers, buffer)
		if first != nil {
			out[i] = in.Once(first, buffer)
			continue
		}
		in.CopyRows(buffer, 0, in.Column.Rows)
		out[i] = foreign.Packed(in.Column, buffer)
	}
	return out, release, nil
}

// fill copies the rows into granted blocks of parts whose memory is mapped here.
func (c *Client) fill(ctx context.Context, g *wire.PutReply, parts []int, inputs []*foreign.Input) error {
	c.segments.using.RLock()
	defer c.segments.using.RUnlock()
	for _, i := range parts {
		part := &g.Parts[i]
		for k, b := range part.Blocks {
			if b.Size == 0 {
				continue
			}
			m, err := c.mapping(ctx, part.Unit, b.Segment)
			if err == nil {
				err = checkBlock(m, b)
			}
			if err == nil {
				err = fillBlock(m, b, inputs[k], g.RowsOf(i, k))
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func fillBlock(m *arena.Mapping, b wire.Block, in *foreign.Input, rows wire.Ints) error {
	at := b.Offset
	for r := 0; r+1 < len(rows); r += 2 {
		for piece := range in.Pieces(int(rows[r]), int(rows[r+1])) {
			if err := m.Write(at, piece); err != nil {
				return err
			}
			at += int64(len(piece))
		}
	}
	return nil
}

// finish commits a staged put, or gives its memory back when something failed.
func (c *Client) finish(ctx context.Context, g granted, timeout time.Duration, done func(*Result)) {
	if g.reply == nil {
		done(&Result{Err: g.err})
		return
	}
	if g.err == nil && ctx.Err() != nil {
		g.err = tqerr.New(tqerr.Cancelled, "cancelled before it was committed")
	}
	var txn []byte
	if g.err == nil {
		txn, g.err = wire.Marshal(&wire.TxnRequest{Txn: g.reply.Txn})
	}
	giveUp := func(err error) {
		// A commit that has arrived has taken the write, and there is nothing to call off; the reply would say no more.
		ctx, cancel := context.WithTimeout(c.background, settleTime)
		defer cancel()
		_, _ = c.callOff(ctx, g.reply.Txn)
		done(&Result{Err: err})
	}
	if g.err != nil {
		guard.Go("client give up", func() { giveUp(g.err) })
		return
	}
	c.begin(ctx, wire.OpCommit, txn, nil, timeout, false).then("client commit", func(reply *wire.Reply, err error) {
		if g.staging.forgotten(err) {
			guard.Go("client put again", func() { g.staging.again(ctx, g.reply, done) })
			return
		}
		if err != nil {
			err = c.lostWithServer(g, err)
			guard.Go("client give up", func() { giveUp(err) })
			return
		}
		done(plainResult(reply, nil))
	})
}
