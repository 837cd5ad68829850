package disktier

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// hold prepares and holds a write of rows 1 to 3 of "x", and of "y" whose rows 1 and 3 are one.
func hold(t *testing.T, s *Store) store.Staged {
	t.Helper()
	y := bytesColumn("y", 2, 300)
	y.Share = []uint32{0, 1, 0}
	tx, err := s.Stage("p", []schema.Column{bytesColumn("x", 3, 500), y})
	require.NoError(t, err)
	for k, seeds := range [][]uint64{{1, 2, 3}, {11, 12}} {
		to := s.Bytes(tx.Blocks()[k])
		for _, seed := range seeds {
			to = to[copy(to, value(seed, int64(500-200*k))):]
		}
	}
	require.NoError(t, store.Prepare(context.Background(), tx))
	require.NoError(t, store.Hold(tx))
	require.NotZero(t, store.TxnOf(tx))
	require.NoError(t, s.Tier().Sync())
	return tx
}

// requireHeld compares what the cells of samples 1 to 3 are with what was held, or with before.
func requireHeld(t *testing.T, s *Store, committed bool) {
	t.Helper()
	require.NoError(t, s.Check())
	for i, y := range []uint64{11, 12, 11} {
		index := int64(i + 1)
		size := int64(100)
		if committed {
			size = 500
		}
		requireValue(t, s, index, size)
		l, err := s.Read("p", []string{"y"}, samples(index, 1))
		var missing *store.MissingError
		if !committed {
			require.True(t, errors.As(err, &missing), "%v", err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, value(y, 300), bytesOf(s, l))
		l.Release()
	}
	require.Equal(t, s.Stats().DiskUsed, s.Tier().Usage().Live, "bytes on disk that no cell names")
}

// What is held survives the process that held it, also in an index that was replaced, and is committed or dropped by the next. What
// was committed or aborted is not held any more.
func TestWhatIsHeldSurvivesTheProcess(t *testing.T) {
	ends := map[string]struct {
		do        func(s *Store, tx store.Staged)
		held      bool
		committed bool
	}{
		"nothing":                {func(*Store, store.Staged) {}, true, false},
		"the index was replaced": {func(s *Store, _ store.Staged) { require.NoError(t, s.Tier().rewriteNow()) }, true, false},
		"committed":              {func(_ *Store, tx store.Staged) { store.CommitChange(tx, samples(1, 3), 9) }, false, true},
		"aborted":                {func(_ *Store, tx store.Staged) { tx.Abort() }, false, false},
	}
	for _, durability := range []Durability{Relaxed, Strict} {
		for name, end := range ends {
			t.Run(name, func(t *testing.T) {
				disk, a := vfs.NewMem(0), memory(t)
				reopen := func() *Store {
					if durability == Strict {
						disk = disk.Crash(rand.New(rand.NewPCG(1, 2)))
					} else {
						disk = disk.Killed()
					}
					s, err := OpenStore(testOptions(durability, disk), a, 0)
					require.NoError(t, err)
					return s
				}
				s, err := OpenStore(testOptions(durability, disk), a, 0)
				require.NoError(t, err)
				put(t, s, 0, 5, 100)
				tx := hold(t, s)
				txn := store.TxnOf(tx)
				end.do(s, tx)
				require.NoError(t, s.Tier().Sync())

				for _, commits := range []bool{true, false} {
					left := disk
					s = reopen()
					requireHeld(t, s, end.committed)
					require.Equal(t, end.held, s.Stats().DiskUsed == 5*100+3*500+2*300)
					s = reopen()
					requireHeld(t, s, end.committed)
					if commits {
						require.NoError(t, s.CommitHeld(txn, samples(1, 3), 7))
						require.NoError(t, s.CommitHeld(txn, samples(1, 3), 8), "once")
					}
					s.DropHeld()
					require.NoError(t, s.Tier().Sync())
					for range 2 {
						requireHeld(t, s, end.committed || end.held && commits)
						if end.held && commits {
							require.EqualValues(t, 7, s.Tier().Marked())
						}
						s = reopen()
					}
					s.Delete("p", nil, samples(0, 5))
					require.NoError(t, s.Tier().Sync())
					require.Zero(t, s.Tier().Usage().Live)
					require.NoError(t, s.Close())
					disk = left
				}
			})
		}
	}
}

// rewriteNow replaces the index.
func (t *Tier) rewriteNow() error {
	t.files.Lock()
	defer t.files.Unlock()
	return t.rewrite()
}

// A journal that says less than what is held commits nothing.
func TestAHeldWriteOfMoreRowsThanTheJournalSays(t *testing.T) {
	disk, a := vfs.NewMem(0), memory(t)
	s, err := OpenStore(testOptions(Relaxed, disk), a, 0)
	require.NoError(t, err)
	put(t, s, 0, 5, 100)
	txn := store.TxnOf(hold(t, s))
	s, err = OpenStore(testOptions(Relaxed, disk.Killed()), a, 0)
	require.NoError(t, err)
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(s.CommitHeld(txn, samples(1, 2), 7)))
	requireHeld(t, s, false)
	require.NoError(t, s.CommitHeld(txn, samples(1, 3), 7))
	requireHeld(t, s, true)
	require.NoError(t, s.Close())
}

// Another owner inherits nothing.
func TestAnotherOwnerDropsWhatIsHeld(t *testing.T) {
	disk, a := vfs.NewMem(0), memory(t)
	s, err := OpenStore(testOptions(Relaxed, disk), a, 0)
	require.NoError(t, err)
	hold(t, s)
	disk = disk.Killed()
	s, err = OpenStore(testOptions(Relaxed, disk), a, 0)
	require.NoError(t, err)
	s.DropHeld()
	require.NoError(t, s.Tier().SetOwner("another"))
	s, err = OpenStore(testOptions(Relaxed, disk.Killed()), a, 0)
	require.NoError(t, err)
	require.Zero(t, s.Stats().DiskUsed)
	require.NoError(t, s.Close())
}

const goldenHeld = "testdata/v1-held"

// TestGoldenHeld reads a folder with a held write that an earlier version of this package has written.
func TestGoldenHeld(t *testing.T) {
	if *update {
		require.NoError(t, os.RemoveAll(goldenHeld))
		s, err := OpenStore(Options{Dir: goldenHeld, Durability: Relaxed, HeadroomBytes: pageSize}, openArena(t), 0)
		require.NoError(t, err)
		put(t, s, 0, 5, 100)
		tx := hold(t, s)
		copied := t.TempDir()
		require.NoError(t, os.CopyFS(copied, os.DirFS(goldenHeld)))
		tx.Abort()
		require.NoError(t, s.Close())
		require.NoError(t, os.RemoveAll(goldenHeld))
		require.NoError(t, os.CopyFS(goldenHeld, os.DirFS(copied)))
		trimGolden(t, goldenHeld)
	}
	dir := filepath.Join(t.TempDir(), "tier")
	require.NoError(t, os.CopyFS(dir, os.DirFS(goldenHeld)))
	s, err := OpenStore(Options{Dir: dir, Durability: Strict}, openArena(t), 0)
	require.NoError(t, err)
	requireHeld(t, s, false)
	require.Len(t, s.Tier().mu.held, 1)
	for txn := range s.Tier().mu.held {
		require.NoError(t, s.CommitHeld(txn, samples(1, 3), 7))
	}
	require.NoError(t, s.Tier().Sync())
	requireHeld(t, s, true)
	require.NoError(t, s.Close())
}
