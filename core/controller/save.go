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
	open   map[uint64]*save
	last   uint64
	values map[*client]string // the folder that a load of values has checked
}

// save is a checkpoint in the making. It belongs to the client that began it and ends with it.
type save struct {
	owner  *client
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

// openSave registers a save, so that nobody else saves to the same place meanwhile.
func (s *Server) openSave(owner *client, target string) (uint64, *save, error) {
	s.saves.Lock()
	defer s.saves.Unlock()
	for _, other := range s.saves.open {
		if other.target == target {
			return 0, nil, tqerr.New(tqerr.InvalidState, "another save to %s is in progress", target)
		}
	}
	v := &save{owner: owner, target: target}
	s.saves.last++
	s.saves.open[s.saves.last] = v
	return s.saves.last, v, nil
}

// closeSave ends a save and forgets it.
func (s *Server) closeSave(id uint64) error {
	s.saves.Lock()
	v := s.saves.open[id]
	s.saves.Unlock()
	if v == nil {
		return nil
	}
	v.mu.Lock()
	err := v.end()
	v.mu.Unlock()
	s.saves.Lock()
	delete(s.saves.open, id)
	s.saves.Unlock()
	return err
}

// dropSaves ends what a client that is gone was saving. A step that is under way ends soon: its context has.
func (s *Server) dropSaves(c *client) {
	s.saves.Lock()
	delete(s.saves.values, c)
	var ids []uint64
	for id, v := range s.saves.open {
		if v.owner == c {
			ids = append(ids, id)
		}
	}
	s.saves.Unlock()
	if len(ids) == 0 {
		return
	}
	guard.Go("controller drop saves", func() {
		for _, id := range ids {
			_ = s.closeSave(id) // what it leaves behind, the next save removes
		}
	})
}

// saveOf finds the save of this client that a step names, by number or by one of its paths.
func (c *call) saveOf(id uint64, path string) *save {
	c.s.saves.Lock()
	defer c.s.saves.Unlock()
	if v := c.s.saves.open[id]; v != nil && v.owner == c.client {
		return v
	}
	for _, v := range c.s.saves.open {
		if path != "" && v.owner == c.client && v.staging != nil && (path == v.statePath() || path == v.valuesPath()) {
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
	if r.Path != "" && !filepath.IsAbs(r.Path) {
		return nil, tqerr.New(tqerr.InvalidArgument, "path %q: want an absolute one", r.Path)
	}
	return c.later(func(ctx context.Context) (any, error) {
		result, err := step(ctx, &r)
		return result, ctxOr(ctx, err)
	})
}

func (c *call) saveBegin(ctx context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	id, v, err := s.openSave(c.client, filepath.Clean(r.Path))
	if err != nil {
		return nil, err
	}
	c.undo = func() { _ = s.closeSave(id) }
	v.mu.Lock()
	v.metadata = r.Metadata
	staging, err := snapshot.Begin(s.opts.FS, v.target, true)
	if err == nil {
		s.saves.Lock()
		v.staging = staging
		s.saves.Unlock()
		v.cut, err = s.takeCut()
	}
	v.mu.Unlock()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil && c.client.isGone() {
		err = errGone
	}
	if err != nil {
		return nil, errors.Join(err, s.closeSave(id))
	}
	return &wire.SaveReply{Save: id, State: v.statePath(), Values: v.valuesPath()}, nil
}

// isGone tells a client whose things have been dropped already.
func (c *client) isGone() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.gone
}

func (c *call) saveState(_ context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	if v := c.saveOf(0, r.Path); v != nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.ended {
			return nil, errNoSave
		}
		err := snapshot.WriteState(s.opts.FS, r.Path, v.cut.id, v.cut.state, v.cut.sampler)
		v.state = err == nil
		return nil, err
	}
	k, err := s.takeCut()
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
	if v := c.saveOf(0, r.Path); v != nil {
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
	k, err := s.takeCut()
	if err == nil {
		defer k.release()
		// The folder is there already, so that it could be locked.
		err = k.writeValues(ctx, snapshot.ValuesIn(s.opts.FS, staging.Dir, k.id))
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
	return k.writeValues(ctx, v)
}

func (c *call) saveCommit(_ context.Context, r *wire.SaveRequest) (any, error) {
	s := c.s
	v := c.saveOf(r.Save, "")
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
		text := `{"storage_saved": true, "user_metadata": ` + v.metadata + `, "format_version": 1}` + "\n"
		if err := snapshot.WriteText(s.opts.FS, filepath.Join(v.staging.Dir, snapshot.MetadataName), text); err != nil {
			return err
		}
		return v.staging.Commit()
	}()
	return nil, errors.Join(err, s.closeSave(r.Save))
}

func (c *call) saveAbort(_ context.Context, r *wire.SaveRequest) (any, error) {
	if c.saveOf(r.Save, "") == nil {
		return nil, nil
	}
	return nil, c.s.closeSave(r.Save)
}
