// Package controller serves a session: it guards the catalog, answers clients, and drives the units that lie in its
// process. Payload passes it only inside small requests and replies.
//
// Locks: Server.mu guards the catalog and everything that is decided from it (write sets, waiters, watches). A write is
// staged on the units before mu is taken; under mu the catalog applies it and the units commit, which only swaps
// references. Readers resolve and lease under the read lock, so they see a write whole or not at all. Client state has a
// lock of its own, taken after mu.
//
// A handler must not block (transport.Handler): one that has to wait moves to a goroutine with call.later.
package controller

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/sampler"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Unit is a storage unit in this process.
type Unit interface {
	store.Store
	ID() uint32
	Name() string
	Host() string
	// Segment gives a duplicate of a segment's descriptor, which the caller closes, and its size.
	Segment(segment uint32) (fd int, size int64, err error)
	// Update computes merge(stored, operand) for every cell and stages the results.
	Update(ctx context.Context, spec *unit.UpdateSpec) (*unit.Transformed, error)
	// Parse runs a data parser over rows of a put and stages what it returns.
	Parse(ctx context.Context, spec *unit.ParseSpec) (*unit.Transformed, error)
}

// Options configure a server.
type Options struct {
	Units       []Unit
	Sampler     sampler.Sampler
	Polling     bool // an unsatisfiable fetch returns nothing at once
	PreAllocate int
	SampleLimit int64         // samples over all units, 0: none
	PutWait     time.Duration // how long a put waits for room
	Config      []byte        // what OpConfig answers, until OpStoreConfig replaces it
	Version     string
	PID         int
	Session     string // identity
	Host        string
}

// Server is the controller of a session.
type Server struct {
	opts    Options
	units   map[uint32]Unit
	order   []Unit
	started time.Time
	ctx     context.Context
	cancel  context.CancelFunc

	mu struct {
		sync.RWMutex
		cat     *catalog.Catalog
		writes  writeSets
		waiters map[string][]*waiter
		watches map[string][]*watch
	}
	clients struct {
		sync.Mutex
		byID map[uint64]*client
	}
	room roomSignal
	blob atomic.Pointer[[]byte] // configuration of the session
}

// New starts a server over units that nobody else uses.
func New(o Options) *Server {
	s := &Server{opts: o, units: map[uint32]Unit{}, order: o.Units, started: time.Now()}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.room.init()
	s.blob.Store(&s.opts.Config)
	s.mu.cat = catalog.New(catalog.Options{PreAllocate: max(o.PreAllocate, 1), SampleLimitPerUnit: s.sampleLimit()})
	s.mu.waiters = map[string][]*waiter{}
	s.mu.watches = map[string][]*watch{}
	s.clients.byID = map[uint64]*client{}
	for _, u := range o.Units {
		s.units[u.ID()] = u
		s.mu.cat.AddUnit(u.ID(), u.Host())
		u.OnFree(s.room.signal)
	}
	return s
}

// sampleLimit is the most samples that one unit takes, 0 for no limit.
func (s *Server) sampleLimit() int64 {
	n := int64(len(s.order))
	if s.opts.SampleLimit <= 0 || n == 0 {
		return 0
	}
	return (s.opts.SampleLimit + n - 1) / n
}

// Close ends all waiting requests with Unavailable and drops all staged work and leases. The units stay open.
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
}

// Segment implements transport.Handler.
func (s *Server) Segment(number, segment uint32) (int, int64, error) {
	u := s.units[number]
	if u == nil {
		return -1, 0, tqerr.New(tqerr.NotFound, "unit %d does not exist", number)
	}
	return u.Segment(segment)
}

// call is one request on its way to its reply.
type call struct {
	s      *Server
	ctx    context.Context
	cancel context.CancelFunc // of a request with a sequence
	handle handler
	client *client
	remote bool // the client cannot map the units' memory
	req    *wire.Request
	reply  func(*wire.Reply) // of the transport
	undo   func()            // set by a handler: gives back what its reply grants
}

// takeBack undoes what a reply grants that nobody will get.
func (c *call) takeBack() {
	if c.undo != nil {
		c.undo()
	}
}

// handler answers a request at once, or returns errLater after it has arranged for call.finish to be called.
type handler func(c *call) (any, error)

var errLater = tqerr.New(tqerr.Internal, "answered later")

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
	wire.OpPartitions:       (*call).partitions,
	wire.OpUnits:            (*call).listUnits,
	wire.OpConfig:           (*call).config,
	wire.OpStatus:           (*call).status,
	wire.OpCreatePartition:  (*call).createPartition,
	wire.OpStoreConfig:      (*call).storeConfig,
}

// Serve implements transport.Handler.
func (s *Server) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	handle, known := handlers[req.Op]
	c := &call{s: s, ctx: ctx, handle: handle, req: req, reply: reply, remote: !peer.Local}
	var err error
	switch c.client = s.clientOf(ctx, peer); {
	case !known:
		err = tqerr.New(tqerr.Unimplemented, "unknown request %d; client and session are of different versions", req.Op)
	case s.ctx.Err() != nil:
		err = tqerr.New(tqerr.Unavailable, "the session is closing")
	case c.client == nil:
		err = errGone
	}
	if err != nil {
		reply(wire.ErrorReply(err))
		return
	}
	if req.Sequence != 0 {
		c.ctx, c.cancel = context.WithCancel(ctx)
		if !c.client.begin(c) {
			return
		}
	}
	c.run()
}

// run calls the handler.
func (c *call) run() {
	result, err := c.handle(c)
	c.finish(result, err)
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
	reply := c.makeReply(result, err)
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
			err = tqerr.New(tqerr.Unavailable, "the session was closed")
		}
		c.finish(result, err)
	})
	return nil, errLater
}

// decode reads the body of the request.
func (c *call) decode(v any) error { return wire.Unmarshal(c.req.Body, v) }

// rooms says how much each unit could take.
func (s *Server) rooms() []catalog.Room {
	out := make([]catalog.Room, len(s.order))
	for i, u := range s.order {
		st := u.Stats()
		free := int64(math.MaxInt64)
		if st.MemoryLimit > 0 {
			free = st.MemoryLimit - st.MemoryUsed
		}
		out[i] = catalog.Room{Unit: u.ID(), Free: free, Used: st.MemoryUsed}
	}
	return out
}
