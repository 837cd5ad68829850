package snapshot

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// Names inside a checkpoint and a dump.
const (
	MetadataName = "metadata.json"
	StateName    = "controller_state.tq"
	RowsName     = "row_index.tq"
	StorageName  = "storage"
)

// Staging is a folder that will take the place of another, or of none, as a whole.
type Staging struct {
	Dir     string // where to write
	Target  string // without symbolic links
	fs      vfs.FS
	lock    io.Closer
	replace bool
}

// Begin makes a folder beside target to write in. With replace an older folder with the same purpose may stand at target:
// one that is empty, or has a part of a checkpoint and nothing else; otherwise nothing may stand there. What dead processes
// left beside it is removed.
func Begin(f vfs.FS, target string, replace bool) (*Staging, error) {
	if err := f.MkdirAll(filepath.Dir(target)); err != nil {
		return nil, vfs.Wrap(err)
	}
	parent, err := f.Resolve(filepath.Dir(target))
	if err != nil {
		return nil, vfs.Wrap(err)
	}
	target = filepath.Join(parent, filepath.Base(target))
	if err := Repair(f, target); err != nil {
		return nil, err
	}
	if replace {
		if real, err := f.Resolve(target); err == nil {
			target = real
		}
	}
	s := &Staging{fs: f, Target: target, replace: replace}
	if _, err := s.free(); err != nil {
		return nil, err
	}
	if err := s.sweep(); err != nil {
		return nil, err
	}
	return s, s.make()
}

func beside(target, what string) string {
	return filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".tq-"+what)
}

// make creates and locks the folder. A sweep that comes between the two takes it away, and it is made again.
func (s *Staging) make() error {
	for {
		var id [6]byte
		_, _ = rand.Read(id[:])
		s.Dir = beside(s.Target, "save-"+hex.EncodeToString(id[:]))
		if err := s.fs.Mkdir(s.Dir); err != nil {
			return vfs.Wrap(err)
		}
		lock, err := s.fs.Lock(s.Dir)
		if err == nil {
			if _, err = s.fs.Lstat(s.Dir); err == nil {
				s.lock = lock
				return nil
			}
			_ = lock.Close()
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, vfs.ErrLocked) {
			return errors.Join(vfs.Wrap(err), s.fs.RemoveAll(s.Dir))
		}
	}
}

// free checks that the target may be written and reports whether something stands there.
func (s *Staging) free() (taken bool, err error) {
	info, err := s.fs.Lstat(s.Target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, vfs.Wrap(err)
	case !s.replace:
		return true, tqerr.New(tqerr.FileExists, "%s exists already", s.Target)
	case !info.IsDir():
		return true, tqerr.New(tqerr.FileExists, "%s is not a folder", s.Target)
	}
	entries, err := s.fs.ReadDir(s.Target)
	if err != nil {
		return true, vfs.Wrap(err)
	}
	foreign, err := s.foreign(s.Target, entries)
	marked := slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return slices.Contains(marks, e.Name()) })
	if err == nil && foreign == "" && !marked && len(entries) > 0 {
		foreign = entries[0].Name()
	}
	if err == nil && foreign != "" {
		err = tqerr.New(tqerr.FileExists, "%s is not empty and not only a checkpoint: it has %q", s.Target, foreign)
	}
	return true, err
}

// What a checkpoint, or a part of one, has at least one of; and what the peer package calls its parts.
var (
	marks     = []string{MetadataName, StateName, indexName}
	peerNames = []string{"controller_state.pkl", "simple_storage"}
)

// foreign returns the name of something in a folder that no checkpoint has, and that is not lost by replacing one.
func (s *Staging) foreign(dir string, entries []fs.DirEntry) (string, error) {
	for _, e := range entries {
		name := e.Name()
		switch {
		case slices.Contains(peerNames, name):
		case !e.IsDir() && (slices.Contains(marks, name) || isPartName(name)):
		case e.IsDir() && name == StorageName:
			inside := filepath.Join(dir, name)
			below, err := s.fs.ReadDir(inside)
			if err != nil {
				return "", vfs.Wrap(err)
			}
			if found, err := s.foreign(inside, below); err != nil || found != "" {
				return filepath.Join(name, found), err
			}
		default:
			return name, nil
		}
	}
	return "", nil
}

// sweep removes what dead processes left behind.
func (s *Staging) sweep() error {
	entries, err := s.fs.ReadDir(filepath.Dir(s.Target))
	if err != nil {
		return vfs.Wrap(err)
	}
	prefix := filepath.Base(beside(s.Target, "save-"))
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		left := filepath.Join(filepath.Dir(s.Target), e.Name())
		lock, err := s.fs.Lock(left)
		if err != nil {
			continue // somebody writes there, or has removed it
		}
		err = s.fs.RemoveAll(left)
		_ = lock.Close()
		if err != nil {
			return vfs.Wrap(err)
		}
	}
	return nil
}

// Commit puts the folder in its place. When it fails, what stood there still does.
func (s *Staging) Commit() error {
	if err := s.fs.SyncDir(s.Dir); err != nil {
		return vfs.Wrap(err)
	}
	taken, err := s.free()
	if err != nil {
		return err
	}
	if !taken {
		err = s.fs.Rename(s.Dir, s.Target)
		if s.replace && errors.Is(err, fs.ErrExist) { // another process was first
			taken, err = s.free()
		}
	}
	if taken && err == nil {
		err = s.swap()
	}
	if err != nil {
		return vfs.Wrap(err)
	}
	return vfs.Wrap(s.fs.SyncDir(filepath.Dir(s.Target)))
}

func (s *Staging) swap() error {
	err := s.fs.Exchange(s.Dir, s.Target)
	if !errors.Is(err, errors.ErrUnsupported) {
		return err // the old folder has the staging name now, and goes with it
	}
	old := beside(s.Target, "old")
	if err := s.fs.Rename(s.Target, old); err != nil {
		return err
	}
	if err := s.fs.Rename(s.Dir, s.Target); err != nil {
		return errors.Join(err, s.fs.Rename(old, s.Target))
	}
	return s.fs.RemoveAll(old)
}

// Close removes what is still beside the target. It must be called after Commit too.
func (s *Staging) Close() error {
	err := s.fs.RemoveAll(s.Dir)
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return vfs.Wrap(err)
}

// Repair gives a folder its name back that lost it when a process died between two renames.
func Repair(f vfs.FS, target string) error {
	old := beside(target, "old")
	if _, err := f.Lstat(old); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return vfs.Wrap(err)
	}
	_, err := f.Lstat(target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return vfs.Wrap(f.Rename(old, target))
	case err != nil:
		return vfs.Wrap(err)
	}
	return vfs.Wrap(f.RemoveAll(old))
}

// ReplaceFile writes a file in a folder beside its place and then puts it there. The folder is locked while this process
// writes, so that what a dead one has left behind is known as such; the next one that replaces the file removes it.
func ReplaceFile(f vfs.FS, path string, write func(path string) error) error {
	switch info, err := f.Stat(path); {
	case err == nil && !info.Mode().IsRegular():
		return tqerr.New(tqerr.FileExists, "%s is there already and not a file", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return vfs.Wrap(err)
	}
	if err := f.MkdirAll(filepath.Dir(path)); err != nil {
		return vfs.Wrap(err)
	}
	s := &Staging{fs: f, Target: path}
	if err := s.sweep(); err != nil {
		return err
	}
	if err := s.make(); err != nil {
		return err
	}
	temporary := filepath.Join(s.Dir, filepath.Base(path))
	err := write(temporary)
	if err == nil {
		if err = vfs.Wrap(f.Rename(temporary, path)); tqerr.CodeOf(err) == tqerr.FileExists {
			err = vfs.Wrap(f.Exchange(temporary, path))
		}
	}
	if left := s.Close(); err == nil {
		err = left
	}
	if err == nil {
		err = f.SyncDir(filepath.Dir(path))
	}
	return vfs.Wrap(err)
}

// WriteText writes and syncs a small file.
func WriteText(f vfs.FS, path, text string) error {
	file, err := f.Create(path)
	if err != nil {
		return vfs.Wrap(err)
	}
	_, err = io.WriteString(file, text)
	if err == nil {
		err = file.Sync()
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	return vfs.Wrap(err)
}
