package controller

import (
	"context"
	"errors"
	"path/filepath"
	"sync"

	"transferqueue/core/guard"
	"transferqueue/core/snapshot"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// saves are the checkpoints in the making.
type saves struct {
	cutting sync.Mutex // one cut at a time: samplers are not called by two
	sync.Mutex
	open   map[saveKey]*save
	ended  chan struct{}      // closed when a save ends
	values map[*client]string // the folder that a load of values has checked
}

// saveKey names a save: clients number theirs, so that they can give up one whose begin they have not heard back from.
type saveKey struct {
	owner  *client
	number uint64
}

// save is a checkpoint in the making. It belongs to the client that began it and ends with it.
type save struct {
	target string // as the client named it

	mu       sync.Mutex // held during each step
	staging  *snapshot.Staging
	cut      *cut
	metadata string
	state    bool // written
	values   bool
	ended    bool
}

// end gives back what the save holds. Called with mu held.
func (v *save) end() error {
	if v.ended {
		return nil
	}
	v.ended = true
	if v.cut != nil {
		v.cut.release()
	}
	if v.staging == nil {
		return nil
	}
	return v.staging.Close()
}

func (v *save) statePath() string  { return filepath.Join(v.staging.Dir, snapshot.StateName) }
func (v *save) valuesPath() string { return filepath.Join(v.staging.Dir, snapshot.StorageName) }

// openSave registers a save. While another one to the same place is in progress it waits.
func (s *Server) openSave(ctx context.Context, key saveKey, target string) (*save, error) {
	for {
		v, ended, err := s.tryOpenSave(key, target)
		if v != nil || err != nil {
			return v, err
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return nil, ctxError(ctx, "waiting for another save to "+target)
		}
	}
}

func (s *Server) tryOpenSave(key saveKey, target string) (*save, <-chan struct{}, error) {
	s.saves.Lock()
	defer s.saves.Unlock()
	if key.number == 0 || s.saves.open[key] != nil {
		return nil, nil, tqerr.New(tqerr.InvalidArgument, "save %d: the number is in use or 0", key.number)
	}
	for _, other := range s.saves.open {
		if other.target == target {
			return nil, s.saves.ended, nil
		}
	}
	v := &save{target: target}
	s.saves.open[key] = v
	return v, nil, nil
}

// closeSave ends a save and forgets it.
func (s *Server) closeSave(key saveKey) error {
	s.saves.Lock()
	v := s.saves.open[key]
	s.saves.Unlock()
	if v == nil {
		return nil
	}
	v.mu.Lock()
	err := v.end()
	v.mu.Unlock()
	s.saves.Lock()
	defer s.saves.Unlock()
	delete(s.saves.open, key)
	close(s.saves.ended)
	s.saves.ended = make(chan struct{})
	return err
}

// dropSaves ends what a client that is gone was saving. A step that is under way ends soon: its context has.
func (s *Server) dropSaves(c *client) {
	s.saves.Lock()
	delete(s.saves.values, c)
	var left []saveKey
	for key := range s.saves.open {
		if key.owner == c {
			left = append(left, key)
		}
	}
	s.saves.Unlock()
	if len(left) == 0 {
		return
	}
	guard.Go("controller drop saves", func() {
		for _, key := range left {
			_ = s.closeSave(key) // what it leaves behind, the next save removes
		}
	})
}

// partOf finds the save of this client that has a part at a path.
func (c *call) partOf(path string) *save {
	c.s.saves.Lock()
	defer c.s.saves.Unlock()
	for key, v := range c.s.saves.open {
		if key.owner == c.client && v.staging != nil && (path == v.statePath() || path == v.valuesPath()) {
			return v
		}
	}
	return nil
}

func (c *call) saveCheckpoint() (any, error) {
	var r wire.SaveRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	steps := map[string]func(context.Context, *wire.SaveRequest) (any, error){
		"begin": c.saveBegin, "state": c.saveState, "values": c.saveValues, "commit": c.saveCommit, "abort": c.saveAbort,
	}
	step := steps[r.Step]
	if step == nil {
		return nil, tqerr.New(tqerr.InvalidArgument, "step %q of a save is unknown", r.Step)
	}
	if r.Path != "" {
		if err := checkAbsolute(r.Path); err != nil {
			return nil, err
		}
	}
	return c.later(func(ctx context.Context) (any, error) {
		result, err := step(ctx, &r)
		return result, ctxOr(ctx, err)
	})
}

// checkAbsolute refuses a path that would depend on the folder which this process is in.
func checkAbsolute(path string) error {
	if !filepath.IsAbs(path) {
		return tqerr.New(tqerr.InvalidArgument, "path %q: want an absolute one", path)
	}
	return nil
}

func (c *call) saveBegin(ctx context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	key := saveKey{c.client, r.Save}
	v, err := s.openSave(ctx, key, filepath.Clean(r.Path))
	if err != nil {
		return nil, err
	}
	c.undo = func() { _ = s.closeSave(key) }
	v.mu.Lock()
	v.metadata = r.Metadata
	staging, err := snapshot.Begin(s.opts.FS, v.target, true)
	if err == nil {
		s.saves.Lock()
		v.staging = staging
		s.saves.Unlock()
		v.cut, err = s.takeCut(ctx)
	}
	v.mu.Unlock()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil && c.client.isGone() {
		err = errGone
	}
	if err != nil {
		return nil, errors.Join(err, s.closeSave(key))
	}
	return &wire.SaveReply{State: v.statePath(), Values: v.valuesPath()}, nil
}

// isGone tells a client whose things have been dropped already.
func (c *client) isGone() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.gone
}

func (c *call) saveState(ctx context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	if v := c.partOf(r.Path); v != nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.ended {
			return nil, errNoSave
		}
		err := snapshot.WriteState(s.opts.FS, r.Path, v.cut.id, v.cut.state, v.cut.sampler)
		v.state = err == nil
		return nil, err
	}
	k, err := s.takeCut(ctx)
	if err != nil {
		return nil, err
	}
	k.release()
	return nil, snapshot.ReplaceFile(s.opts.FS, r.Path, func(path string) error {
		return snapshot.WriteState(s.opts.FS, path, k.id, k.state, k.sampler)
	})
}

var errNoSave error = tqerr.New(tqerr.InvalidState, "this save is not in progress any more")

func (c *call) saveValues(ctx context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	if v := c.partOf(r.Path); v != nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.ended {
			return nil, errNoSave
		}
		err := s.writeValues(ctx, v.cut, r.Path)
		v.values = err == nil
		if err == nil {
			v.cut.release()
		}
		return nil, err
	}
	staging, err := snapshot.Begin(s.opts.FS, r.Path, true)
	if err != nil {
		return nil, err
	}
	k, err := s.takeCut(ctx)
	if err == nil {
		defer k.release()
		// The folder is there already, so that it could be locked.
		err = s.writeCells(ctx, k, snapshot.ValuesIn(s.opts.FS, staging.Dir, k.id))
	}
	if err == nil {
		err = staging.Commit()
	}
	return nil, errors.Join(err, staging.Close())
}

func (s *Server) writeValues(ctx context.Context, k *cut, dir string) error {
	v, err := snapshot.NewValues(s.opts.FS, dir, k.id)
	if err != nil {
		return err
	}
	return s.writeCells(ctx, k, v)
}

func (c *call) saveCommit(_ context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	key := saveKey{c.client, r.Save}
	s.saves.Lock()
	v := s.saves.open[key]
	s.saves.Unlock()
	if v == nil {
		return nil, errNoSave
	}
	err := func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		switch {
		case v.ended:
			return errNoSave
		case !v.state || !v.values:
			return tqerr.New(tqerr.InvalidState, "a part of the checkpoint was not saved")
		}
		if err := snapshot.WriteMetadata(s.opts.FS, v.staging.Dir, v.metadata, v.cut.state); err != nil {
			return err
		}
		return v.staging.Commit()
	}()
	return nil, errors.Join(err, s.closeSave(key))
}

func (c *call) saveAbort(_ context.Context, r *wire.SaveRequest) (any, error) {
	return nil, c.s.closeSave(saveKey{c.client, r.Save})
}
