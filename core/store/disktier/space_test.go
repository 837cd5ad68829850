package disktier

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// physical is the space that values files take on disk.
func physical(t testing.TB, dir string) (n int64) {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "values-") {
			continue
		}
		info, err := e.Info()
		require.NoError(t, err)
		n += info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return n
}

// requirePhysical allows one more page for each values file: where ext4 keeps the places of a file in pieces.
func requirePhysical(t testing.TB, want int64, dir, why string) {
	files, err := filepath.Glob(filepath.Join(dir, "values-*"))
	require.NoError(t, err)
	got := physical(t, dir)
	require.GreaterOrEqual(t, got, want, why)
	require.LessOrEqual(t, got, want+int64(len(files))*pageSize, why)
}

// placeOfItsOwn is a folder whose files take what is written to them. XFS takes more ahead while a file grows, as it sees fit.
func placeOfItsOwn(t *testing.T) string {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "values-probe"))
	require.NoError(t, err)
	for range 16 {
		_, err := f.Write(make([]byte, 64<<10))
		require.NoError(t, err)
	}
	taken := physical(t, dir)
	require.NoError(t, f.Close())
	require.NoError(t, os.Remove(f.Name()))
	if taken > 1<<20+pageSize {
		t.Skipf("%d bytes are taken for 1 MiB here", taken)
	}
	return dir
}

// TestSpaceComesBack looks at the blocks of the files, not at what the tier believes.
func TestSpaceComesBack(t *testing.T) {
	for name, durability := range durabilities {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(placeOfItsOwn(t), "tier")
			s, err := OpenStore(Options{Dir: dir, Durability: durability}, openArena(t), 0)
			require.NoError(t, err)
			const size = 100 << 10
			put(t, s, 0, 10, size)
			full := physical(t, dir)
			require.GreaterOrEqual(t, full, int64(10*size))
			s.Delete("p", []string{"x"}, samples(3, 2))
			require.NoError(t, s.Tier().Sync())
			require.LessOrEqual(t, physical(t, dir), full-2*size+2*pageSize, "a cleared field")
			put(t, s, 0, 2, 10)
			require.NoError(t, s.Tier().Sync())
			require.LessOrEqual(t, physical(t, dir), full-4*size+4*pageSize, "an overwritten value")
			tx := stage(t, s, 20, 5, size)
			require.NoError(t, store.Prepare(context.Background(), tx))
			tx.Abort()
			require.NoError(t, s.Tier().Sync())
			require.LessOrEqual(t, physical(t, dir), full-4*size+4*pageSize, "a write that was given up")
			s.Delete("p", nil, samples(0, 10))
			require.NoError(t, s.Tier().Sync())
			require.LessOrEqual(t, physical(t, dir), int64(2*pageSize), "the header alone")
			require.NoError(t, s.Close())
		})
	}
}

// TestSpaceIsTakenAhead looks at what the open segment has taken beyond its values: an eighth at most, and nothing when it is full,
// when it is empty, when the store is closed, or when a killed process has left it.
func TestSpaceIsTakenAhead(t *testing.T) {
	dir := filepath.Join(placeOfItsOwn(t), "tier")
	const size, each = 64 << 10, 16
	o := Options{Dir: dir, Durability: Relaxed, SegmentBytes: each*size + valuesStart, ahead: each * size / 2}
	s, err := OpenStore(o, memory(t), 0)
	require.NoError(t, err)
	most := int64(0)
	for i := range int64(each) {
		put(t, s, i, 1, size)
		live, taken := (i+1)*size, physical(t, dir)
		requirePhysical(t, s.Tier().Usage().Physical+pageSize, dir, "what is taken is counted")
		require.LessOrEqual(t, taken, live+live/8+4*pageSize)
		most = max(most, taken-live)
	}
	require.GreaterOrEqual(t, most, int64(size), "some was taken ahead")
	put(t, s, each, 1, size)
	requirePhysical(t, int64((each+1)*size+2*pageSize), dir, "a segment that is full has what it needs")
	for i := range int64(each) {
		put(t, s, each+1+i, 1, size) // over the rest of this segment
	}
	s.Delete("p", nil, samples(0, 2*each+1))
	require.NoError(t, s.Tier().Sync())
	require.LessOrEqual(t, physical(t, dir), int64(2*pageSize), "an empty segment has its header")

	put(t, s, 0, each*3/4, size)
	require.Greater(t, physical(t, dir), int64(each*3/4*size+size))
	s.Tier().closeFiles()
	require.NoError(t, s.Tier().lock.Close())
	s, err = OpenStore(o, memory(t), 0)
	require.NoError(t, err)
	requirePhysical(t, int64(each*3/4*size+pageSize), dir, "after a kill")
	put(t, s, each, each*3/4, size)
	require.NoError(t, s.Close())
	requirePhysical(t, int64(2*(each*3/4*size+pageSize)), dir, "after a close")
	s, err = OpenStore(o, memory(t), 0)
	require.NoError(t, err)
	for i := range int64(each * 3 / 4) {
		requireValue(t, s, i, size)
		requireValue(t, s, each+i, size)
	}
	require.NoError(t, s.Close())
}

// TestAFullDiskGivesNothingAhead: what a refused step had taken already is given back, and values are written into what is left.
func TestAFullDiskGivesNothingAhead(t *testing.T) {
	const size = 64 << 10
	disk := vfs.NewMem(16 * size)
	o := testOptions(None, disk)
	o.SegmentBytes = 1 << 30
	s, err := OpenStore(o, openArena(t), 0)
	require.NoError(t, err)
	before, n := disk.Used(), int64(0)
	for ; n < 100; n++ {
		tx := stage(t, s, n, 1, size)
		if err := store.Prepare(context.Background(), tx); err != nil {
			require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), "%v", err)
			tx.Abort()
			break
		}
		tx.Commit(samples(n, 1))
	}
	require.Equal(t, (16*size-before)/size, n, "no value is refused for the sake of those to come")
	for i := range n {
		requireValue(t, s, i, size)
	}
	s.Delete("p", nil, samples(0, int(n)))
	require.NoError(t, s.Tier().Sync())
	require.Equal(t, before+pageSize, disk.Used(), "the header of the segment is left")
	require.NoError(t, s.Close())
}

func TestCompactionGivesSpaceOfSmallValuesBack(t *testing.T) {
	dir := filepath.Join(placeOfItsOwn(t), "tier")
	s, err := OpenStore(Options{Dir: dir, Durability: Relaxed, SegmentBytes: 1 << 20}, openArena(t), 0)
	require.NoError(t, err)
	const count, size = 2000, 2000
	for i := range int64(count) {
		put(t, s, i, 1, size)
	}
	var gone, kept []schema.Sample
	for i := range int64(count) {
		if i%3 == 0 {
			kept = append(kept, samplesOf(i))
		} else {
			gone = append(gone, samplesOf(i))
		}
	}
	s.Delete("p", nil, gone)
	live := int64(len(kept)) * size
	require.Greater(t, s.Tier().Usage().Physical, 2*live, "pages with a live value cannot be punched")
	l, err := s.Read("p", []string{"x"}, kept[:3])
	require.NoError(t, err)
	require.True(t, s.Tier().Wasteful())
	copied, err := s.Tier().Compact()
	require.NoError(t, err)
	require.Greater(t, copied, live/2)
	l.Release()
	require.NoError(t, s.Tier().Sync())
	require.LessOrEqual(t, s.Tier().Usage().Physical, live*13/10)
	require.LessOrEqual(t, physical(t, dir), live*13/10)
	require.Equal(t, live, s.Stats().DiskUsed)
	require.False(t, s.Tier().Wasteful())
	require.NoError(t, s.Check())
	require.NoError(t, s.Close())

	s, err = reopen(t, dir)
	require.NoError(t, err)
	for _, sample := range kept {
		requireValue(t, s, sample.Index, size)
	}
	require.False(t, s.Has("p", []string{"x"}, gone[:1]))
	require.NoError(t, s.Close())
}

// TestSpaceAmplification overwrites half of the values ten times.
func TestSpaceAmplification(t *testing.T) {
	disk := vfs.NewMem(0)
	s, err := OpenStore(testOptions(None, disk), openArena(t), 0)
	require.NoError(t, err)
	const count, size = 400, 3000
	for i := range int64(count) {
		put(t, s, i, 1, size)
	}
	for range 10 {
		for i := int64(0); i < count; i += 2 {
			put(t, s, i, 1, size)
		}
		if s.Tier().Wasteful() {
			_, err := s.Tier().Compact()
			require.NoError(t, err)
		}
	}
	require.LessOrEqual(t, disk.Used(), int64(count*size*13/10))
	for i := range int64(count) {
		requireValue(t, s, i, size)
	}
	require.NoError(t, s.Close())
}

// TestFullDisk fills a small disk to the last byte again and again. Writes fail cleanly, reads and deletes go on, compaction
// has its headroom, and nothing leaks.
func TestFullDisk(t *testing.T) {
	for name, durability := range durabilities {
		t.Run(name, func(t *testing.T) { fillAndClear(t, durability, vfs.NewMem(1<<20), "d/tier", 50) })
	}
}

// TestFullFileSystem does the same on a real one, where that can be mounted.
func TestFullFileSystem(t *testing.T) {
	folder := t.TempDir()
	if err := syscall.Mount("tmpfs", folder, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a file system here: %v", err)
	}
	defer func() { require.NoError(t, syscall.Unmount(folder, 0)) }()
	for name, durability := range durabilities {
		t.Run(name, func(t *testing.T) {
			fillAndClear(t, durability, vfs.OSDisk{}, filepath.Join(folder, name), 100)
			require.NoError(t, os.RemoveAll(filepath.Join(folder, name)))
		})
	}
}

func fillAndClear(t *testing.T, durability Durability, disk vfs.Disk, dir string, cycles int) {
	o := testOptions(durability, disk)
	o.Dir = dir
	s, err := OpenStore(o, openArena(t), 0)
	require.NoError(t, err)
	rnd := rand.New(rand.NewPCG(1, 2))
	for cycle := range cycles {
		sizes := map[int64]int64{}
		for {
			index, size := int64(len(sizes)), []int64{100, 3000, 20_000, 70_000}[rnd.IntN(4)]
			tx := stage(t, s, index, 1, size)
			if err := store.Prepare(context.Background(), tx); err != nil {
				require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), "cycle %d: %v", cycle, err)
				require.ErrorContains(t, err, "no space")
				tx.Abort()
				break
			}
			tx.Commit(samples(index, 1))
			require.NoError(t, s.Tier().Sync())
			sizes[index] = size
		}
		require.Greater(t, len(sizes), 3, "cycle %d: the space of the cycle before is free", cycle)
		for index, size := range sizes {
			if index%2 == 0 {
				requireValue(t, s, index, size)
				s.Delete("p", nil, samples(index, 1))
				require.NoError(t, s.Tier().Sync(), "cycle %d: a delete works on a full disk", cycle)
			}
		}
		_, err := s.Tier().Compact()
		require.NoError(t, err, "cycle %d: so does compaction", cycle)
		require.NoError(t, s.Tier().Sync())
		for index, size := range sizes {
			if index%2 == 1 {
				requireValue(t, s, index, size)
			}
		}
		s.Delete("p", nil, samples(0, len(sizes)))
		require.NoError(t, s.Tier().Sync())
		require.Equal(t, Usage{}, Usage{Live: s.Tier().Usage().Live, Physical: s.Tier().Usage().Physical})
	}
	require.NoError(t, s.Check())
	require.NoError(t, s.Close())
}
