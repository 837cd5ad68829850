// Package client is the queue as a process sees it: it sends requests, moves payload between the caller's memory and unit
// memory, and builds results. It keeps no state about partitions.
//
// A request that changes or grants something carries a sequence; it may be sent again under the same one, and the server
// answers with the first outcome. One that ends here without an answer, because its time is over or it was cancelled, is
// called off: the server says what has become of it, so that a timeout never means "perhaps".
//
// Locks: segments.using, held over the request for a segment too, comes before segments.mu, and that before arena.Mapping.mu;
// directs.mu comes before the lock of a Direct. The others are leaves.
package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"sync"
	"time"

	"transferqueue/core/foreign"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// InlineLimit is the payload in bytes up to which a put carries its bytes in the request and a get in the reply: below it
// a copy is cheaper than a second round trip.
const InlineLimit = 64 << 10

const (
	// answerGrace is how much longer than the request's own time a client waits for the answer, which comes when that time
	// is over, at the latest.
	answerGrace = 300 * time.Millisecond
	// settleTime is how long a client then waits to hear what became of a request.
	settleTime = 500 * time.Millisecond
	// lostTogether is how long after another connection the common one may show that the server is gone.
	lostTogether = time.Second
)

// Options configure a client.
type Options struct {
	Conn transport.Conn
	// Redial replaces a lost connection to the same session; nil: a lost connection is final.
	Redial func(ctx context.Context) (transport.Conn, error)
	// Remembered says that the session knows the outcomes of requests also when it was started again.
	Remembered bool
	// Resend repeats a request that has no reply after this time, for networks that lose messages; 0: never.
	Resend time.Duration
	Pool   *bufpool.Pool
	// Machine is where this client is; units of the same one are tried by their sockets.
	Machine string
	// Inline is the InlineLimit of connections on which messages are dear; 0: InlineLimit.
	Inline int64
	// Direct opens a connection for single requests of callers that wait; nil: there is only Conn.
	Direct func(ctx context.Context) (Direct, error)
}

// Direct is a connection that a waiting caller reads the reply from himself; see transport/local.
type Direct interface {
	transport.Beginner
	// FD is readable when the reply is there or the connection is gone.
	FD() int
	// Broken reports that the connection cannot be used again.
	Broken() bool
	Close() error
}

// Client sends requests. Start may be called from any goroutine.
type Client struct {
	opts     Options
	segments segments
	mu       struct {
		sync.Mutex
		conn   transport.Conn
		life   int      // grows when the server had forgotten this client before it was reached again
		counts []uint64 // of each lane: the requests it has had
		idle   []uint64 // lanes without a request; the last one is used next
		closed bool
	}
	redialing chan struct{} // has one element while somebody redials
	redialed  struct {      // how the last one failed; of who redials
		err error
		at  time.Time
	}
	background context.Context
	stop       context.CancelFunc
	directs    directs
	ways       ways
}

// NewID returns a random client id.
func NewID() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, says crypto/rand
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// New makes a client over a connection.
func New(o Options) *Client {
	c := &Client{opts: o, redialing: make(chan struct{}, 1)}
	c.mu.conn = o.Conn
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
	c.directs.close()
	c.ways.close()
	c.segments.close() // before the server hears of it and reuses what is viewed
	return conn.Close()
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
	// Waits says that the caller waits for this request and does nothing else meanwhile.
	Waits bool
}

// Started is a request in progress.
type Started struct {
	// Cancel ends the request early. It may be called at any time.
	Cancel func()
	// FD, when Advance is not nil, is what the caller waits for until it is readable; then he calls Advance, which reports
	// whether the request needs it no more: it has come to its end, or goes on by itself. It must be called until then, also
	// after Cancel.
	FD      int
	Advance func() bool
}

// Result ends a request. Body is the msgpack reply.
type Result struct {
	Err     error
	Body    []byte
	Rows    int
	Columns []ResultColumn
}

// sequenced lists the requests that carry a sequence: those that change something, and those whose reply grants something.
var sequenced = map[wire.Op]bool{
	wire.OpPut: true, wire.OpCommit: true, wire.OpClear: true, wire.OpClearPartition: true, wire.OpMeta: true,
	wire.OpRetrieveMeta: true, wire.OpSetTags: true, wire.OpResetConsumption: true, wire.OpGet: true,
	wire.OpWatchOpen: true, wire.OpWatchNext: true, wire.OpSaveCheckpoint: true, wire.OpLoadCheckpoint: true,
	wire.OpDumpRows: true, wire.OpLoadRows: true, wire.OpDrain: true, wire.OpUncordon: true,
	wire.OpMove: true, wire.OpRebalance: true,
}

// Start begins a request. done is called exactly once, from any goroutine, unless Start returns an error.
func (c *Client) Start(req *Request, done func(*Result)) (Started, error) {
	if c.background.Err() != nil {
		return Started{}, tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	ctx, cancel := context.WithCancel(c.background)
	finish := func(r *Result) {
		cancel()
		r.Err = tqerr.WithOp(req.Op.Public(), r.Err)
		done(r)
	}
	if req.Op == wire.OpPut {
		started, err := c.startPut(ctx, req, finish)
		if err != nil {
			cancel()
			return Started{}, err
		}
		started.Cancel = cancel
		return started, nil
	}
	body, err := c.bounded(req)
	if err != nil {
		cancel()
		return Started{}, err
	}
	var started Started
	if req.Op == wire.OpGet {
		started = c.startGet(ctx, req, body, finish)
	} else {
		sent := c.begin(ctx, req.Op, body, nil, req.Timeout, req.Waits)
		started = sent.then("client request", func(reply *wire.Reply, err error) { finish(plainResult(reply, err)) })
	}
	started.Cancel = cancel
	return started, nil
}

// startGet begins a get. It begins anew when the server was lost behind its reply, before the memory that the reply names was
// reached: another one knows of no such memory.
func (c *Client) startGet(ctx context.Context, req *Request, body []byte, finish func(*Result)) Started {
	begun, conn := time.Now(), c.conn()
	sent := c.begin(ctx, req.Op, body, nil, req.Timeout, req.Waits)
	return sent.then("client get", func(reply *wire.Reply, err error) {
		inTime, cancel := within(ctx, remaining(req.Timeout, begun))
		defer cancel()
		got := c.got(inTime, req.Flags, reply, err)
		if err == nil && c.lostMeanwhile(ctx, conn, got.Err) {
			again := *req
			again.Timeout, again.Waits = remaining(req.Timeout, begun), false
			c.startGet(ctx, &again, body, finish)
			return
		}
		finish(got)
	})
}

// lostMeanwhile reports that something failed because a connection was lost that is replaced. Another connection may show sooner
// that the server is gone.
func (c *Client) lostMeanwhile(ctx context.Context, conn transport.Conn, err error) bool {
	code := tqerr.CodeOf(err)
	if code != tqerr.Unavailable && code != tqerr.NotFound || c.opts.Redial == nil || ctx.Err() != nil {
		return false
	}
	return c.conn() != conn || ended(conn) || code == tqerr.Unavailable && endsSoon(ctx, conn)
}

func plainResult(reply *wire.Reply, err error) *Result {
	if err != nil {
		return &Result{Err: err}
	}
	return &Result{Body: reply.Body}
}

func (c *Client) inlineLimit() int64 {
	if c.opts.Inline > 0 {
		return c.opts.Inline
	}
	return InlineLimit
}

// bounded is the body of a request whose reply brings no more payload than the connection is good for.
func (c *Client) bounded(req *Request) ([]byte, error) {
	if c.opts.Inline == 0 || req.Op != wire.OpGet {
		return req.Body, nil
	}
	var get wire.GetRequest
	if err := wire.Unmarshal(req.Body, &get); err != nil {
		return nil, err
	}
	get.Inline = min(get.Inline, c.opts.Inline)
	return wire.Marshal(&get)
}
