// Package remote is a storage unit in a process of its own: Server serves it there, Unit is what its controller holds.
//
// # The stream
//
// A controller sends everything to a unit as one stream of numbered requests, and the unit executes them one after
// another, as they arrive. So the controller only puts commits, reads and deletes in line while it decides about them
// under its lock, and waits for the answers outside. A read that was put in line behind a commit sees it, and what is read
// on several units is of one moment. An update, a parsed put, and what reads or writes the unit's disk start in their places and
// go on beside the stream.
//
// Every answer carries what the unit holds then, so the controller always has a recent copy.
//
// # Lives
//
// A unit serves one controller at a time. What that has staged or leased ends with its connection; of a controller that keeps
// a journal it stays until the next one of the session has said which writes are to be committed. The cells stay until a
// controller opens the unit again, which then begins empty, unless the controller is of the same session and wants them. A
// durable unit always keeps those of the same session, which it may have found on its disk, and refuses other sessions while
// it has any; to commits and deletes it answers when they are as durable as it promises. A controller that finds cells asks
// for an inventory, and deletes what it does not know.
//
// # Other hosts
//
// A unit on another host than its controller listens at a port of its own, and the controller dials it, as it dials one of its
// own host by a socket: that needs no other protocol, and clients must reach the unit's host anyway. The connection is a Line.
// When it breaks, the controller makes another one as the same peer, says which answers it has, and sends the rest of the
// stream again; the unit executes each request once and remembers the answers meanwhile. Nobody maps the unit's memory but
// clients of its own host. All others, the controller too, move payload over streams, by the numbers of writes and leases.
//
// Locks: Server.mu, then life.mu, then those of the store. In the controller's process Unit.stream is taken under the
// controller's lock; Unit.state is a leaf.
package remote

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"

	"transferqueue/core/guard"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Options configure a unit server.
type Options struct {
	Name        string
	MemoryLimit int64      // bytes, 0: none
	SampleLimit int64      // what it tells controllers; 0: none
	Disk        *unit.Disk // nil: memory only; its Run is that of the process
	Jobs        *jobs.Queue
}

// Server is a unit for a controller in another process. It implements transport.Handler.
type Server struct {
	opts        Options
	incarnation uint64
	current     atomic.Pointer[life] // the same as mu.life
	mu          struct {
		sync.Mutex
		unit    *unit.Unit
		units   int         // that were made
		freed   *unit.Freed // memory of unit
		session uint64      // whose cells the unit holds; 0: nobody's
		life    *life       // nil while no controller is connected
		left    *life       // of the controller before, whose staged writes and leases stay; nil: nothing has
		tickets Tickets
		closed  bool
	}
}

var _ transport.Handler = (*Server)(nil)

// NewServer makes an empty unit.
func NewServer(o Options) (*Server, error) {
	s := &Server{opts: o, incarnation: rand.Uint64()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.beginLocked(); err != nil {
		return nil, err
	}
	return s, nil
}

// beginLocked makes an empty unit.
func (s *Server) beginLocked() error {
	u, err := unit.New(unit.Options{Name: s.opts.Name, MemoryLimit: s.opts.MemoryLimit, Disk: s.nextDisk(), Jobs: s.opts.Jobs})
	if err != nil {
		return err
	}
	s.mu.unit, s.mu.freed = u, &unit.Freed{}
	u.OnFree(s.mu.freed.Signal)
	u.Advise(s.advise)
	return nil
}

// nextDisk is the disk of the next unit, which begins while the files of the one before are still there.
func (s *Server) nextDisk() *unit.Disk {
	if s.opts.Disk == nil {
		return nil
	}
	s.mu.units++
	d := *s.opts.Disk
	d.Unit = fmt.Sprintf("%s-%d", d.Unit, s.mu.units)
	return &d
}

// handler answers a request of the stream at once, or returns errLater and sees to the answer.
type handler func(l *life, r *request) (*wire.UnitReply, error)

var errLater = tqerr.New(tqerr.Internal, "answered later")

var handlers = map[wire.Op]handler{
	wire.OpUnitStage:     (*life).stage,
	wire.OpUnitCommit:    (*life).commit,
	wire.OpUnitAbort:     (*life).abort,
	wire.OpUnitRead:      (*life).read,
	wire.OpUnitRelease:   (*life).release,
	wire.OpUnitDelete:    (*life).remove,
	wire.OpUnitTransform: (*life).transform,
	wire.OpUnitStats:     (*life).report,
	wire.OpUnitPrepare:   (*life).prepare,
	wire.OpUnitSettle:    (*life).settle,
	wire.OpUnitInventory: (*life).inventory,
	wire.OpUnitDiscard:   (*life).discard,
	wire.OpUnitAdvise:    (*life).advise,
	wire.OpUnitPiece:     (*life).piece,
	wire.OpUnitTicket:    (*life).ticket,
}

// request is one request on its way to its answer.
type request struct {
	*wire.Request
	ctx     context.Context
	reply   func(*wire.Reply)
	payload []byte // of the answer
}

func (r *request) decode(v any) error { return wire.Unmarshal(r.Body, v) }

// Serve implements transport.Handler.
func (s *Server) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	r := &request{Request: req, ctx: ctx, reply: reply}
	if req.Op == wire.OpUnitOpen {
		s.supersede(peer, r)
	}
	l, again, err := s.lifeFor(peer, r)
	if err != nil {
		r.fail(err)
		return
	}
	if again {
		l.repeat(r)
		return
	}
	if req.Op == wire.OpUnitOpen {
		l.answer(r, &wire.UnitReply{Opened: &wire.UnitOpened{
			Name: s.opts.Name, Incarnation: s.incarnation, PID: os.Getpid(), SampleLimit: s.opts.SampleLimit,
			Durable: l.unit.Durable(), Changed: l.changed, Highest: l.highest,
		}}, nil)
		return
	}
	handle, known := handlers[req.Op]
	if !known {
		r.fail(tqerr.New(tqerr.Unimplemented, "unknown request %d; controller and unit are of different versions", req.Op))
		return
	}
	result, err := handle(l, r)
	l.answer(r, result, err)
}

// fail answers with an error. The controller says during which operation of a user it happened.
func (r *request) fail(err error) { r.reply(wire.ErrorReply(err)) }

// lifeFor returns the life to which a request of the stream belongs, and whether it was here before. OpUnitOpen begins one.
func (s *Server) lifeFor(peer transport.Peer, r *request) (l *life, again bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l = s.mu.life
	switch {
	case s.mu.closed:
		return nil, false, tqerr.New(tqerr.Unavailable, "unit %q is closing", s.opts.Name)
	case r.ctx.Err() != nil:
		return nil, false, errGone
	case l != nil && l.resumes && l.peer == peer.ID && r.Sequence > 0 && r.Sequence <= l.last:
		return l, true, nil
	case r.Op == wire.OpUnitOpen:
		if l, err = s.openLocked(peer, r); err == nil && l.resumes {
			l.remember(r)
		}
		return l, false, err
	case l == nil || l.peer != peer.ID:
		return nil, false, tqerr.New(tqerr.InvalidState, "unit %q was not opened by this controller", s.opts.Name)
	case r.Sequence != l.last+1:
		return nil, false, tqerr.New(tqerr.Corruption, "unit %q: request %d came where %d was due", s.opts.Name, r.Sequence, l.last+1)
	}
	l.last++
	if l.resumes {
		l.remember(r)
	}
	return l, false, nil
}

// supersede ends the life of a controller that opens the unit once more as another peer: it has given the first one up.
func (s *Server) supersede(peer transport.Peer, r *request) {
	var open wire.UnitOpenRequest
	if r.decode(&open) != nil {
		return
	}
	s.mu.Lock()
	l := s.mu.life
	s.mu.Unlock()
	if l == nil || !l.resumes || l.peer == peer.ID || l.session != open.Session {
		return
	}
	l.end()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goneLocked(l)
}

// goneLocked forgets a life that has ended, but for what it leaves.
func (s *Server) goneLocked(l *life) {
	if s.mu.life != l {
		return
	}
	s.mu.life = nil
	s.current.Store(nil)
	if l.holds {
		s.mu.left = l
	}
}

func (s *Server) openLocked(peer transport.Peer, r *request) (*life, error) {
	var open wire.UnitOpenRequest
	if err := r.decode(&open); err != nil {
		return nil, err
	}
	if s.mu.life != nil {
		return nil, tqerr.New(tqerr.AlreadyExists, "unit %q belongs to a controller already", s.opts.Name)
	}
	if open.Session == 0 || r.Sequence != 1 {
		return nil, tqerr.New(tqerr.InvalidArgument, "unit %q: opened as request %d for session %d", s.opts.Name, r.Sequence, open.Session)
	}
	if err := s.mu.unit.Own(SessionName(open.Session)); err != nil {
		return nil, err
	}
	if s.mu.left != nil && (s.mu.session != open.Session || !open.Keep) {
		s.mu.left.dropAll()
		s.mu.left = nil
	}
	if s.mu.session != 0 && (s.mu.session != open.Session || !open.Keep) && !s.mu.unit.Durable() {
		old := s.mu.unit
		if err := s.beginLocked(); err != nil {
			return nil, err
		}
		if err := old.Close(); err != nil {
			return nil, err
		}
	}
	s.mu.session = open.Session
	l := newLife(s.mu.unit, s.mu.freed, peer.ID, open.Session)
	l.resumes, l.holds, l.tickets = open.Resume, open.Hold, s.mu.tickets
	if s.mu.left != nil {
		l.inherit(s.mu.left)
		s.mu.left = nil
	} else {
		l.changed = s.mu.unit.Changed()
		l.mu.change = l.changed
	}
	s.mu.life = l
	s.current.Store(l)
	return l, nil
}

// SessionName is how the number of a session is written down.
func SessionName(session uint64) string { return fmt.Sprintf("%016x", session) }

// Gone implements transport.Handler: what the controller has staged or leased ends, unless it wants it to stay.
func (s *Server) Gone(peer transport.Peer) {
	s.mu.Lock()
	l := s.mu.life
	if l == nil || l.peer != peer.ID {
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	l.end()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goneLocked(l)
}

// Segment implements transport.Handler. A server has one unit, whatever its number with the controller is.
func (s *Server) Segment(_, segment uint32) (int, int64, error) { return s.Unit().Segment(segment) }

// Unit is the unit behind the server, until it is opened for another session.
func (s *Server) Unit() *unit.Unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.unit
}

// Close ends the unit. InvalidState while something is staged or leased, which the end of the transport in front of it ends.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.left != nil {
		s.mu.left.dropAll()
		s.mu.left = nil
	}
	err := s.mu.unit.Close()
	s.mu.closed = s.mu.closed || err == nil
	return err
}

// answer replies to a request with what the unit holds now.
func (l *life) answer(r *request, result *wire.UnitReply, err error) {
	if err == error(errLater) {
		return
	}
	var body []byte
	if err == nil {
		if result == nil {
			result = &wire.UnitReply{}
		}
		result.Stats = l.stats()
		body, err = wire.Marshal(result)
	}
	if err != nil {
		r.fail(err)
		return
	}
	r.reply(&wire.Reply{Body: body, Payload: r.payload})
}

// enter counts a computation, whose end the end of the life waits for.
func (l *life) enter() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.ended {
		return errGone
	}
	l.running.Add(1)
	return nil
}

// later answers a request from a goroutine of its own, after enter. A panic there is the answer too.
func (l *life) later(r *request, run func() (*wire.UnitReply, error)) (*wire.UnitReply, error) {
	guard.Go("unit "+r.Op.String(), func() {
		defer l.running.Done()
		var result *wire.UnitReply
		err := func() (err error) {
			defer guard.Recover(&err)
			result, err = run()
			return err
		}()
		l.answer(r, result, err)
	})
	return nil, errLater
}
