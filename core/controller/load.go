package controller

import (
	"context"
	"errors"
	"path/filepath"
	"sync"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/sampler"
	"transferqueue/core/snapshot"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (c *call) loadCheckpoint() (any, error) {
	var r wire.LoadRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	steps := map[string]func(context.Context, string) error{"all": c.loadAll, "state": c.loadState, "values": c.loadValues}
	step := steps[r.Step]
	if step == nil {
		return nil, tqerr.New(tqerr.InvalidArgument, "step %q of a load is unknown", r.Step)
	}
	if err := checkAbsolute(r.Path); err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		return nil, ctxOr(ctx, step(ctx, filepath.Clean(r.Path)))
	})
}

// loadAll replaces everything by a checkpoint.
func (c *call) loadAll(ctx context.Context, path string) error {
	files := c.s.opts.FS
	if err := snapshot.Repair(files, path); err != nil {
		return err
	}
	if _, err := files.Stat(path); err != nil {
		return vfs.Wrap(err)
	}
	metadata, err := snapshot.ReadMetadata(files, path)
	if err != nil {
		return err
	}
	return c.replace(ctx, filepath.Join(path, snapshot.StateName), filepath.Join(path, snapshot.StorageName), metadata)
}

// loadState replaces everything by a state and the values that the client has named before.
func (c *call) loadState(ctx context.Context, path string) error {
	c.s.saves.Lock()
	values := c.s.saves.values[c.client]
	c.s.saves.Unlock()
	if err := c.replace(ctx, path, values, nil); err != nil {
		return err
	}
	c.s.saves.Lock()
	defer c.s.saves.Unlock()
	delete(c.s.saves.values, c.client)
	return nil
}

// loadValues checks a folder of values and remembers it.
func (c *call) loadValues(ctx context.Context, path string) error {
	stored, err := snapshot.OpenValues(c.s.opts.FS, path)
	if err != nil {
		return err
	}
	buffer := make([]byte, pieceBytes)
	for k := range stored.Parts() {
		err := stored.ReadPart(ctx, k, func(rows *snapshot.Rows) (place snapshot.Place, err error) {
			for left := rows.Bytes(); left > 0; left -= int64(len(place.Pieces[len(place.Pieces)-1])) {
				place.Pieces = append(place.Pieces, buffer[:min(left, int64(len(buffer)))])
			}
			return place, ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	c.s.saves.Lock()
	defer c.s.saves.Unlock()
	if c.client.isGone() {
		return errGone
	}
	c.s.saves.values[c.client] = path
	return nil
}

// loading is a checkpoint on its way into the session, seen by nobody.
type loading struct {
	s        *Server
	ctx      context.Context
	restored *catalog.Restored
	sampler  []byte
	mu       sync.Mutex
	rows     []*stagedRows
}

func (l *loading) abort() {
	for _, r := range l.rows {
		r.abort()
	}
}

// replace reads and checks a state and values and then puts them in the place of everything. Values "" means none. With the
// metadata of a checkpoint it must be that of the state, and state and values of one cut.
func (c *call) replace(ctx context.Context, state, values string, metadata *snapshot.Metadata) error {
	s := c.s
	read, sampler, cut, err := snapshot.ReadState(s.opts.FS, state)
	if err != nil {
		return err
	}
	if metadata != nil {
		if err := metadata.Describes(read); err != nil {
			return err
		}
	}
	s.mu.RLock()
	restored := s.mu.cat.Blank()
	s.mu.RUnlock()
	if err := restored.Fill(read); err != nil {
		return err
	}
	l := &loading{s: s, ctx: ctx, restored: restored, sampler: sampler}
	if values != "" {
		err = l.read(values, cut, metadata != nil)
	} else {
		err = l.bare(read)
	}
	if err == nil {
		err = l.hold()
	}
	if err == nil {
		err = s.swapIn(ctx, l)
	}
	if err != nil {
		l.abort()
	} else if s.journal != nil {
		s.turnSoon() // into a state without what units were owed
	}
	return err
}

// read stages all values.
func (l *loading) read(dir string, cut snapshot.Cut, sameCut bool) error {
	stored, err := snapshot.OpenValues(l.s.opts.FS, dir)
	if err == nil && sameCut {
		err = stored.SavedWith(cut)
	}
	if err == nil {
		err = l.s.readValues(l.ctx, stored, l.stage)
	}
	if err != nil {
		return err
	}
	return l.restored.Complete()
}

// readValues gives the rows of all files to stage, several files at a time, and fills the memory that it names.
func (s *Server) readValues(ctx context.Context, stored *snapshot.Stored, stage func(*snapshot.Rows) (snapshot.Place, error)) error {
	s.mapped.RLock()
	defer s.mapped.RUnlock()
	return together(ctx, stored.Parts(), filesAtOnce, func(ctx context.Context, k int) error {
		return stored.ReadPart(ctx, k, stage)
	})
}

// bare places samples without values, and fails when they need some.
func (l *loading) bare(state *catalog.State) error {
	for k := range state.Partitions {
		p := &state.Partitions[k]
		if _, err := l.stage(&snapshot.Rows{Partition: p.Name, Samples: p.Samples}); err != nil {
			return err
		}
	}
	if err := l.restored.Complete(); err != nil {
		return tqerr.New(tqerr.InvalidState, "load_storage_checkpoint must come before load_controller_checkpoint: %s", err)
	}
	return nil
}

// stage reserves memory for rows on the units where they will be.
func (l *loading) stage(rows *snapshot.Rows) (place snapshot.Place, err error) {
	if err := l.ctx.Err(); err != nil {
		return place, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	columns, same := eachItsOwn(rows.Columns)
	t := &txn{s: l.s, write: catalog.Write{Columns: columns}, same: same}
	units, err := l.restored.Place(rows.Partition, rows.Samples, columns, l.s.rooms(), t.storedSizes())
	if err != nil {
		return place, err
	}
	staged := &stagedRows{partition: rows.Partition, indexes: indexesOf(rows.Samples)}
	staged.shares = t.split(units)
	if err := stageShares(l.ctx, rows.Partition, staged.shares); err != nil {
		return place, err
	}
	l.rows = append(l.rows, staged)
	return placeOf(l.ctx, staged.shares, columns, same)
}

// swapIn makes a checkpoint visible in the place of everything that is there, at once. A sampler that Python runs gets its
// state before, since it cannot be called with the catalog locked; while its turn is ours it picks nothing.
func (s *Server) swapIn(ctx context.Context, l *loading) error {
	python, isPython := s.Sampler().(*sampler.Python)
	if !isPython {
		return s.swapWhenQuiet(ctx, l, func() error {
			if _, now := s.mu.sampler.(*sampler.Python); now {
				return errOtherSampler
			}
			return wrongSampler(s.mu.sampler.Load(l.sampler))
		})
	}
	done, err := python.Turn(ctx)
	if err != nil {
		return err
	}
	defer done()
	before, err := python.SaveInTurn(ctx)
	if err != nil {
		return err
	}
	if err := python.LoadInTurn(ctx, l.sampler); err != nil {
		return wrongSampler(err)
	}
	err = s.swapWhenQuiet(ctx, l, func() error {
		if s.mu.sampler != sampler.Sampler(python) {
			return errOtherSampler
		}
		return nil
	})
	if err != nil {
		return errors.Join(err, python.LoadInTurn(context.WithoutCancel(ctx), before))
	}
	return nil
}

var errOtherSampler error = tqerr.New(tqerr.Unavailable, "another sampler was registered meanwhile, try again")

func wrongSampler(err error) error {
	if err == nil {
		return nil
	}
	return tqerr.Wrap(tqerr.CodeOf(err), err, "the sampler of this session does not take the state of the one that was saved")
}

// swapWhenQuiet waits for slow writers that came first, whose cells are about to go, and swaps. ready is the last thing that
// may fail; it is called with mu held.
func (s *Server) swapWhenQuiet(ctx context.Context, l *loading, ready func() error) error {
	done, err := s.onlyTurn(ctx)
	if err != nil {
		return err
	}
	defer done()
	set := &writeSet{all: true, granted: make(chan struct{})}
	s.mu.Lock()
	s.mu.writes.enter(set)
	s.mu.Unlock()
	set, err = s.claim(ctx, set, func() *writeSet { return set })
	if err != nil {
		return err
	}
	deletions, err := func() ([]*deletion, error) {
		defer s.mu.Unlock()
		defer s.mu.writes.leave(set)
		if err := l.reachable(); err != nil {
			return nil, err
		}
		if err := s.mu.cat.Fits(l.restored); err != nil {
			return nil, err
		}
		if err := ready(); err != nil {
			return nil, err
		}
		return s.swapLocked(l)
	}()
	for _, d := range deletions {
		d.wait()
	}
	for _, r := range l.rows {
		if err == nil {
			err = confirm(r.shares)
		}
	}
	return err
}

// reachable fails when a unit is gone on which something is staged.
func (l *loading) reachable() error {
	for _, r := range l.rows {
		for _, sh := range r.shares {
			if err := sh.unit.Lost(); err != nil {
				return err
			}
		}
	}
	return nil
}

// swapLocked deletes what is there and commits what is staged. The old catalog is gone with its indexes, so nothing has to be
// released when the units have deleted.
func (s *Server) swapLocked(l *loading) (deletions []*deletion, err error) {
	next := s.mu.cat.Adopted(l.restored)
	change, err := s.noteSwapLocked()
	if err != nil {
		return nil, err
	}
	owed, last := l.owed(next, change)
	if err := s.replaceLocked(next, owed); err != nil {
		return nil, err
	}
	events := map[string][]catalog.Event{}
	for _, name := range s.mu.cat.Partitions() {
		cl := s.mu.cat.StartClearPartition(name)
		deletions = append(deletions, s.deleteLocked(cl, 0))
		events[name] = cl.Events
	}
	s.mu.cat = next
	for _, r := range l.rows {
		samples := s.mu.cat.Samples(r.indexes)
		for _, sh := range r.shares {
			number := uint64(0) // a unit has executed the change when it has done all
			if sh.staged == last[sh.unit.ID()] {
				number = change
			}
			if sh.staged != nil {
				store.CommitChange(sh.staged, pickRuns(samples, sh.runs), number)
			}
		}
	}
	s.tellAllLocked(events)
	return deletions, nil
}

// tellAllLocked serves all waiters, and tells all watches what has gone and what is there now.
func (s *Server) tellAllLocked(gone map[string][]catalog.Event) {
	names := map[string]bool{}
	for name := range s.mu.waiters {
		names[name] = true
	}
	for name := range s.mu.watches {
		names[name] = true
	}
	for name := range names {
		var events []catalog.Event
		if len(s.mu.watches[name]) > 0 {
			events = append(gone[name], s.mu.cat.PutEvents(name)...)
		}
		s.changed(name, events)
	}
}
