//go:build go1.25

package controller_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (u *user) tryDump(dir string, keys ...string) (r wire.DumpReply, err error) {
	err = u.try(wire.OpDumpRows, &wire.DumpRequest{Path: dir, Partition: "p", Keys: keys}, &r)
	return r, err
}

func (u *user) tryLoadRows(dir string) (r wire.LoadRowsReply, err error) {
	err = u.try(wire.OpLoadRows, &wire.LoadRowsRequest{Path: dir}, &r)
	return r, err
}

func TestDumpedRowsComeBackByKey(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "d")
		s.example(u)
		report, err := u.tryDump(dir, "d", "a", "b", "tagged")
		require.NoError(t, err)
		require.Equal(t, 3, report.Rows)
		require.Equal(t, int64(8*(2*narrow+wide)+len("bytes")), report.Bytes)
		u.clear("a", "b", "d", "tagged")
		u.put(s.rows(narrow, []string{"fresh"}, 77)) // has the index of a dumped row
		b := batch{write: write{Partition: "p", Keys: []string{"a"}, Fields: []string{"z"}}, columns: []foreign.Raw{s.same(narrow, 5)}}
		b.Tags = wire.List{[]byte{0x81, 0xa1, 'm', 3}}
		u.put(b)

		var index wire.LoadRowsReply
		u.ask(wire.OpLoadRows, &wire.LoadRowsRequest{Path: dir, Index: true}, &index)
		require.Equal(t, wire.Strings{"d", "a", "b", "tagged"}, index.Keys)
		require.Equal(t, []string{"c", "fresh", "a"}, u.keys(), "nothing was loaded")

		loaded, err := u.tryLoadRows(dir)
		require.NoError(t, err)
		require.Equal(t, index.Keys, loaded.Keys)
		require.Equal(t, []byte{0x81, 0xa1, 'n', 7}, loaded.Tags[0])
		require.Equal(t, []byte{0x81, 0xa1, 'm', 3}, loaded.Tags[1], "as it is stored")
		require.ElementsMatch(t, []string{"c", "fresh", "a", "b", "d", "tagged"}, u.keys())
		require.Equal(t, []int64{1, 2, 3, 4, 77}, u.values("a", "b", "c", "d", "fresh"))
		require.Equal(t, []string{"x", "z"}, u.get("a").names, "fields that were not dumped stay")
		require.Equal(t, [][]byte{[]byte("bytes")}, u.get("d").bytes["o"])
		again, err := u.tryLoadRows(dir)
		require.NoError(t, err)
		require.Equal(t, loaded.Keys, again.Keys)
	})
}

func TestADumpIsRefusedWholeAndWritesNothing(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "d")
		u.put(s.rows(narrow, []string{"a"}, 1))
		_, err := u.tryDump(dir, "a", "absent", "lost")
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
		require.ErrorContains(t, err, `"absent", "lost"`)
		require.NoDirExists(t, dir)
		require.NoError(t, os.Mkdir(dir, 0o777))
		_, err = u.tryDump(dir, "a")
		require.Equal(t, tqerr.FileExists, tqerr.CodeOf(err))
		entries, err := os.ReadDir(filepath.Dir(dir))
		require.NoError(t, err)
		require.Len(t, entries, 1)
	})
}

func TestALoadOfRowsIsAllOrNothing(t *testing.T) {
	with(t, setup{samples: 3}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "d")
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		b := batch{write: write{Partition: "p", Keys: []string{"b"}, Fields: []string{"o"}}, columns: []foreign.Raw{s.mem.Objects(1, []byte("x"))}}
		u.put(b)
		_, err := u.tryDump(dir, "a", "b")
		require.NoError(t, err)
		u.clear("a", "b")

		u.put(batch{write: write{Partition: "p", Keys: []string{"c"}, Fields: []string{"x"}}, columns: []foreign.Raw{s.mem.Objects(1, []byte("other kind"))}})
		_, err = u.tryLoadRows(dir)
		require.Equal(t, tqerr.SchemaMismatch, tqerr.CodeOf(err), "%v", err)
		require.Equal(t, []string{"c"}, u.keys())

		u.clear("c")
		u.put(s.rows(narrow, []string{"c", "d"}, 3, 4))
		_, err = u.tryLoadRows(dir)
		require.Equal(t, tqerr.CapacityExceeded, tqerr.CodeOf(err), "two groups of one row each, room for one: %v", err)
		require.Equal(t, []string{"c", "d"}, u.keys())

		u.clear("d")
		_, err = u.tryLoadRows(dir)
		require.NoError(t, err)
		require.Equal(t, []int64{1, 2, 3}, u.values("a", "b", "c"))
	})
}

func TestWhateverCallFailsDumpsAreWholeOrNot(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "d")
		u.put(s.rows(wide, []string{"a"}, 1))
		s.failing(func(at int) error {
			_, err := u.tryDump(dir, "a")
			if err != nil {
				if _, missing := os.Stat(dir); missing == nil { // it failed behind the commit
					require.NoError(t, os.RemoveAll(dir))
				}
			}
			return err
		})
		s.failing(func(at int) error {
			u.put(s.rows(wide, []string{"a"}, 2))
			_, err := u.tryLoadRows(dir)
			if err != nil {
				require.Equal(t, []int64{2}, u.values("a"))
			}
			return err
		})
		require.Equal(t, []int64{1}, u.values("a"))
	})
}
