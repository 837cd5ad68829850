package remote

import (
	"errors"
	"sync"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// life is what a unit keeps for the controller that is connected.
type life struct {
	unit    *unit.Unit
	peer    uint64
	last    uint64 // number of the latest request; guarded by Server.mu
	freed   *unit.Freed
	running sync.WaitGroup // transformations
	mu      struct {
		sync.Mutex
		txns   map[uint64]*txn
		leases map[uint64]store.Lease
		count  uint64 // of stats that were taken
		ended  bool
	}
}

// txn is a staged write, or one whose bytes are being computed.
type txn struct {
	columns []schema.Column
	staged  store.Staged
	cancel  func() // of the computation; nil: none
	users   int    // computations that make it or read it; its memory stays until they have ended
	aborted bool
}

func newLife(u *unit.Unit, freed *unit.Freed, peer uint64) *life {
	l := &life{unit: u, freed: freed, peer: peer, last: 1}
	l.mu.txns, l.mu.leases = map[uint64]*txn{}, map[uint64]store.Lease{}
	return l
}

var errGone = tqerr.New(tqerr.Cancelled, "the controller is gone")

// end drops what is staged and leased. The contexts of all requests have ended.
func (l *life) end() {
	l.mu.Lock()
	l.mu.ended = true
	l.mu.Unlock()
	l.running.Wait()
	l.mu.Lock()
	txns, leases := l.mu.txns, l.mu.leases
	l.mu.txns, l.mu.leases = nil, nil
	l.mu.Unlock()
	for _, t := range txns {
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
	st := l.unit.Stats()
	return wire.UnitStats{
		Count: l.mu.count, MemoryUsed: st.MemoryUsed, MemoryLimit: st.MemoryLimit, DiskUsed: st.DiskUsed, DiskLimit: st.DiskLimit,
		Cells: st.Cells, Staged: st.Staged, Leases: st.Leases,
	}
}

func (l *life) report(*request) (*wire.UnitReply, error) { return nil, nil }

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
	staged, err := l.unit.Stage(req.Partition, columns)
	if err != nil {
		return nil, err
	}
	if err := l.keep(req.Txn, &txn{columns: columns, staged: staged}); err != nil {
		staged.Abort()
		return nil, err
	}
	reply := &wire.UnitReply{}
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
		rows = t.columns[0].Rows
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
	t.staged.Commit(samples)
	return nil, nil
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
	if err == nil {
		l.unit.Delete(req.Partition, req.Fields, samples)
	}
	return nil, err
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

func (l *life) read(r *request) (*wire.UnitReply, error) {
	var req wire.UnitReadRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	leases, err := l.lease(&req)
	var missing *store.MissingError
	if errors.As(err, &missing) {
		at := missing.Sample
		return &wire.UnitReply{Missing: &wire.MissingCell{
			Field: missing.Field, Index: at.Index, Generation: int64(at.Generation), Stale: missing.Stale,
		}}, nil
	}
	if err != nil {
		return nil, err
	}
	reply := &wire.UnitReply{}
	for _, lease := range leases {
		for _, c := range lease.Columns() {
			reply.Columns = append(reply.Columns, columnOf(&c))
		}
	}
	r.payload, reply.Filled = l.gather(leases, req.Inline)
	if reply.Filled && !req.Keep {
		releaseAll(leases)
		return reply, nil
	}
	if err := l.keepLeases(req.Lease, leases); err != nil {
		releaseAll(leases)
		return nil, err
	}
	return reply, nil
}

// lease takes one lease for all fields or one for each, all or nothing.
func (l *life) lease(req *wire.UnitReadRequest) ([]store.Lease, error) {
	samples, err := samplesOf(&req.Samples)
	if err != nil {
		return nil, err
	}
	groups := [][]string{req.Fields}
	if req.Apart {
		groups = groups[:0]
		for _, f := range req.Fields {
			groups = append(groups, []string{f})
		}
	}
	var leases []store.Lease
	for _, fields := range groups {
		lease, err := l.unit.Read(req.Partition, fields, samples)
		if err != nil {
			releaseAll(leases)
			return nil, err
		}
		leases = append(leases, lease)
	}
	return leases, nil
}

func releaseAll(leases []store.Lease) {
	for _, lease := range leases {
		lease.Release()
	}
}

func columnOf(c *store.Leased) wire.UnitColumn {
	out := wire.UnitColumn{Column: wire.Column(c.Column), Runs: make([]wire.UnitRun, len(c.Runs))}
	for i, run := range c.Runs {
		out.Runs[i] = wire.UnitRun{Rows: run.Rows, Block: blockOf(run.Block)}
	}
	return out
}

// gather packs what was read when it is not more than limit.
func (l *life) gather(leases []store.Lease, limit int64) (payload []byte, done bool) {
	total := int64(0)
	for _, lease := range leases {
		for _, c := range lease.Columns() {
			total += c.Column.Bytes()
		}
	}
	if total > limit {
		return nil, false
	}
	payload = make([]byte, 0, total)
	for _, lease := range leases {
		for _, c := range lease.Columns() {
			for _, run := range c.Runs {
				payload = append(payload, l.unit.Bytes(run.Block)...)
			}
		}
	}
	return payload, true
}

func (l *life) keepLeases(first uint64, leases []store.Lease) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.ended {
		return errGone
	}
	for i := range leases {
		if l.mu.leases[first+uint64(i)] != nil {
			return tqerr.New(tqerr.InvalidArgument, "lease %d is in use", first+uint64(i))
		}
	}
	for i, lease := range leases {
		l.mu.leases[first+uint64(i)] = lease
	}
	return nil
}
