package disktier

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
)

// The owner is found again: from its frame, after the index was replaced, and after a crash that drops what was not synced.
func TestTheOwnerOfAFolder(t *testing.T) {
	disk := vfs.NewMem(0)
	s, err := OpenStore(testOptions(Strict, disk), memory(t), 0)
	require.NoError(t, err)
	require.Empty(t, s.Tier().Owner())
	require.NoError(t, s.Tier().SetOwner("one"))
	require.NoError(t, s.Tier().SetOwner("two"))
	crashed, err := OpenStore(testOptions(Strict, disk.Crash(rand.New(rand.NewPCG(1, 2)))), memory(t), 0)
	require.NoError(t, err)
	require.Equal(t, "two", crashed.Tier().Owner())
	require.NoError(t, crashed.Close())

	number := s.Tier().files.index.number
	for range 200 {
		put(t, s, 0, 10, 20)
	}
	require.NoError(t, s.Tier().Sync())
	require.Greater(t, s.Tier().files.index.number, number, "the index was replaced")
	require.NoError(t, s.Close())
	s, err = OpenStore(testOptions(Strict, disk), memory(t), 0)
	require.NoError(t, err)
	require.Equal(t, "two", s.Tier().Owner())
	requireValue(t, s, 3, 20)
	require.NoError(t, s.Tier().SetOwner(""))
	require.NoError(t, s.Close())
	s, err = OpenStore(testOptions(Strict, disk), memory(t), 0)
	require.NoError(t, err)
	require.Empty(t, s.Tier().Owner())
	require.NoError(t, s.Close())
}
