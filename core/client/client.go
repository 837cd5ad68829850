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
	"transferqueue/core/guard"
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
	answerGrace = time.Second
	// settleTime is how long a client then waits to hear what became of a request.
	settleTime = time.Second
)

// Options configure a client.
type Options struct {
	Conn transport.Conn
	// Redial replaces a lost connection to the same session; nil: a lost connection is final.
	Redial func(ctx context.Context) (transport.Conn, error)
	// Resend repeats a request that has no reply after this time, for networks that lose messages; 0: never.
	Resend time.Duration
	Pool   *bufpool.Pool
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
		counts []uint64 // of each lane: the requests it has had
		idle   []uint64 // lanes without a request; the last one is used next
		closed bool
	}
	redialing  chan struct{} // has one element while somebody redials
	background context.Context
	stop       context.CancelFunc
	directs    directs
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
	// whether the request has come to its end. It must be called until then, also after Cancel.
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
	wire.OpWatchOpen: true, wire.OpWatchNext: true,
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
	sent := c.begin(ctx, req.Op, req.Body, nil, req.Timeout, req.Waits)
	var started Started
	if req.Op == wire.OpGet {
		started = sent.then("client get", func(reply *wire.Reply, err error) { finish(c.got(ctx, req.Flags, reply, err)) })
	} else {
		started = sent.then("client request", func(reply *wire.Reply, err error) { finish(plainResult(reply, err)) })
	}
	started.Cancel = cancel
	return started, nil
}

func plainResult(reply *wire.Reply, err error) *Result {
	if err != nil {
		return &Result{Err: err}
	}
	return &Result{Body: reply.Body}
}

// takeLane gives a sequence to a request. Lanes are reused from the top of a stack, so there are as many as there ever were
// requests in flight at a time.
func (c *Client) takeLane() (sequence uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.idle) == 0 {
		c.mu.idle = append(c.mu.idle, uint64(len(c.mu.counts)))
		c.mu.counts = append(c.mu.counts, 0)
	}
	last := len(c.mu.idle) - 1
	lane := c.mu.idle[last]
	c.mu.idle = c.mu.idle[:last]
	c.mu.counts[lane]++
	return wire.Sequence(lane, c.mu.counts[lane])
}

func (c *Client) giveLane(sequence uint64) {
	lane, _ := wire.SplitSequence(sequence)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.idle = append(c.mu.idle, lane)
}

func (c *Client) conn() transport.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.conn
}

// sent is a request on its way.
type sent struct {
	c       *Client
	ctx     context.Context
	cancel  context.CancelFunc
	req     *wire.Request
	conn    transport.Conn
	pending transport.Pending // nil: not sent yet
	direct  Direct            // what it was sent on, nil: conn
}

// begin sends a request on the caller's goroutine, so that it is on its way before another one has to be woken. then must
// follow. direct allows a connection that the caller of then waits for.
func (c *Client) begin(ctx context.Context, op wire.Op, body, payload []byte, timeout time.Duration, direct bool) *sent {
	s := &sent{c: c, ctx: ctx, cancel: func() {}, conn: c.conn()}
	s.req = &wire.Request{Op: op, Timeout: timeout, Body: body, Payload: payload}
	if timeout > 0 {
		s.ctx, s.cancel = context.WithTimeout(ctx, timeout+answerGrace)
	}
	if sequenced[op] {
		s.req.Sequence = c.takeLane()
	}
	if direct {
		s.direct = c.directs.take(s.ctx, c.opts.Direct)
	}
	if s.direct != nil {
		s.pending = s.direct.Begin(s.ctx, s.req)
	} else if b, ok := s.conn.(transport.Beginner); ok && c.opts.Resend == 0 {
		s.pending = b.Begin(s.ctx, s.req)
	}
	return s
}

// then calls do with the answer: at once when it is there already and small, in Advance on a direct connection, else on a
// goroutine of the given name.
func (s *sent) then(name string, do func(*wire.Reply, error)) Started {
	switch {
	case s.direct != nil:
		return Started{FD: s.direct.FD(), Advance: func() bool {
			if !s.pending.Ready() {
				return false
			}
			do(s.wait())
			return true
		}}
	case s.pending == nil || !s.pending.Ready():
		guard.Go(name, func() { do(s.wait()) })
		return Started{}
	}
	reply, err := s.wait()
	if err != nil || s.req.Op != wire.OpGet || reply.Payload != nil {
		do(reply, err)
	} else {
		guard.Go(name, func() { do(reply, nil) })
	}
	return Started{}
}

// wait returns when the request has an answer, its time is over, or the connection is lost for good.
func (s *sent) wait() (*wire.Reply, error) {
	defer s.cancel()
	if s.req.Sequence != 0 {
		defer s.c.giveLane(s.req.Sequence)
	}
	reply, err := s.answer()
	if err != nil && s.req.Sequence != 0 && s.ctx.Err() != nil {
		return s.c.settle(s.req.Sequence, err)
	}
	return reply, err
}

func (s *sent) answer() (*wire.Reply, error) {
	if s.pending == nil {
		return s.c.repeat(s.ctx, s.req)
	}
	reply, err := s.pending.Wait(s.ctx)
	if s.direct != nil {
		s.c.directs.give(s.direct)
		return reply, err
	}
	if err == nil || s.ctx.Err() != nil || s.c.opts.Redial == nil || !ended(s.conn) {
		return reply, err
	}
	return s.c.repeat(s.ctx, s.req)
}

// settle calls a request off that has ended with err here. It returns its outcome when it has one after all, and err when
// nothing has happened or the server cannot be asked.
func (c *Client) settle(sequence uint64, err error) (*wire.Reply, error) {
	ctx, cancel := context.WithTimeout(c.background, settleTime)
	defer cancel()
	reply, asked := c.callOff(ctx, sequence)
	switch tqerr.CodeOf(asked) {
	case tqerr.OK:
		return reply, nil
	case tqerr.Cancelled, tqerr.DeadlineExceeded, tqerr.Unavailable:
		return nil, err
	default:
		return nil, asked
	}
}

func (c *Client) callOff(ctx context.Context, sequence uint64) (*wire.Reply, error) {
	body, err := wire.Marshal(&wire.TxnRequest{Txn: sequence})
	if err != nil {
		return nil, err
	}
	return c.repeat(ctx, &wire.Request{Op: wire.OpAbort, Body: body})
}

// repeat sends a request again and again until it has an answer.
func (c *Client) repeat(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	for {
		conn := c.conn()
		reply, err := c.once(ctx, conn, req)
		switch {
		case err == nil || ctx.Err() != nil:
			return reply, err
		case err == errLost:
		case c.opts.Redial != nil && ended(conn):
			if c.redial(ctx, conn) != nil {
				return nil, err
			}
		default:
			return nil, err
		}
	}
}

func ended(conn transport.Conn) bool {
	select {
	case <-conn.Done():
		return true
	default:
		return false
	}
}

// errLost says that no reply came in time and the request may be sent again.
var errLost error = tqerr.New(tqerr.DeadlineExceeded, "no reply")

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

// redial replaces a lost connection, unless somebody else has done so.
func (c *Client) redial(ctx context.Context, lost transport.Conn) error {
	select {
	case c.redialing <- struct{}{}:
		defer func() { <-c.redialing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if c.conn() != lost {
		return nil
	}
	fresh, err := c.opts.Redial(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		_ = fresh.Close()
		return tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	c.mu.conn = fresh
	c.mu.Unlock()
	return lost.Close()
}

// release ends leases. On a connection that loses nothing a notification will do: when the connection ends, so do the leases.
func (c *Client) release(leases wire.Ints) {
	body, err := wire.Marshal(&wire.ReleaseRequest{Leases: leases})
	if err != nil {
		return
	}
	req := &wire.Request{Op: wire.OpRelease, Body: body}
	if c.opts.Resend == 0 && c.opts.Redial == nil {
		_ = c.conn().Notify(req)
		return
	}
	guard.Go("client release", func() { _, _ = c.repeat(c.background, req) })
}
