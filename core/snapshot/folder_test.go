package snapshot

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// put writes a folder with one file by way of a staging.
func put(f vfs.FS, target, text string) (err error) {
	s, err := Begin(f, target, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := WriteText(f, filepath.Join(s.Dir, MetadataName), text); err != nil {
		return err
	}
	return s.Commit()
}

func content(t *testing.T, target string) string {
	b, err := os.ReadFile(filepath.Join(target, MetadataName))
	require.NoError(t, err)
	return string(b)
}

func alone(t *testing.T, target string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(target))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left beside it")
}

// noExchange is a file system that cannot exchange two names.
type noExchange struct{ vfs.FS }

func (noExchange) Exchange(string, string) error { return errors.ErrUnsupported }

func TestAFolderAppearsAndIsReplacedAsAWhole(t *testing.T) {
	for name, files := range map[string]vfs.FS{"exchange": vfs.OS{}, "two renames": noExchange{vfs.OS{}}} {
		t.Run(name, func(t *testing.T) {
			target := filepath.Join(t.TempDir(), "deep", "c")
			for _, text := range []string{"one", "two", "three"} {
				require.NoError(t, put(files, target, text))
				require.Equal(t, text, content(t, target))
				alone(t, target)
			}
		})
	}
}

func TestAnEmptyFolderAndALinkAreReplacedToo(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "real"), 0o777))
	require.NoError(t, os.Symlink("real", filepath.Join(dir, "link")))
	require.NoError(t, put(vfs.OS{}, filepath.Join(dir, "link"), "text"))
	require.Equal(t, "text", content(t, filepath.Join(dir, "real")))
	info, err := os.Lstat(filepath.Join(dir, "link"))
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&fs.ModeSymlink, "the link stays one")
}

func TestWhatIsNoCheckpointIsNotReplaced(t *testing.T) {
	dir := t.TempDir()
	home := filepath.Join(dir, "home")
	require.NoError(t, os.Mkdir(home, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(home, "thesis.tex"), nil, 0o600))
	requireCode(t, put(vfs.OS{}, home, "text"), tqerr.FileExists, "thesis.tex")
	requireCode(t, put(vfs.OS{}, filepath.Join(home, "thesis.tex"), "text"), tqerr.FileExists, "not a folder")
	require.NoError(t, put(vfs.OS{}, filepath.Join(dir, "c"), "text"))
	_, err := Begin(vfs.OS{}, filepath.Join(dir, "c"), false)
	requireCode(t, err, tqerr.FileExists, "exists already")
}

// files makes a folder with empty files in it; a name that ends with a slash is a folder.
func files(t *testing.T, names ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "c")
	for _, name := range append([]string{""}, names...) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o777))
		if name == "" || name[len(name)-1] == '/' {
			require.NoError(t, os.MkdirAll(path, 0o777))
			continue
		}
		require.NoError(t, os.WriteFile(path, []byte("mine"), 0o600))
	}
	return dir
}

func TestNothingElseIsLostWithACheckpoint(t *testing.T) {
	for name, entries := range map[string][]string{
		"model.safetensors":    {MetadataName, "model.safetensors"},
		"weights":              {MetadataName, StateName, "weights/"},
		"storage/mine":         {MetadataName, "storage/index.tq", "storage/mine"},
		"values-1.tq.bak":      {indexName, "values-1.tq.bak"},
		"values-01.tq":         {indexName, "values-01.tq"},
		"metadata.json":        {StateName, "metadata.json/"},
		"controller_state.pkl": {"controller_state.pkl"}, // without the metadata.json of the peer's checkpoint
	} {
		t.Run(name, func(t *testing.T) {
			dir := files(t, entries...)
			requireCode(t, put(vfs.OS{}, dir, "text"), tqerr.FileExists, name)
			for _, entry := range entries {
				_, err := os.Stat(filepath.Join(dir, entry))
				require.NoError(t, err, "it is still there")
			}
			alone(t, dir)
		})
	}
	for _, entries := range [][]string{
		{MetadataName, StateName, "storage/index.tq", "storage/values-0.tq", "storage/values-12.tq"},
		{indexName, "values-0.tq"},
		{MetadataName, "controller_state.pkl", "simple_storage/su_0_a.pkl"},
	} {
		dir := files(t, entries...)
		require.NoError(t, put(vfs.OS{}, dir, "text"), "%v", entries)
		require.Equal(t, "text", content(t, dir))
	}
}

func TestOnlyWhatDeadWritersLeftIsSwept(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "c")
	living, err := Begin(vfs.OS{}, target, true)
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(beside(target, "save-dead"), 0o777))
	require.NoError(t, WriteText(vfs.OS{}, filepath.Join(beside(target, "save-dead"), "x"), "x"))
	require.NoError(t, os.Mkdir(filepath.Join(dir, ".other.tq-save-1"), 0o777))
	require.NoError(t, put(vfs.OS{}, target, "text"))
	require.NoDirExists(t, beside(target, "save-dead"))
	require.DirExists(t, living.Dir)
	require.DirExists(t, filepath.Join(dir, ".other.tq-save-1"))
	require.NoError(t, WriteText(vfs.OS{}, filepath.Join(living.Dir, MetadataName), "later"))
	require.NoError(t, living.Commit())
	require.NoError(t, living.Close())
	require.Equal(t, "later", content(t, target))
}

// Two processes save to a place where nothing stands: both find it free, and the second one replaces the first.
func TestTwoWritersOfAFreePlace(t *testing.T) {
	target := filepath.Join(t.TempDir(), "c")
	late := &latecomer{FS: vfs.OS{}, before: func() { require.NoError(t, put(vfs.OS{}, target, "first")) }}
	require.NoError(t, put(late, target, "second"))
	require.Equal(t, "second", content(t, target))
	alone(t, target)
}

// latecomer lets something happen before its first rename.
type latecomer struct {
	vfs.FS
	before func()
}

func (l *latecomer) Rename(from, to string) error {
	if before := l.before; before != nil {
		l.before = nil
		before()
	}
	return l.FS.Rename(from, to)
}

func TestASwapThatWasInterruptedIsRepaired(t *testing.T) {
	target := filepath.Join(t.TempDir(), "c")
	require.NoError(t, put(vfs.OS{}, target, "old"))
	require.NoError(t, os.Rename(target, beside(target, "old")))
	require.NoError(t, Repair(vfs.OS{}, target))
	require.Equal(t, "old", content(t, target))
	alone(t, target)
	require.NoError(t, Repair(vfs.OS{}, target))

	require.NoError(t, os.CopyFS(beside(target, "old"), os.DirFS(target))) // died before the old one was removed
	require.NoError(t, put(vfs.OS{}, target, "new"))
	require.Equal(t, "new", content(t, target))
	alone(t, target)
}

// With any one call failing, and with all calls failing from then on, the folder is the old or the new one.
func TestAFailingCallLeavesTheOldOrTheNew(t *testing.T) {
	boom := errors.New("boom")
	for _, forever := range []bool{false, true} {
		for _, exchange := range []bool{true, false} {
			for at := 0; ; at++ {
				target := filepath.Join(t.TempDir(), "c")
				require.NoError(t, put(vfs.OS{}, target, "old"))
				var real vfs.FS = vfs.OS{}
				if !exchange {
					real = noExchange{real}
				}
				failing := &vfs.Failing{FS: real, At: at, Err: boom, Forever: forever}
				err := put(failing, target, "new")
				if !failing.Failed() {
					require.NoError(t, err)
					require.Greater(t, at, 8, "calls were counted")
					break
				}
				require.NoError(t, Repair(vfs.OS{}, target))
				got := content(t, target)
				require.Contains(t, []string{"old", "new"}, got, "call %d", at)
				if err == nil {
					require.Equal(t, "new", got, "call %d", at)
				}
				require.NoError(t, put(vfs.OS{}, target, "next"), "call %d", at)
				require.Equal(t, "next", content(t, target))
				alone(t, target)
			}
		}
	}
}

func TestReplaceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write := func(text string) error {
		return ReplaceFile(vfs.OS{}, path, func(path string) error { return WriteText(vfs.OS{}, path, text) })
	}
	require.NoError(t, write("one"))
	require.NoError(t, write("two"))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "two", string(b))
	alone(t, path)
	require.EqualError(t, ReplaceFile(vfs.OS{}, path, func(string) error { return tqerr.New(tqerr.IO, "full") }), "full")
	alone(t, path)
}

func TestReplaceFileReplacesNoFolder(t *testing.T) {
	dir := files(t, "thesis.tex")
	err := ReplaceFile(vfs.OS{}, dir, func(path string) error { return WriteText(vfs.OS{}, path, "text") })
	requireCode(t, err, tqerr.FileExists, "not a file")
	require.FileExists(t, filepath.Join(dir, "thesis.tex"))
	alone(t, dir)
}

func TestReplaceFileRemovesWhatADeadProcessLeft(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for range 2 {
		left := &Staging{fs: vfs.OS{}, Target: path}
		require.NoError(t, left.make())
		require.NoError(t, WriteText(vfs.OS{}, filepath.Join(left.Dir, "f"), "half"))
		require.NoError(t, left.lock.Close(), "the lock ends with its process")
	}
	alive := &Staging{fs: vfs.OS{}, Target: path}
	require.NoError(t, alive.make())
	require.NoError(t, ReplaceFile(vfs.OS{}, path, func(path string) error { return WriteText(vfs.OS{}, path, "whole") }))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "whole", string(text))
	require.DirExists(t, alive.Dir, "somebody who lives writes there")
	require.NoError(t, alive.Close())
	alone(t, path)
}

func TestReplaceFileLeavesTheOldOrTheNewWhenACallFails(t *testing.T) {
	boom := errors.New("boom")
	for at := 0; ; at++ {
		path := filepath.Join(t.TempDir(), "f")
		require.NoError(t, ReplaceFile(vfs.OS{}, path, func(path string) error { return WriteText(vfs.OS{}, path, "old") }))
		failing := &vfs.Failing{FS: vfs.OS{}, At: at, Err: boom}
		err := ReplaceFile(failing, path, func(path string) error { return WriteText(failing, path, "new") })
		if !failing.Failed() {
			require.NoError(t, err)
			return
		}
		text, readErr := os.ReadFile(path)
		require.NoError(t, readErr)
		require.Contains(t, []string{"old", "new"}, string(text), "call %d", at)
		require.NoError(t, ReplaceFile(vfs.OS{}, path, func(path string) error { return WriteText(vfs.OS{}, path, "next") }))
		alone(t, path)
	}
}
