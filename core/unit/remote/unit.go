package remote

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Address is where a unit is, and what the controller calls it.
type Address struct {
	ID      uint32
	Name    string
	Host    string
	Socket  string
	Secret  []byte
	Address string // tcp://HOST:PORT
	Machine string // see internal/machine
	Key     []byte // of CURVE, public
	Session uint64 // of the controller, not 0
	Keep    bool   // its cells of this session, also when it is not durable
	Hold    bool   // what is staged and leased outlives the controller, until one of the same session has called Settle
}

// Unit is a unit in another process as its controller sees it. Its methods may be called from any goroutine. Read, Delete,
// Commit, Abort and Release take their places in the stream before they return and never wait.
type Unit struct {
	at       Address
	opened   wire.UnitOpened
	conn     Conn
	ctx      context.Context // ends with Disconnect
	cancel   context.CancelFunc
	numbers  atomic.Uint64 // of writes and leases
	segments segments
	stream   struct {
		sync.Mutex
		last uint64
	}
	state struct {
		sync.Mutex
		stats   wire.UnitStats
		onFree  []func()
		lost    error
		refused bool    // it was given up, though it can be reached
		doubts  []Cells // whose commits have no answer, so that what the unit holds of them is not known

		listening bool // a request of listen is with the unit
		again     bool // another one has to follow
		advisor   store.Advisor
	}
}

// Open begins to use the unit at the other end of a connection, which belongs to the Unit from then on. What the unit holds
// is dropped, unless it is kept; see the package. AlreadyExists when it serves another controller, or holds what is durable of
// another session.
func Open(ctx context.Context, conn Conn, at Address) (*Unit, error) {
	u := &Unit{at: at, conn: conn}
	u.ctx, u.cancel = context.WithCancel(context.Background())
	u.segments.init()
	a := u.post(wire.OpUnitOpen, &wire.UnitOpenRequest{Session: at.Session, Keep: at.Keep, Resume: u.Away(), Hold: at.Hold}, nil)
	err := a.wait(ctx)
	if err == nil && a.reply.Opened == nil {
		err = tqerr.New(tqerr.Corruption, "unit %q does not say who it is", at.Name)
	}
	if err == nil && a.reply.Opened.Name != at.Name {
		err = tqerr.New(tqerr.InvalidArgument, "unit %q calls itself %q", at.Name, a.reply.Opened.Name)
	}
	if err != nil {
		u.cancel()
		_ = conn.Close()
		return nil, err
	}
	u.opened = *a.reply.Opened
	u.numbers.Store(u.opened.Highest)
	guard.Go("unit "+at.Name, func() {
		<-conn.Done()
		u.lose(nil)
	})
	return u, nil
}

// lose makes the unit unavailable. What waited for its memory looks for other room.
func (u *Unit) lose(why error) {
	u.state.Lock()
	if u.state.lost == nil {
		u.state.lost = tqerr.New(tqerr.Unavailable, "unit %q is gone", u.at.Name)
		if why != nil && tqerr.CodeOf(why) != tqerr.Unavailable {
			u.state.lost = tqerr.New(tqerr.Unavailable, "unit %q was given up: %s", u.at.Name, why)
			u.state.refused = true
		}
	}
	tell := u.state.onFree
	u.state.Unlock()
	for _, fn := range tell {
		fn()
	}
}

// Lost is nil as long as the unit can be reached.
func (u *Unit) Lost() error {
	u.state.Lock()
	defer u.state.Unlock()
	return u.state.lost
}

// ID is the unit's number in its session.
func (u *Unit) ID() uint32 { return u.at.ID }

// Name is the unit's id as users see it.
func (u *Unit) Name() string { return u.at.Name }

// Socket is where the unit was reached.
func (u *Unit) Socket() string { return u.at.Socket }

// Host is the host the unit runs on.
func (u *Unit) Host() string { return u.at.Host }

// Incarnation differs from one start of the unit to the next.
func (u *Unit) Incarnation() uint64 { return u.opened.Incarnation }

// Changed is the number of the last change that the unit had executed when it was opened, 0: none of this session.
func (u *Unit) Changed() uint64 { return u.opened.Changed }

// Recommit makes visible what an earlier controller of the session has staged. NotFound: it is not there.
func (u *Unit) Recommit(ctx context.Context, txn uint64, samples []schema.Sample, change uint64) error {
	return u.post(wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: txn, Samples: wireSamples(samples), Change: change}, nil).wait(ctx)
}

// Settle ends what an earlier controller of the session has left staged, and perhaps what it has leased.
func (u *Unit) Settle(ctx context.Context, leases bool) error {
	return u.post(wire.OpUnitSettle, &wire.UnitSettleRequest{Leases: leases}, nil).wait(ctx)
}

// SampleLimit is the most samples the unit takes, 0 for no limit.
func (u *Unit) SampleLimit() int64 { return u.opened.SampleLimit }

// Stats is what the unit held when it answered last; of a unit that is gone, nothing.
func (u *Unit) Stats() store.Stats {
	u.state.Lock()
	defer u.state.Unlock()
	st := u.state.stats
	if u.state.lost != nil {
		return store.Stats{MemoryLimit: st.MemoryLimit, DiskLimit: st.DiskLimit}
	}
	return store.Stats{
		MemoryUsed: st.MemoryUsed, MemoryLimit: st.MemoryLimit, DiskUsed: st.DiskUsed, DiskLimit: st.DiskLimit,
		Cells: st.Cells, Staged: st.Staged, Leases: st.Leases, Staging: st.Staging, Scratch: st.Scratch,
	}
}

// Counters is what the unit had counted when it answered last.
func (u *Unit) Counters() store.Counters {
	u.state.Lock()
	defer u.state.Unlock()
	d := u.state.stats.Disk
	return store.Counters{
		DiskCells: d.Cells, DiskPhysical: d.Physical, SpilledBytes: d.Spilled, PromotedBytes: d.Promoted,
		CompactedBytes: d.Compacted, FallbackCells: d.Fallback, DiskLogical: d.Logical,
		MemoryCells: d.MemoryCells, MemoryLogical: d.MemoryLogical, MemoryPhysical: d.MemoryPhysical,
		WrittenCells: d.WrittenCells, WrittenBytes: d.Written, SpilledCells: d.SpilledCells, PromotedCells: d.PromotedCells,
	}
}

// OnFree registers a function that is called when the unit has told that memory was freed, and when it is lost. It must
// not block.
func (u *Unit) OnFree(fn func()) {
	u.state.Lock()
	defer u.state.Unlock()
	u.state.onFree = append(u.state.onFree[:len(u.state.onFree):len(u.state.onFree)], fn)
}

// Sync waits until the unit has executed everything that was put in line before.
func (u *Unit) Sync(ctx context.Context) error {
	return u.post(wire.OpUnitStats, &wire.UnitStatsRequest{}, nil).wait(ctx)
}

// Disconnect ends the connection. The unit drops what is staged and leased; its cells stay.
func (u *Unit) Disconnect() error {
	u.cancel()
	err := u.conn.Close()
	u.lose(nil)
	return err
}

// Close disconnects and unmaps the unit's memory. Nobody may use what Bytes has returned any more.
func (u *Unit) Close() error {
	err := u.Disconnect()
	u.segments.close()
	return err
}

// answer is what comes back for a request. Its fields may be read when done is closed.
type answer struct {
	u       *Unit
	done    chan struct{}
	reply   wire.UnitReply
	payload []byte
	err     error
	listens bool        // it is the answer to listen
	asks    bool        // it is a question
	must    atomic.Bool // an error means that the unit cannot be used
	about   *staged     // what it commits, else nil
}

// post puts a request in line.
func (u *Unit) post(op wire.Op, body any, payload []byte) *answer {
	return u.postFor(0, op, body, payload)
}

// postFor puts a request in line whose work is given so much time, 0: any.
func (u *Unit) postFor(timeout time.Duration, op wire.Op, body any, payload []byte) *answer {
	return u.postAs(&answer{u: u, done: make(chan struct{})}, timeout, op, body, payload)
}

func (u *Unit) postAs(a *answer, timeout time.Duration, op wire.Op, body any, payload []byte) *answer {
	raw, err := wire.Marshal(body)
	if err == nil {
		// A frame that is refused later would leave a hole in the numbers.
		err = (&wire.Frame{Body: raw, Payload: payload}).Check()
	}
	if err != nil {
		a.err = err
		close(a.done)
		return a
	}
	u.stream.Lock()
	defer u.stream.Unlock()
	u.stream.last++
	u.conn.Post(&wire.Request{Op: op, Sequence: u.stream.last, Timeout: timeout, Body: raw, Payload: payload}, a.settle)
	return a
}

// mustPost puts a request in line that the unit cannot refuse. One that does is not what the controller takes it for, and is
// given up before anybody reads from it.
func (u *Unit) mustPost(about *staged, op wire.Op, body any) *answer {
	a := u.postAs(&answer{u: u, done: make(chan struct{}), about: about}, 0, op, body, nil)
	a.must.Store(true)
	if a.ready() {
		a.insist()
	}
	return a
}

func (a *answer) insist() {
	if a.err != nil && !a.insecure() && a.must.Swap(false) {
		a.u.doubt(a.about)
		a.u.lose(a.err)
		guard.Go("unit "+a.u.at.Name, func() { _ = a.u.conn.Close() })
	}
}

// insecure reports that what was asked for has happened, but would not survive a crash of the unit.
func (a *answer) insecure() bool {
	code := tqerr.CodeOf(a.err)
	return a.u.Durable() && (code == tqerr.IO || code == tqerr.ResourceExhausted)
}

// settle takes the answer.
func (a *answer) settle(reply *wire.Reply, err error) {
	if err == nil {
		err = wire.Unmarshal(reply.Body, &a.reply)
		a.payload = reply.Payload
	}
	again := a.listens && a.u.heard()
	switch tqerr.CodeOf(err) {
	case tqerr.OK:
		a.u.learn(&a.reply.Stats)
	case tqerr.Unavailable:
		err = tqerr.New(tqerr.Unavailable, "unit %q: %s", a.u.at.Name, err)
	}
	a.err = err
	close(a.done)
	a.insist()
	if again && err == nil {
		a.u.listen()
	}
	if a.asks && err == nil && a.reply.Question != nil {
		a.u.asked(a.reply.Question)
	}
}

// learn keeps the latest counts of the unit, and tells of memory that was freed.
func (u *Unit) learn(st *wire.UnitStats) {
	u.state.Lock()
	if st.Count <= u.state.stats.Count {
		u.state.Unlock()
		return
	}
	freed := st.MemoryUsed+st.Staging < u.state.stats.MemoryUsed+u.state.stats.Staging || st.DiskUsed < u.state.stats.DiskUsed
	u.state.stats = *st
	tell := u.state.onFree
	u.state.Unlock()
	if freed {
		for _, fn := range tell {
			fn()
		}
	}
}

func (a *answer) ready() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// wait returns the error of the answer, or that of ctx when that ends first.
func (a *answer) wait(ctx context.Context) error {
	select {
	case <-a.done:
		return a.err
	default:
	}
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return unit.Ended(ctx, "waiting for unit \""+a.u.at.Name+"\"")
	}
}

// Done implements unit.Deleting.
func (a *answer) Done() <-chan struct{} { return a.done }

// Err implements unit.Deleting.
func (a *answer) Err() error { return a.err }

func wireSamples(samples []schema.Sample) wire.Samples {
	out := wire.Samples{Indexes: make(wire.Ints, len(samples)), Generations: make(wire.Ints, len(samples))}
	for i, s := range samples {
		out.Indexes[i], out.Generations[i] = s.Index, int64(s.Generation)
	}
	return out
}

func wireColumns(columns []schema.Column) []wire.Column {
	out := make([]wire.Column, len(columns))
	for i := range columns {
		out[i] = wire.Column(columns[i])
	}
	return out
}
