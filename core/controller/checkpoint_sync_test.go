//go:build go1.25

package controller_test

import (
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
)

// strict remembers what a power loss would take, and complains about a folder that takes its place before all of it is synced.
type strict struct {
	vfs.FS
	t     *testing.T
	mu    sync.Mutex
	dirty map[string]bool // files with bytes, and folders with entries, that are not synced
	swaps int
}

func (s *strict) mark(path string, dirty bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if dirty {
		s.dirty[path] = true
	} else {
		delete(s.dirty, path)
	}
}

func (s *strict) Create(name string) (vfs.File, error) {
	s.mark(name, true)
	s.mark(filepath.Dir(name), true)
	f, err := s.FS.Create(name)
	return &strictFile{f, s, name}, err
}

func (s *strict) Mkdir(name string) error {
	s.mark(filepath.Dir(name), true)
	return s.FS.Mkdir(name)
}

func (s *strict) SyncDir(name string) error {
	s.mark(name, false)
	return s.FS.SyncDir(name)
}

func (s *strict) moves(from, to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for path := range s.dirty {
		if path == from || strings.HasPrefix(path, from+"/") {
			s.t.Errorf("%s is not synced when it gets its place", path)
		}
	}
	s.swaps++
	s.dirty[filepath.Dir(to)] = true
}

func (s *strict) Rename(from, to string) error {
	s.moves(from, to)
	return s.FS.Rename(from, to)
}

func (s *strict) Exchange(a, b string) error {
	s.moves(a, b)
	return s.FS.Exchange(a, b)
}

type strictFile struct {
	vfs.File
	s    *strict
	name string
}

func (f *strictFile) Write(p []byte) (int, error) {
	f.s.mark(f.name, true)
	return f.File.Write(p)
}

func (f *strictFile) Sync() error {
	f.s.mark(f.name, false)
	return f.File.Sync()
}

// A power loss after a save that was answered, or in the moment of the swap, takes nothing.
func TestEverythingIsSyncedBeforeItTakesItsPlace(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), t.TempDir()
		files := &strict{FS: vfs.OS{}, t: t, dirty: map[string]bool{}}
		s.server.SetFS(files)
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		for range 2 {
			u.save(filepath.Join(dir, "c"))
			require.Empty(t, files.dirty)
		}
		_, err := u.tryDump(filepath.Join(dir, "d"), "a")
		require.NoError(t, err)
		require.Empty(t, files.dirty)
		require.Equal(t, 3, files.swaps)
	})
}
