package client

import (
	"context"
	"time"

	"transferqueue/core/foreign"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// staging is a put in two steps between them. When the server is started anew there, it knows nothing of the write, and the
// caller may have changed his columns by now; but the bytes still lie in the memory that was granted, which this client has
// mapped. What is left of the old server does not give it to others as long as clients of it may come.
type staging struct {
	c       *Client
	conn    transport.Conn // when it began
	put     *putRequest
	inputs  []*foreign.Input // only their columns
	request *Request
	begun   time.Time
}

// forgotten reports that the commit has failed because another server got it than the one that had granted the memory: the
// write has not happened.
func (s *staging) forgotten(err error) bool {
	return s != nil && tqerr.CodeOf(err) == tqerr.NotFound && s.c.opts.Redial != nil && s.c.conn() != s.conn && !s.c.remote()
}

// lostWithServer makes the error for a write whose bytes are gone with the server that had granted memory for them.
func (c *Client) lostWithServer(g granted, err error) error {
	if tqerr.CodeOf(err) != tqerr.NotFound || c.conn() == g.conn || c.remote() && c.life() == g.life {
		return err
	}
	return tqerr.New(tqerr.Unavailable, "the session was started anew before the write was committed; nothing was written")
}

// again does the put anew.
func (s *staging) again(ctx context.Context, g *wire.PutReply, done func(*Result)) {
	inputs, release, err := s.c.copyBack(g, s.put, s.inputs)
	defer release()
	if err != nil {
		done(&Result{Err: err})
		return
	}
	r := *s.request
	r.Timeout = remaining(r.Timeout, s.begun)
	if err := s.c.putStaged(ctx, &r, s.put, inputs, done); err != nil {
		done(&Result{Err: err})
	}
}

// copyBack reads the rows out of granted blocks. release gives the memory back, also after an error.
func (c *Client) copyBack(g *wire.PutReply, put *putRequest, inputs []*foreign.Input) (out []*foreign.Input, release func(), err error) {
	c.segments.using.RLock()
	defer c.segments.using.RUnlock()
	var buffers [][]byte
	release = func() {
		for _, b := range buffers {
			c.opts.Pool.Put(b)
		}
	}
	out = make([]*foreign.Input, len(inputs))
	for k, in := range inputs {
		out[k] = foreign.Packed(in.Column, nil)
		size := in.Column.Bytes()
		if size == 0 {
			continue
		}
		buffer, err := c.opts.Pool.Get(size)
		if err != nil {
			return nil, release, err
		}
		buffers = append(buffers, buffer)
		if err := c.readBack(g, k, in.Column.Offsets(), buffer); err != nil {
			return nil, release, err
		}
		offsets := in.Column.Offsets()
		for row, first := range sharedRows(put, k) {
			if int64(row) != first { // it was not sent
				copy(buffer[offsets[row]:offsets[row+1]], buffer[offsets[first]:offsets[first+1]])
			}
		}
		out[k] = foreign.Packed(in.Column, buffer)
	}
	return out, release, nil
}

// readBack reads the rows of one column.
func (c *Client) readBack(g *wire.PutReply, column int, offsets []int64, to []byte) error {
	for i, part := range g.Parts {
		b := part.Blocks[column]
		if b.Size == 0 {
			continue
		}
		m, err := c.segments.find(segmentKey{part.Unit, b.Segment})
		if err != nil {
			return err
		}
		if m == nil {
			return tqerr.New(tqerr.Unavailable, "the session was started anew before the write was committed; nothing was written")
		}
		at, rows := b.Offset, g.RowsOf(i, column)
		for r := 0; r+1 < len(rows); r += 2 {
			piece := to[offsets[rows[r]]:offsets[rows[r+1]]]
			m.Read(piece, at)
			at += int64(len(piece))
		}
	}
	return nil
}
