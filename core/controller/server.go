// Package controller serves a session: it guards the catalog, answers clients, and drives the units, in its process or in
// others. Payload passes it only inside small requests and replies.
//
// Locks: Server.mu guards the catalog, the sampler, and everything that is decided from them (write sets, waiters, watches). A write is
// staged on the units before mu is taken; under mu the catalog applies it and the units commit, which only swaps
// references. Readers resolve and lease under the read lock, so they see a write whole or not at all. To a unit in another
// process commits, reads and deletes are put in line under mu and waited for outside: the unit executes them in that order.
// Client state has a lock of its own, taken after mu.
//
// With a journal what a request changes is written down under mu before it is done, see journaling; recover.go makes a server of
// what an earlier one has written.
//
// A handler must not block (transport.Handler): one that has to wait moves to a goroutine with call.later.
package controller

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/internal/metrics"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// Options configure a server.
type Options struct {
	Units       []Unit
	Sampler     sampler.Sampler
	Python      sampler.Runner // runs samplers that are registered later
	SamplerTime time.Duration  // limit of a call of such a sampler
	Polling     bool           // an unsatisfiable fetch returns nothing at once
	PreAllocate int
	SampleLimit int64         // samples over all units, 0: none
	PutWait     time.Duration // how long a put waits for room
	Config      []byte        // what OpConfig answers, until OpStoreConfig replaces it
	Version     string
	PID         int
	FS          vfs.FS // of checkpoints; nil: the machine's
	Session     string // identity
	Secret      []byte // with which clients of this host join; only kept
	Host        string
	Machine     string     // where it and its clients of this host are; see internal/machine
	Jobs        func() int // calls of Python functions that no thread has taken; nil: none
	// Journal is where everything that changes is written down, so that it can go on after the controller has died; it belongs
	// to the server from Open on. nil: nowhere.
	Journal *journal.Log
	// RestartWait is how long clients are to wait for a controller that has died; with a journal only.
	RestartWait time.Duration
	// Dial connects to a unit in another process; nil: by its socket. That of a unit on another host is a *remote.Line.
	Dial func(ctx context.Context, at *wire.UnitAddress) (remote.Conn, error)
}

// Server is the controller of a session.
type Server struct {
	opts    Options
	nodes   atomic.Pointer[nodes]
	closing sync.Once
	joining chan struct{} // has one element while nobody adds units
	started time.Time
	number  uint64 // of the session, as units know it
	ctx     context.Context
	cancel  context.CancelFunc

	mu struct {
		sync.RWMutex
		cat     *catalog.Catalog
		sampler sampler.Sampler
		changes uint64 // counts what may make a waiting request go on
		writes  writeSets
		waiters map[string][]*waiter
		watches map[string][]*watch
		drains  drains

		// With a journal:
		outcomes   map[uint64]map[uint64]outcome // by client and lane
		registered *samplerRecord                // the sampler, when it is not that of Options
		memory     []byte                        // of a sampler that Python runs, when it has said it last
	}
	clients struct {
		sync.Mutex
		byID    map[uint64]*client
		awaited map[uint64]map[uint64]*lane // of clients of an earlier life, that have not come yet
	}
	journal *journaling // nil: none
	room    unit.Freed
	saves   saves
	metrics counters
	blob    atomic.Pointer[[]byte] // configuration of the session
	// mapped is held for reading by who touches the memory of units in other processes; Close unmaps it. Streams do not hold
	// it, because they last as long as the network likes: those that write are stopped by Gone, those that read by lent.
	mapped sync.RWMutex
	lent   transport.Loans

	cordoned atomic.Bool // some unit takes no samples
	moving   underway
}

// New starts a server without a journal over units that nobody else uses.
func New(o Options) *Server {
	s := blank(o)
	for _, u := range o.Units {
		s.addLocked(inside{u, u.ID(), s.sampleLimit(), o.Machine}, nil)
		u.Advise(s.advise)
	}
	return s
}

// blank makes a server without units.
func blank(o Options) *Server {
	s := &Server{opts: o, joining: make(chan struct{}, 1), started: time.Now(), number: sessionNumber(o.Session)}
	s.metrics.requests = make([]metrics.Series, numKinds)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.saves.open = map[saveKey]*save{}
	s.saves.values = map[*client]string{}
	s.saves.ended = make(chan struct{})
	if s.opts.FS == nil {
		s.opts.FS = vfs.OS{}
	}
	s.blob.Store(&s.opts.Config)
	s.joining <- struct{}{}
	s.nodes.Store(&nodes{})
	s.mu.cat = catalog.New(catalog.Options{PreAllocate: max(o.PreAllocate, 1), SampleLimitPerUnit: s.sampleLimit()})
	s.mu.sampler = o.Sampler
	s.mu.waiters = map[string][]*waiter{}
	s.mu.watches = map[string][]*watch{}
	s.clients.byID = map[uint64]*client{}
	return s
}

// sampleLimit is the most samples that one unit of this process takes, 0 for no limit.
func (s *Server) sampleLimit() int64 {
	n := int64(len(s.opts.Units))
	if s.opts.SampleLimit <= 0 || n == 0 {
		return 0
	}
	return (s.opts.SampleLimit + n - 1) / n
}

// Close ends all waiting requests with Unavailable and drops all staged work and leases. The units of this process stay open;
// the connections to others end.
func (s *Server) Close() {
	s.cancel()
	s.clients.Lock()
	ids := make([]uint64, 0, len(s.clients.byID))
	for id := range s.clients.byID {
		ids = append(ids, id)
	}
	s.clients.Unlock()
	for _, id := range ids {
		s.Gone(transport.Peer{ID: id})
	}
	s.closing.Do(func() {
		<-s.joining // nobody adds units any more
		all := s.nodes.Load().byID
		for _, n := range all {
			n.disconnect()
		}
		s.moving.close()
		s.lent.Recall()
		s.mapped.Lock()
		defer s.mapped.Unlock()
		for _, n := range all {
			n.close()
		}
		if s.journal != nil {
			_ = s.journal.close() // everything that was answered is durable
		}
	})
}

// Segment implements transport.Handler.
func (s *Server) Segment(number, segment uint32) (int, int64, error) {
	n := s.node(number)
	if n == nil {
		return -1, 0, tqerr.New(tqerr.NotFound, "unit %d does not exist", number)
	}
	return n.Segment(segment)
}

// call is one request on its way to its reply.
type call struct {
	s      *Server
	ctx    context.Context
	cancel context.CancelFunc // of a request with a sequence
	handle handler
	client *client
	peer   uint64
	remote bool   // the client cannot map the memory of units of the controller's host
	from   string // machine of the client
	req    *wire.Request
	reply  func(*wire.Reply) // of the transport
	undo   func()            // set by a handler: gives back what its reply grants
	measured
}

// takeBack undoes what a reply grants that nobody will get.
func (c *call) takeBack() {
	if c.undo != nil {
		c.undo()
	}
}

// handler answers a request at once, or returns errLater after it has arranged for call.finish to be called.
type handler func(c *call) (any, error)

var (
	errLater  = tqerr.New(tqerr.Internal, "answered later")
	errClosed = tqerr.New(tqerr.Unavailable, "the session was closed")
)

var handlers = map[wire.Op]handler{
	wire.OpPut:              (*call).put,
	wire.OpCommit:           (*call).commit,
	wire.OpAbort:            (*call).abort,
	wire.OpGet:              (*call).get,
	wire.OpRelease:          (*call).release,
	wire.OpClear:            (*call).clear,
	wire.OpClearPartition:   (*call).clearPartition,
	wire.OpList:             (*call).list,
	wire.OpWait:             (*call).wait,
	wire.OpWatchOpen:        (*call).watchOpen,
	wire.OpWatchNext:        (*call).watchNext,
	wire.OpWatchClose:       (*call).watchClose,
	wire.OpMeta:             (*call).meta,
	wire.OpRetrieveMeta:     (*call).retrieveMeta,
	wire.OpRetrieveKeys:     (*call).retrieveKeys,
	wire.OpSetTags:          (*call).setTags,
	wire.OpConsumption:      (*call).consumption,
	wire.OpResetConsumption: (*call).resetConsumption,
	wire.OpProduction:       (*call).production,
	wire.OpProgress:         (*call).progress,
	wire.OpPartitions:       (*call).partitions,
	wire.OpUnits:            (*call).listUnits,
	wire.OpConfig:           (*call).config,
	wire.OpStatus:           (*call).status,
	wire.OpSaveCheckpoint:   (*call).saveCheckpoint,
	wire.OpLoadCheckpoint:   (*call).loadCheckpoint,
	wire.OpDumpRows:         (*call).dumpRows,
	wire.OpLoadRows:         (*call).loadRows,
	wire.OpCreatePartition:  (*call).createPartition,
	wire.OpStoreConfig:      (*call).storeConfig,
	wire.OpRegisterSampler:  (*call).registerSampler,
	wire.OpStream:           (*call).stream,
	wire.OpMetrics:          (*call).metrics,
	wire.OpSnapshot:         (*call).snapshot,
	wire.OpJoinUnits:        (*call).joinUnits,
	wire.OpReachUnit:        (*call).reachUnit,
	wire.OpLost:             (*call).lost,
	wire.OpDrain:            (*call).drain,
	wire.OpUncordon:         (*call).uncordon,
	wire.OpJob:              (*call).job,
	wire.OpMove:             (*call).move,
	wire.OpRebalance:        (*call).rebalance,
}

// Serve implements transport.Handler.
func (s *Server) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	handle, known := handlers[req.Op]
	c := &call{s: s, ctx: ctx, handle: handle, peer: peer.ID, req: req, reply: reply, remote: !peer.Local, from: peer.Machine}
	if peer.Local {
		c.from = s.opts.Machine
	}
	var err error
	switch c.client = s.clientOf(ctx, peer); {
	case !known:
		err = tqerr.New(tqerr.Unimplemented, "unknown request %d; client and session are of different versions", req.Op)
	case s.ctx.Err() != nil:
		err = tqerr.New(tqerr.Unavailable, "the session is closing")
	case c.client == nil && errors.Is(ctx.Err(), context.DeadlineExceeded): // of a client of the controller before this one
		err = ctxError(ctx, req.Op.Public())
	case c.client == nil:
		err = errGone
	}
	if err != nil {
		reply(wire.ErrorReply(err))
		return
	}
	if req.Sequence != 0 {
		c.ctx, c.cancel = lasting(ctx, req.Op)
		if !c.client.begin(c) {
			return
		}
	}
	c.run()
}

// lasting is the context of a request that may come again. That of a commit goes on when the connection breaks, until the
// client is gone: it has taken the staged write, so that it could not run again.
func lasting(ctx context.Context, op wire.Op) (context.Context, context.CancelFunc) {
	if op != wire.OpCommit {
		return context.WithCancel(ctx)
	}
	kept := context.WithoutCancel(ctx)
	if deadline, ok := ctx.Deadline(); ok {
		return context.WithDeadline(kept, deadline)
	}
	return context.WithCancel(kept)
}

// run calls the handler, unless the client has given the request up before it arrived, as when this process was stopped: what is
// done then happens behind the back of somebody who was told that it has not.
func (c *call) run() {
	c.measured = measured{kind: kind(c.req.Op), began: time.Now()}
	if errors.Is(c.ctx.Err(), context.DeadlineExceeded) && !givesBack(c.req.Op) {
		c.finish(nil, ctxError(c.ctx, c.req.Op.Public()))
		return
	}
	result, err := c.handle(c)
	c.finish(result, err)
}

// givesBack reports that a request only ends something, so that it is never too late for it.
func givesBack(op wire.Op) bool {
	return op == wire.OpAbort || op == wire.OpRelease || op == wire.OpWatchClose
}

// payloadReply is a result that carries cell bytes.
type payloadReply struct {
	body    any
	payload []byte
}

// finish sends the reply, unless that is up to somebody else.
func (c *call) finish(result any, err error) {
	if err == error(errLater) {
		return
	}
	if err == error(errGone) && c.s.ctx.Err() != nil {
		err = errClosed // the client is there, but Close has dropped what it had
	}
	reply := c.makeReply(result, err)
	c.s.afterDurable(func(err error) {
		if err != nil && reply.Code == tqerr.OK {
			c.takeBack()
			c.undo = nil
			reply = wire.ErrorReply(tqerr.WithOp(c.req.Op.Public(), err))
		}
		c.send(reply)
	})
}

func (c *call) send(reply *wire.Reply) {
	c.observe(reply.Code)
	if c.req.Sequence == 0 {
		c.reply(reply)
		return
	}
	c.client.end(c, reply)
	c.cancel()
}

func (c *call) makeReply(result any, err error) *wire.Reply {
	if err == nil {
		payload, plain := []byte(nil), result
		if with, ok := result.(payloadReply); ok {
			plain, payload = with.body, with.payload
		}
		var body []byte
		if plain != nil {
			body, err = wire.Marshal(plain)
		}
		if err == nil {
			return &wire.Reply{Code: tqerr.OK, Body: body, Payload: payload}
		}
		c.takeBack()
		c.undo = nil
	}
	return wire.ErrorReply(tqerr.WithOp(c.req.Op.Public(), err))
}

// later runs the rest of a handler on a goroutine of its own. Its context also ends when the server closes. A panic in it
// gives an Internal reply, as one in the handler does.
func (c *call) later(run func(ctx context.Context) (any, error)) (any, error) {
	guard.Go("controller "+c.req.Op.Public(), func() {
		ctx, cancel := context.WithCancel(c.ctx)
		stop := context.AfterFunc(c.s.ctx, cancel)
		defer cancel()
		defer stop()
		var result any
		err := func() (err error) {
			defer guard.Recover(&err)
			result, err = run(ctx)
			return err
		}()
		if err != nil && err != error(errLater) && c.s.ctx.Err() != nil {
			err = errClosed
		}
		c.finish(result, err)
	})
	return nil, errLater
}

// decode reads the body of the request.
func (c *call) decode(v any) error { return wire.Unmarshal(c.req.Body, v) }
