package controller

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"

	"transferqueue/core/drain"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
)

// Samples move to another unit as a whole. While they do, they are in a write set of their own, as for an update: who writes to
// them waits, and readers see what is stored. Nothing can change them, so that what was copied is what there is.
//
// The other unit commits the copies before anything else happens, which nobody sees, because the catalog says that the samples
// live where they were. Then the catalog is told, under mu, and the journal before it; from this moment on readers and writers go
// to the other unit. The old one deletes when the journal knows for good, and keeps the memory of what is leased. A crash leaves
// copies that nobody knows, on one unit or the other, which are deleted when the units are compared with the catalog; see
// recovering.compares.

// mover moves samples off a unit.
type mover struct {
	s       *Server
	from    node
	targets []string // names of units that may take them, nil: all
	tiers   string   // see tierPolicies
	// hung are units that have held a batch up until its time was over: they are tried last. Guarded by Server.mu.
	hung map[uint32]bool
}

// The policies about the tier in which a cell lies afterwards.
const (
	keepTier = "preserve" // the one in which it lay
	toMemory = "memory"   // as if it was put anew
	toDisk   = "disk"
)

var tierPolicies = []string{keepTier, toMemory, toDisk}

// claimed is samples that nobody else writes.
type claimed struct {
	set    *writeSet
	groups []leasedGroup
}

// move moves samples of a batch, as many as have limit bytes, at least one, but none that has more than most.
func (m *mover) move(ctx context.Context, b *drain.Batch, limit, most int64) (moved drain.Moved, err error) {
	k, err := m.claim(ctx, b, &moved)
	if err != nil {
		moved.Left = b.Samples
		return moved, m.lostOr(err)
	}
	defer m.s.leave(k.set)
	full := false
	for i := range k.groups {
		g := &k.groups[i]
		if err != nil || full {
			moved.Left = append(moved.Left, g.Samples...)
			continue
		}
		before := moved.Counted
		rows, failed := m.moveGroup(ctx, g, limit, most, &moved)
		moved.Samples += rows
		moved.Left = append(moved.Left, g.Samples[rows:]...)
		full = rows < len(g.Samples)
		for t := range drain.NumTiers {
			limit -= moved.Bytes[t] - before.Bytes[t]
		}
		full = full || limit <= 0
		if err = m.lostOr(failed); err != nil {
			err = wholeSample(err, b, g)
		}
	}
	for i := range k.groups {
		if cells := k.groups[i].cells; cells != nil {
			cells.Release()
		}
	}
	return moved, err
}

// wholeSample says of an error about a sample which fields it has. One that is about no cell is about all when a sample was alone.
func wholeSample(err error, b *drain.Batch, g *leasedGroup) error {
	var cell *drain.CellError
	var gone *drain.LostError
	switch {
	case errors.As(err, &gone) || noRoom(err) || tqerr.CodeOf(err) == tqerr.Cancelled:
	case errors.As(err, &cell):
		cell.Fields = g.Fields
	case len(b.Samples) == 1:
		return &drain.CellError{Partition: b.Partition, Sample: g.Samples[0], Fields: g.Fields, Cause: err}
	}
	return err
}

// lostOr says that the source is gone when it is.
func (m *mover) lostOr(err error) error {
	if err != nil && m.from.Lost() != nil {
		return &drain.LostError{Cause: m.from.Lost()}
	}
	return err
}

// sourceError is lostOr for an error of the source, which may not be known to be gone yet.
func (m *mover) sourceError(err error) error {
	if tqerr.CodeOf(err) == tqerr.Unavailable {
		return &drain.LostError{Cause: err}
	}
	return m.lostOr(err)
}

// payloadError is sourceError for an error of payload that the source sends. When the unit answers it is its stream that is gone.
func (m *mover) payloadError(ctx context.Context, err error) error {
	if m.from.away() != nil && tqerr.CodeOf(err) == tqerr.Unavailable && tqerr.CodeOf(m.from.sync(ctx)) != tqerr.Unavailable {
		return &drain.StreamError{Cause: tqerr.Wrap(tqerr.Unavailable, err, "unit %q answers, but its payload does not come", m.from.Name())}
	}
	return m.sourceError(err)
}

// claim takes those samples of a batch that nobody writes, and leases their cells. A batch that waits does so in line with writers.
func (m *mover) claim(ctx context.Context, b *drain.Batch, moved *drain.Moved) (k *claimed, err error) {
	s := m.s
	s.mu.Lock()
	free := b.Samples
	if b.Wait == 0 {
		free = s.mu.writes.free(b.Partition, b.Samples)
		moved.Busy = len(b.Samples) - len(free)
	}
	k = &claimed{set: newWriteSet(b.Partition, nil, free, false)}
	if len(free) == 0 { // it would wait in line for nothing
		s.mu.Unlock()
		return k, nil
	}
	if granted := s.mu.writes.enter(k.set); !granted {
		s.mu.Unlock()
		mine := k.set
		line, cancel := context.WithTimeout(ctx, b.Wait)
		defer cancel()
		if k.set, err = s.claim(line, mine, func() *writeSet { return mine }); err != nil {
			if ctx.Err() == nil && line.Err() != nil {
				moved.Busy = len(free)
				return &claimed{set: mine}, nil
			}
			return nil, err
		}
	}
	for _, g := range s.mu.cat.GroupsOn(m.from.ID(), b.Partition, free) {
		k.groups = append(k.groups, leasedGroup{Group: g, unit: m.from})
		moved.Samples -= len(g.Samples)
	}
	moved.Samples += len(free) // those that are not there any more
	for i := range k.groups {
		k.groups[i].read()
	}
	s.mu.Unlock()
	answers, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	for i := range k.groups {
		if err == nil {
			err = m.lease(answers, &k.groups[i])
		} else {
			k.groups[i].giveUp()
		}
	}
	if err != nil {
		for i := range k.groups {
			k.groups[i].giveUp()
		}
		s.leave(k.set)
		moved.Samples = 0
		return nil, err
	}
	return k, nil
}

// read puts the read of the cells of a group in line. Called with mu held, or while nobody else may write them.
func (g *leasedGroup) read() {
	if len(g.Fields) > 0 {
		g.reading = g.unit.Read(&unit.Query{Partition: g.Partition, Fields: g.Fields, Samples: g.Samples, Inline: -1, Later: true})
	}
}

// lease waits for the cells of a group.
func (m *mover) lease(ctx context.Context, g *leasedGroup) (err error) {
	if g.reading != nil {
		reading := g.reading
		g.reading = nil
		g.cells, err = reading.Wait(ctx)
	}
	return m.sourceError(m.cellError(g, err))
}

// giveUp ends what was read of a group, or is being.
func (g *leasedGroup) giveUp() {
	if g.reading != nil {
		over, cancel := context.WithCancel(context.Background())
		cancel()
		g.cells, _ = g.reading.Wait(over)
		g.reading = nil
	}
	if g.cells != nil {
		g.cells.Release()
		g.cells = nil
	}
}

// cellError says which cell cannot be copied, when it is about one.
func (m *mover) cellError(g *leasedGroup, err error) error {
	var damaged *store.DamagedError
	var missing *store.MissingError
	e := &drain.CellError{Partition: g.Partition, Fields: g.Fields}
	switch {
	case errors.As(err, &damaged):
		e.Field, e.Sample, e.Cause = damaged.Field, damaged.Sample, damaged.Cause
	case errors.As(err, &missing):
		e.Field, e.Sample, e.Cause = missing.Field, missing.Sample, err
	default:
		return err
	}
	m.s.mu.RLock()
	defer m.s.mu.RUnlock()
	if keys, known, err := m.s.mu.cat.KeysOf(g.Partition, []int64{e.Sample.Index}); err == nil {
		e.Key, e.Keyed = keys[0], known[0]
	}
	return e
}

// moveGroup moves the first samples of a group that have limit bytes, at least one, and returns how many; none when the first has more
// than most. Where no unit has room for all of them it tries fewer.
func (m *mover) moveGroup(ctx context.Context, g *leasedGroup, limit, most int64, moved *drain.Moved) (rows int, err error) {
	if first := g.rowBytes(0); first > most {
		moved.Large = first
		return 0, nil
	}
	rows = g.rowsOf(limit)
	for {
		if err = m.moveRows(ctx, g, rows, moved); err == nil {
			return rows, nil
		}
		if rows == 1 || !noRoom(err) {
			return 0, err
		}
		rows /= 2
	}
}

func noRoom(err error) bool {
	code := tqerr.CodeOf(err)
	return code == tqerr.ResourceExhausted || code == tqerr.CapacityExceeded
}

// moveRows moves the first samples of a group to one unit, or none of them.
func (m *mover) moveRows(ctx context.Context, g *leasedGroup, rows int, moved *drain.Moved) error {
	parts, err := m.plan(ctx, g, rows)
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range parts {
			p.giveUp()
		}
	}()
	targets, err := m.candidates(g, rows, parts)
	if err != nil {
		return err
	}
	for _, to := range targets {
		var elsewhere bool
		if elsewhere, err = m.moveTo(ctx, to, g, rows, parts); err == nil {
			m.count(rows, parts, moved)
			m.hangs(to, false)
			return nil
		}
		if elsewhere || ctx.Err() != nil || m.from.Lost() != nil {
			break
		}
		m.hangs(to, tqerr.CodeOf(err) == tqerr.DeadlineExceeded)
	}
	return ctxOr(ctx, err)
}

// hangs notes whether a unit has held a batch up.
func (m *mover) hangs(n node, is bool) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if m.hung == nil {
		m.hung = map[uint32]bool{}
	}
	m.hung[n.ID()] = is
}

// count adds what has moved.
func (m *mover) count(rows int, parts []*movedPart, moved *drain.Moved) {
	var now drain.Counted
	for _, p := range parts {
		p.count(&now)
	}
	moved.Add(&drain.Moved{Counted: now})
	counted := &m.s.metrics.moved
	counted.samples.Add(int64(rows))
	counted.cells.Add(now.Cells[drain.Memory] + now.Cells[drain.LocalDisk])
	counted.bytes.Add(now.Bytes[drain.Memory] + now.Bytes[drain.LocalDisk])
}

// candidates lists the units that may take samples, best first.
func (m *mover) candidates(g *leasedGroup, rows int, parts []*movedPart) ([]node, error) {
	s := m.s
	onDisk := slices.ContainsFunc(parts, func(p *movedPart) bool { return p.onDisk })
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []node
	var full error = tqerr.New(tqerr.ResourceExhausted, "no other unit takes samples")
	for _, n := range s.nodes.Load().order {
		switch {
		case n.ID() == m.from.ID() || n.Lost() != nil || m.targets != nil && !slices.Contains(m.targets, n.Name()):
			continue
		case onDisk && n.Stats().DiskLimit == 0:
			full = tqerr.New(tqerr.ResourceExhausted, "no other unit has a disk")
			continue
		}
		if err := s.mu.cat.CheckRelocate(g.Partition, g.Samples[:rows], m.from.ID(), n.ID()); err != nil {
			if tqerr.CodeOf(err) == tqerr.CapacityExceeded {
				full = err
			}
			continue
		}
		out = append(out, n)
	}
	if len(out) == 0 {
		return nil, full
	}
	late := func(n node) int {
		if m.hung[n.ID()] {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(out, func(a, b node) int {
		x, y := a.Stats(), b.Stats()
		return cmp.Or(
			late(a)-late(b), cmp.Compare(y.Room(), x.Room()), cmp.Compare(x.MemoryUsed+x.DiskUsed, y.MemoryUsed+y.DiskUsed),
		)
	})
	return out, nil
}

// rowsOf is how many rows from the first on have so many bytes, at least one.
func (g *leasedGroup) rowsOf(limit int64) int {
	sum := int64(0)
	for row := range g.Samples {
		sum += min(g.rowBytes(row), math.MaxInt64-sum)
		if sum > limit && row > 0 {
			return row
		}
	}
	return len(g.Samples)
}

// rowBytes is the bytes of a row.
func (g *leasedGroup) rowBytes(row int) (sum int64) {
	if g.cells == nil {
		return 0
	}
	if g.offsets == nil {
		for k := range g.cells.Columns {
			g.offsets = append(g.offsets, g.cells.Columns[k].Column.Offsets())
		}
	}
	for _, o := range g.offsets {
		sum += o[row+1] - o[row]
	}
	return sum
}
