package disktier

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/store"
)

// A strict disk leaves a change for later whose journal is not durable yet. A write that is held then is in the file all the same
// when Hold returns, with what was before it, so that a killed process leaves what the journal may name next.
func TestAHoldIsInTheFileWhenTheDiskIsBehindItsJournal(t *testing.T) {
	disk, a := vfs.NewMem(0), memory(t)
	j, err := journal.Open(journal.Options{Dir: "/journal", Durability: journal.Strict, FS: disk})
	require.NoError(t, err)
	_, err = j.Recover(func(uint64, []byte) error { return nil })
	require.NoError(t, err)
	turn, err := j.Begin()
	require.NoError(t, err)
	turn.Switch()
	require.NoError(t, turn.Finish(func(func([]byte) error) error { return nil }))
	s, err := OpenStore(testOptions(Strict, disk), a, 0)
	require.NoError(t, err)
	s.Tier().Follow(j)

	change, err := j.Append(false, []byte("a change"))
	require.NoError(t, err)
	first := stage(t, s, 1, 1, 100)
	require.NoError(t, store.Prepare(context.Background(), first))
	store.CommitChange(first, samples(1, 1), change)
	killed, err := OpenStore(testOptions(Strict, disk.Killed()), a, 0)
	require.NoError(t, err)
	require.Zero(t, killed.Tier().Marked(), "the change is not durable")
	require.NoError(t, killed.Close())

	second := stage(t, s, 2, 1, 100)
	require.NoError(t, store.Prepare(context.Background(), second))
	require.NoError(t, store.Hold(second))
	killed, err = OpenStore(testOptions(Strict, disk.Killed()), a, 0)
	require.NoError(t, err)
	require.Equal(t, change, killed.Tier().Marked())
	requireValue(t, killed, 1, 100)
	require.NoError(t, killed.CommitHeld(store.TxnOf(second), samples(2, 1), change+1))
	requireValue(t, killed, 2, 100)
	require.NoError(t, killed.Close())
	second.Abort()
	require.NoError(t, s.Close())
	require.NoError(t, j.Close())
}
