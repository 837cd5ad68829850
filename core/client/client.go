// Package client is the queue as a process sees it: it sends requests, moves payload between the caller's memory and unit
// memory, and builds results. It keeps no state about partitions.
//
// A request that changes something carries a sequence number; it may be sent again under the same number, and the server
// answers with the first outcome. Locks: each file's own, all leaves.
package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"sync"
	"time"

	"transferqueue/core/foreign"
	"transferqueue/core/guard"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// InlineLimit is the payload in bytes up to which a put carries its bytes in the request and a get in the reply: below it
// a copy is cheaper than a second round trip.
const InlineLimit = 64 << 10

// answerGrace is how much longer than the request's own time a client waits, so that the server's answer decides what a
// timeout means: it has given up and changed nothing, or it has finished.
const answerGrace = 2 * time.Second

// Options configure a client.
type Options struct {
	Conn transport.Conn
	// Redial replaces a lost connection to the same session; nil: a lost connection is final.
	Redial func(ctx context.Context) (transport.Conn, error)
	// Resend repeats a request that has no reply after this time, for networks that lose messages; 0: never.
	Resend time.Duration
	Pool   *bufpool.Pool
}

// Client sends requests. Start may be called from any goroutine.
type Client struct {
	opts     Options
	segments segments
	mu       struct {
		sync.Mutex
		conn     transport.Conn
		next     uint64 // last sequence given out
		inflight map[uint64]struct{}
		closed   bool
	}
	background context.Context
	stop       context.CancelFunc
}

// NewID returns a random client id.
func NewID() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, says crypto/rand
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// New makes a client over a connection.
func New(o Options) *Client {
	c := &Client{opts: o}
	c.mu.conn = o.Conn
	c.mu.inflight = map[uint64]struct{}{}
	c.segments.init()
	c.background, c.stop = context.WithCancel(context.Background())
	return c
}

// Close ends all requests and the connection. Results that are alive stay valid.
func (c *Client) Close() error {
	c.mu.Lock()
	c.mu.closed = true
	conn := c.mu.conn
	c.mu.Unlock()
	c.stop()
	err := conn.Close()
	c.segments.close()
	return err
}

// Flags change how the result of a get is built; the numbers are those of enum tq_flags.
type Flags uint32

// Flags of a request.
const (
	Views       Flags = 1 << iota // views of unit memory where possible
	DenseLayout                   // a column whose rows have one shape comes back as one plain tensor
)

// Request is what a caller asks. Columns are the inputs of a put; their memory is borrowed until Start returns.
type Request struct {
	Op      wire.Op
	Flags   Flags
	Body    []byte
	Columns []foreign.Raw
	Rows    int
	Timeout time.Duration // 0: none
}

// Result ends a request. Body is the msgpack reply.
type Result struct {
	Err     error
	Body    []byte
	Rows    int
	Columns []ResultColumn
}

// changes lists the requests that carry a sequence number.
var changes = map[wire.Op]bool{
	wire.OpPut: true, wire.OpCommit: true, wire.OpAbort: true, wire.OpClear: true, wire.OpClearPartition: true,
	wire.OpWatchNext: true, wire.OpMeta: true, wire.OpRetrieveMeta: true, wire.OpSetTags: true,
	wire.OpResetConsumption: true, wire.OpWatchOpen: true,
}

// Start begins a request. done is called exactly once, from any goroutine, unless Start returns an error. cancel ends the
// request early and may be called at any time.
func (c *Client) Start(req *Request, done func(*Result)) (cancel func(), err error) {
	if c.background.Err() != nil {
		return nil, tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	ctx, cancel := context.WithCancel(c.background)
	finish := func(r *Result) {
		cancel()
		done(r)
	}
	if req.Op == wire.OpPut {
		if err := c.startPut(ctx, req, finish); err != nil {
			cancel()
			return nil, err
		}
		return cancel, nil
	}
	guard.Go("client request", func() {
		if req.Op == wire.OpGet {
			finish(c.get(ctx, req))
			return
		}
		reply, err := c.call(ctx, req.Op, req.Body, nil, req.Timeout)
		finish(plainResult(reply, err))
	})
	return cancel, nil
}

func plainResult(reply *wire.Reply, err error) *Result {
	if err != nil {
		return &Result{Err: err}
	}
	return &Result{Body: reply.Body}
}

// sequence gives out a number for a request that changes something, and the lowest one that may still be repeated.
func (c *Client) sequence(op wire.Op) (uint64, func()) {
	if !changes[op] {
		return 0, func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.next++
	n := c.mu.next
	c.mu.inflight[n] = struct{}{}
	return n, func() {
		c.mu.Lock()
		delete(c.mu.inflight, n)
		c.mu.Unlock()
	}
}

func (c *Client) ack() (transport.Conn, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	lowest := c.mu.next + 1
	for n := range c.mu.inflight {
		lowest = min(lowest, n)
	}
	return c.mu.conn, lowest
}

// call sends a request until it has an answer, the time is over, or the connection is lost for good.
func (c *Client) call(ctx context.Context, op wire.Op, body, payload []byte, timeout time.Duration) (*wire.Reply, error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout+answerGrace)
		defer cancel()
	}
	sequence, end := c.sequence(op)
	defer end()
	for {
		conn, ack := c.ack()
		req := &wire.Request{Op: op, Sequence: sequence, Ack: ack, Timeout: timeout, Body: body, Payload: payload}
		reply, err := c.once(ctx, conn, req)
		switch {
		case err == nil:
			return reply, nil
		case ctx.Err() != nil:
			return nil, err
		case err == errLost:
		case tqerr.CodeOf(err) == tqerr.Unavailable && c.opts.Redial != nil:
			if derr := c.redial(ctx, conn); derr != nil {
				return nil, err
			}
		default:
			return nil, err
		}
	}
}

// errLost says that no reply came in time and the request may be sent again.
var errLost = tqerr.New(tqerr.DeadlineExceeded, "no reply")

// once sends a request once.
func (c *Client) once(ctx context.Context, conn transport.Conn, req *wire.Request) (*wire.Reply, error) {
	if c.opts.Resend == 0 {
		return conn.Call(ctx, req)
	}
	short, cancel := context.WithTimeout(ctx, c.opts.Resend)
	defer cancel()
	reply, err := conn.Call(short, req)
	if err != nil && short.Err() != nil && ctx.Err() == nil {
		return nil, errLost
	}
	return reply, err
}

func (c *Client) redial(ctx context.Context, lost transport.Conn) error {
	c.mu.Lock()
	current := c.mu.conn
	c.mu.Unlock()
	if current != lost {
		return nil
	}
	fresh, err := c.opts.Redial(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if c.mu.conn != lost || c.mu.closed {
		c.mu.Unlock()
		return fresh.Close()
	}
	c.mu.conn = fresh
	c.mu.Unlock()
	return lost.Close()
}

// notify sends a request without a reply; a lost connection has the same effect as the request.
func (c *Client) notify(op wire.Op, body any) {
	data, err := wire.Marshal(body)
	if err != nil {
		return
	}
	conn, ack := c.ack()
	_ = conn.Notify(&wire.Request{Op: op, Ack: ack, Body: data})
}
