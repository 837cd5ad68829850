package remote

import (
	"context"
	"math"
	"sync"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// life is what a unit keeps for the controller that is connected.
type life struct {
	unit    *unit.Unit
	peer    uint64
	session uint64
	last    uint64 // number of the latest request; guarded by Server.mu
	// What the controllers before have left: the last change, and the highest number of a write or a lease.
	changed, highest uint64
	freed            *unit.Freed
	running          sync.WaitGroup  // transformations, and what reads and writes the disk
	ctx              context.Context // ends when the controller is gone
	cancel           context.CancelFunc
	resumes          bool             // the controller repeats requests on another connection
	holds            bool             // what is staged and leased outlives the controller
	tickets          Tickets          // nil: the unit does not listen for other hosts
	lent             *transport.Loans // streams that read leases
	mu               struct {
		sync.Mutex
		txns     map[uint64]*txn
		leases   map[uint64]*held
		outcomes map[uint64]*outcome // of requests, when the controller resumes
		stock    []schema.Stock      // of the last inventory
		count    uint64              // of stats that were taken
		advice   advice
		ended    bool
		change   uint64 // number of the last change
	}
}

// txn is a staged write, or one whose bytes are being computed.
type txn struct {
	columns []schema.Column
	staged  store.Staged
	cancel  func() // of the computation; nil: none
	users   int    // computations that make it or read it; its memory stays until they have ended
	aborted bool
	filled  bool            // its bytes do not change any more
	shed    bool            // those that are on disk are not in memory any more
	loans   transport.Loans // of streams; called back by who takes it out of the table or begins to use it
}

func newLife(u *unit.Unit, freed *unit.Freed, peer, session uint64) *life {
	l := &life{unit: u, freed: freed, peer: peer, session: session, last: 1, lent: &transport.Loans{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.mu.txns, l.mu.leases, l.mu.outcomes = map[uint64]*txn{}, map[uint64]*held{}, map[uint64]*outcome{}
	return l
}

var errGone = tqerr.New(tqerr.Cancelled, "the controller is gone")

// end drops what is staged and leased, unless it is to stay. The contexts of all requests have ended.
func (l *life) end() {
	l.mu.Lock()
	l.mu.ended = true
	asking := l.mu.advice.standing
	l.mu.advice.standing = nil
	l.mu.Unlock()
	l.cancel()
	if asking != nil {
		asking.fail(errGone)
	}
	l.running.Wait()
	if !l.holds {
		l.dropAll()
	}
}

// inherit takes over what an earlier controller of the session has left, and the streams that read it.
func (l *life) inherit(from *life) {
	from.mu.Lock()
	defer from.mu.Unlock()
	l.mu.txns, l.mu.leases, l.mu.change = from.mu.txns, from.mu.leases, from.mu.change
	from.mu.txns, from.mu.leases = nil, nil
	l.changed, l.highest, l.lent = l.mu.change, from.highest, from.lent
	for n := range l.mu.txns {
		l.highest = max(l.highest, n)
	}
	for n := range l.mu.leases {
		l.highest = max(l.highest, n)
	}
}

// settle ends what was left by an earlier controller, whose numbers are those up to highest.
func (l *life) settle(r *request) (*wire.UnitReply, error) {
	var req wire.UnitSettleRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	l.dropUpTo(l.highest, req.Leases)
	return nil, nil
}

// dropAll ends all writes and leases, and the streams that use them.
func (l *life) dropAll() {
	l.dropUpTo(math.MaxUint64, true)
	l.lent.Recall()
}

// dropUpTo ends the writes, and perhaps the leases, with numbers up to one.
func (l *life) dropUpTo(highest uint64, andLeases bool) {
	txns, leases := map[uint64]*txn{}, map[uint64]*held{}
	l.mu.Lock()
	for n, t := range l.mu.txns {
		if n <= highest {
			txns[n] = t
			delete(l.mu.txns, n)
		}
	}
	for n, lease := range l.mu.leases {
		if n <= highest && andLeases {
			leases[n] = lease
			delete(l.mu.leases, n)
		}
	}
	l.mu.Unlock()
	for _, t := range txns {
		t.loans.Recall()
		if t.staged != nil {
			t.staged.Abort()
		}
	}
	for _, lease := range leases {
		lease.Release()
	}
}

func (l *life) stats() wire.UnitStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.count++
	st, n := l.unit.Stats(), l.unit.Counters()
	return wire.UnitStats{
		Count: l.mu.count, MemoryUsed: st.MemoryUsed, MemoryLimit: st.MemoryLimit, DiskUsed: st.DiskUsed, DiskLimit: st.DiskLimit,
		Cells: st.Cells, Staged: st.Staged, Leases: st.Leases, Staging: st.Staging, Scratch: st.Scratch,
		Disk: wire.UnitDisk{
			Cells: n.DiskCells, Physical: n.DiskPhysical, Spilled: n.SpilledBytes, Promoted: n.PromotedBytes,
			Compacted: n.CompactedBytes, Fallback: n.FallbackCells, Logical: n.DiskLogical,
			MemoryCells: n.MemoryCells, MemoryLogical: n.MemoryLogical, MemoryPhysical: n.MemoryPhysical,
			WrittenCells: n.WrittenCells, Written: n.WrittenBytes, SpilledCells: n.SpilledCells, PromotedCells: n.PromotedCells,
		},
	}
}

// samplesOf reads samples from a message, whose two lists must match.
func samplesOf(s *wire.Samples) ([]schema.Sample, error) {
	if len(s.Indexes) != len(s.Generations) {
		return nil, tqerr.New(tqerr.InvalidArgument, "%d indexes and %d generations", len(s.Indexes), len(s.Generations))
	}
	out := make([]schema.Sample, len(s.Indexes))
	for i, index := range s.Indexes {
		if index < 0 {
			return nil, tqerr.New(tqerr.InvalidArgument, "index %d of a sample", index)
		}
		out[i] = schema.Sample{Index: index, Generation: uint32(s.Generations[i])}
	}
	return out, nil
}

func columnsOf(list []wire.Column) []schema.Column {
	out := make([]schema.Column, len(list))
	for i := range list {
		out[i] = schema.Column(list[i])
	}
	return out
}

// keep registers a write under the number that the controller has chosen.
func (l *life) keep(number uint64, t *txn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.mu.ended:
		return errGone
	case number == 0 || l.mu.txns[number] != nil:
		return tqerr.New(tqerr.InvalidArgument, "write %d is in progress already", number)
	}
	l.mu.txns[number] = t
	return nil
}

func (l *life) stage(r *request) (*wire.UnitReply, error) {
	var req wire.UnitStageRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	columns := columnsOf(req.Columns)
	if req.Filled {
		if err := checkPayload(columns, r.Payload); err != nil {
			return nil, err
		}
	}
	stage := l.unit.Stage
	if req.OnDisk {
		stage = l.unit.StageOnDisk
	}
	staged, err := stage(req.Partition, columns)
	if err != nil {
		return nil, err
	}
	if err := l.keep(req.Txn, &txn{columns: columns, staged: staged}); err != nil {
		staged.Abort()
		return nil, err
	}
	reply := &wire.UnitReply{Writes: store.Writes(staged)}
	rest := r.Payload
	for _, b := range staged.Blocks() {
		if req.Filled {
			rest = rest[copy(l.unit.Bytes(b), rest):]
		}
		reply.Blocks = append(reply.Blocks, blockOf(b))
	}
	return reply, nil
}

func checkPayload(columns []schema.Column, payload []byte) error {
	want := int64(0)
	for i := range columns {
		want += columns[i].Bytes()
	}
	if want != int64(len(payload)) {
		return tqerr.New(tqerr.InvalidArgument, "payload of %d bytes, the columns say %d", len(payload), want)
	}
	return nil
}

func blockOf(b store.Block) wire.Block {
	return wire.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size}
}

func (l *life) commit(r *request) (*wire.UnitReply, error) {
	var req wire.UnitCommitRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	samples, err := samplesOf(&req.Samples)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	t := l.mu.txns[req.Txn]
	ready := t != nil && t.staged != nil && t.users == 0
	rows := len(samples) // of no columns
	if ready && len(t.columns) > 0 {
		rows = t.columns[0].Samples()
	}
	if ready && rows == len(samples) {
		delete(l.mu.txns, req.Txn)
	}
	l.mu.Unlock()
	if !ready {
		return nil, tqerr.New(tqerr.NotFound, "write %d is not staged", req.Txn)
	}
	if rows != len(samples) {
		return nil, tqerr.New(tqerr.InvalidArgument, "write %d has %d rows, not %d", req.Txn, rows, len(samples))
	}
	t.loans.Recall()
	store.CommitChange(t.staged, samples, req.Change)
	l.executed(req.Change)
	return l.secured(r)
}

// secured answers a request when what it has changed is durable; beside the stream, in which the change has taken its place.
func (l *life) secured(r *request) (*wire.UnitReply, error) {
	if !l.unit.Durable() {
		return nil, nil
	}
	if err := l.enter(); err != nil {
		return nil, err
	}
	return l.later(r, func() (*wire.UnitReply, error) { return nil, l.unit.Secure() })
}

// executed remembers the number of a change.
func (l *life) executed(change uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.change = max(l.mu.change, change)
}

func (l *life) abort(r *request) (*wire.UnitReply, error) {
	var req wire.TxnRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	l.mu.Lock()
	t := l.mu.txns[req.Txn]
	delete(l.mu.txns, req.Txn)
	if t != nil {
		t.aborted = true
	}
	inUse := t != nil && t.users > 0
	l.mu.Unlock()
	switch {
	case t == nil:
	case inUse:
		if t.cancel != nil {
			t.cancel()
		}
	case t.staged != nil:
		t.loans.Recall()
		t.staged.Abort()
	}
	return nil, nil
}

func (l *life) remove(r *request) (*wire.UnitReply, error) {
	var req wire.UnitDeleteRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	samples, err := samplesOf(&req.Samples)
	if err != nil {
		return nil, err
	}
	l.unit.Delete(req.Partition, req.Fields, samples)
	l.executed(req.Change)
	return l.secured(r)
}

func (l *life) release(r *request) (*wire.UnitReply, error) {
	var req wire.ReleaseRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	for _, number := range req.Leases {
		l.mu.Lock()
		lease := l.mu.leases[uint64(number)]
		delete(l.mu.leases, uint64(number))
		l.mu.Unlock()
		if lease != nil {
			lease.Release()
		}
	}
	return nil, nil
}
