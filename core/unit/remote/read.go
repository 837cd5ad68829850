package remote

import (
	"context"
	"errors"
	"sync"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// held is a lease that may be released while its bytes are read from disk or sent.
type held struct {
	store.Lease
	reading sync.Mutex // held over a Piece
	mu      struct {
		sync.Mutex
		users int
		over  bool
	}
}

// Release implements store.Lease. While the lease is in use, the end of that does it.
func (h *held) Release() {
	h.mu.Lock()
	h.mu.over = true
	idle := h.mu.users == 0
	h.mu.Unlock()
	if idle {
		h.Lease.Release()
	}
}

// use keeps what is leased until leave. Called when it is not released yet.
func (h *held) use() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.users++
}

func (h *held) leave() {
	h.mu.Lock()
	h.mu.users--
	over := h.mu.over && h.mu.users == 0
	h.mu.Unlock()
	if over {
		h.Lease.Release()
	}
}

// released reports that nobody waits for what is leased any more.
func (h *held) released() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.over
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
	// Before they load: a release in the stream must find them.
	if err := l.keepLeases(req.Lease, leases); err != nil {
		releaseAll(leases)
		return nil, err
	}
	for _, lease := range leases {
		if req.Later || !store.Loads(lease.Lease) {
			continue
		}
		if err := l.enter(); err != nil {
			return nil, err // the end of the life releases
		}
		for _, lease := range leases {
			lease.use()
		}
		return l.later(r, func() (*wire.UnitReply, error) { return l.load(r, &req, leases) })
	}
	return l.found(r, &req, leases), nil
}

// load reads what lies on disk, and answers.
func (l *life) load(r *request, req *wire.UnitReadRequest, leases []*held) (*wire.UnitReply, error) {
	defer func() {
		for _, lease := range leases {
			lease.leave()
		}
	}()
	for _, lease := range leases {
		err := r.ctx.Err()
		switch {
		case err != nil:
		case lease.released():
			err = errReleased
		default:
			err = store.Load(lease.Lease)
		}
		if err != nil {
			l.drop(req.Lease, len(leases))
			return damaged(err)
		}
	}
	return l.found(r, req, leases), nil
}

// maxPiece bounds what one OpUnitPiece brings.
const maxPiece = 16 << 20

// piece reads bytes of a lease, from disk where they lie there, beside the stream.
func (l *life) piece(r *request) (*wire.UnitReply, error) {
	var req wire.UnitPieceRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	if req.Size < 0 || req.Size > maxPiece {
		return nil, tqerr.New(tqerr.InvalidArgument, "a piece of %d bytes, want 0 to %d", req.Size, maxPiece)
	}
	l.mu.Lock()
	h := l.mu.leases[req.Lease]
	if h != nil {
		h.use()
	}
	l.mu.Unlock()
	if h == nil {
		return nil, tqerr.New(tqerr.NotFound, "lease %d has ended", req.Lease)
	}
	if err := l.enter(); err != nil {
		h.leave()
		return nil, err
	}
	return l.later(r, func() (*wire.UnitReply, error) {
		defer h.leave()
		h.reading.Lock()
		defer h.reading.Unlock()
		to := make([]byte, req.Size)
		sum, err := h.Lease.(store.Streamer).Piece(req.Column, req.Offset, req.Sum, to)
		if err != nil {
			return damaged(err)
		}
		r.payload = to
		return &wire.UnitReply{Sum: sum}, nil
	})
}

var errReleased = tqerr.New(tqerr.Cancelled, "the read was given up")

// damaged turns an error about a cell into an answer that names it.
func damaged(err error) (*wire.UnitReply, error) {
	var d *store.DamagedError
	if !errors.As(err, &d) {
		return nil, err
	}
	return &wire.UnitReply{Damaged: &wire.DamagedCell{
		Field: d.Field, Index: d.Sample.Index, Generation: int64(d.Sample.Generation), Cause: d.Cause.Error(),
	}}, nil
}

// found answers a read with what is leased.
func (l *life) found(r *request, req *wire.UnitReadRequest, leases []*held) *wire.UnitReply {
	reply := &wire.UnitReply{}
	for _, lease := range leases {
		for _, c := range lease.Columns() {
			reply.Columns = append(reply.Columns, columnOf(&c))
		}
	}
	r.payload, reply.Filled = l.gather(leases, req.Inline)
	if reply.Filled && !req.Keep {
		l.drop(req.Lease, len(leases))
	}
	return reply
}

// drop ends leases that are registered, if nobody has done so.
func (l *life) drop(first uint64, n int) {
	for i := range uint64(n) {
		l.mu.Lock()
		lease := l.mu.leases[first+i]
		delete(l.mu.leases, first+i)
		l.mu.Unlock()
		if lease != nil {
			lease.Release()
		}
	}
}

// prepare writes to disk what goes there of a staged write, beside the stream.
func (l *life) prepare(r *request) (*wire.UnitReply, error) {
	var req wire.UnitPrepareRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	l.mu.Lock()
	t := l.mu.txns[req.Txn]
	ready := t != nil && t.staged != nil && t.users == 0 && !l.mu.ended
	ctx, cancel := context.WithCancel(r.ctx)
	if ready {
		t.users++
		t.cancel = cancel
		l.running.Add(1)
	}
	l.mu.Unlock()
	if !ready {
		cancel()
		return nil, tqerr.New(tqerr.NotFound, "write %d is not staged", req.Txn)
	}
	t.loans.Recall()
	return l.later(r, func() (*wire.UnitReply, error) {
		defer l.leave(t)
		defer cancel()
		if req.Shed {
			return nil, store.PrepareAndShed(ctx, t.staged)
		}
		return nil, store.Prepare(ctx, t.staged)
	})
}

// lease takes one lease for all fields or one for each, all or nothing.
func (l *life) lease(req *wire.UnitReadRequest) ([]*held, error) {
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
	var leases []*held
	for _, fields := range groups {
		lease, err := l.unit.Pin(req.Partition, fields, samples)
		if err != nil {
			releaseAll(leases)
			return nil, err
		}
		leases = append(leases, &held{Lease: lease})
	}
	return leases, nil
}

func releaseAll(leases []*held) {
	for _, lease := range leases {
		lease.Release()
	}
}

func columnOf(c *store.Leased) wire.UnitColumn {
	out := wire.UnitColumn{Column: wire.Column(c.Column), Runs: make([]wire.UnitRun, len(c.Runs))}
	for i, run := range c.Runs {
		out.Runs[i] = wire.UnitRun{Rows: run.Rows, Block: blockOf(run.Block), OnDisk: run.OnDisk}
	}
	return out
}

// gather packs what was read when it is not more than limit.
func (l *life) gather(leases []*held, limit int64) (payload []byte, done bool) {
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

func (l *life) keepLeases(first uint64, leases []*held) error {
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
