package disktier

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
)

// benchFolder is on a RAM-backed file system unless TQ_BENCH_DIR names another folder.
func benchFolder(b *testing.B) string {
	parent := os.Getenv("TQ_BENCH_DIR")
	if parent == "" {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "tq-bench-*")
	require.NoError(b, err)
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

const benchTotal = 256 << 20

// benchTable holds values in memory that can spill.
func benchTable(b *testing.B, durability Durability) (*table.Table, *Tier) {
	t, err := Open(Options{Dir: filepath.Join(benchFolder(b), "tier"), Durability: durability})
	require.NoError(b, err)
	tb := table.New(table.Options{Memory: memory(b), Disk: t, Threshold: 1 << 40})
	t.Attach(tb)
	b.Cleanup(func() {
		require.NoError(b, tb.Close())
		require.NoError(b, t.Close())
	})
	return tb, t
}

func fillTable(b *testing.B, s *table.Table, count int, size int64) []table.Cells {
	cells := make([]table.Cells, count)
	for i := range cells {
		tx, err := s.Stage("p", []schema.Column{bytesColumn("x", 1, size)})
		require.NoError(b, err)
		data := s.Bytes(tx.Blocks()[0])
		for j := range data {
			data[j] = byte(i + j)
		}
		cells[i] = table.Cells{Partition: "p", Field: "x", Samples: samples(int64(i), 1)}
		tx.Commit(cells[i].Samples)
	}
	return cells
}

// BenchmarkSpillAndReadBack moves values to disk and reads them again, against plain writes and reads of the same sizes out of
// and into the same kind of memory, in the same run.
func BenchmarkSpillAndReadBack(b *testing.B) {
	for _, size := range []int64{1 << 20, 8 << 20, 64 << 20} {
		b.Run(fmt.Sprintf("%dMiB", size>>20), func(b *testing.B) {
			var plainOut, plainIn, spilled, read time.Duration
			b.SetBytes(benchTotal)
			for b.Loop() {
				o, i := plainFiles(b, size)
				plainOut, plainIn = plainOut+o, plainIn+i
				o, i = spillAndRead(b, size)
				spilled, read = spilled+o, read+i
			}
			b.ReportMetric(float64(plainOut)/float64(spilled), "spill/plain")
			b.ReportMetric(float64(plainIn)/float64(read), "read/plain")
			b.ReportMetric(float64(b.N)*benchTotal/spilled.Seconds()/1e9, "spill-GB/s")
			b.ReportMetric(float64(b.N)*benchTotal/read.Seconds()/1e9, "read-GB/s")
		})
	}
}

func plainFiles(b *testing.B, size int64) (out, in time.Duration) {
	a := memory(b)
	block, err := a.Alloc(benchTotal)
	require.NoError(b, err)
	data := a.Bytes(block.Segment, block.Offset, block.Size)
	for i := range data {
		data[i] = byte(i)
	}
	to, err := a.Alloc(benchTotal)
	require.NoError(b, err)
	target := a.Bytes(to.Segment, to.Offset, to.Size)
	clear(target) // so that the pages are there, as those of a unit are
	f, err := os.Create(filepath.Join(benchFolder(b), "plain"))
	require.NoError(b, err)
	defer func() { _ = f.Close() }()
	began := time.Now()
	for at := int64(0); at < benchTotal; at += size {
		_, err := f.WriteAt(data[at:at+size], at)
		require.NoError(b, err)
	}
	out, began = time.Since(began), time.Now()
	for at := int64(0); at < benchTotal; at += size {
		_, err := f.ReadAt(target[at:at+size], at)
		require.NoError(b, err)
	}
	in = time.Since(began)
	a.Free(block.Segment, block.Offset, block.Size)
	a.Free(to.Segment, to.Offset, to.Size)
	return out, in
}

func spillAndRead(b *testing.B, size int64) (out, in time.Duration) {
	s, _ := benchTable(b, None)
	cells := fillTable(b, s, int(benchTotal/size), size)
	began := time.Now()
	for i := range cells {
		_, err := s.Move(cells[i:i+1], table.ToDisk, 0)
		require.NoError(b, err)
	}
	out, began = time.Since(began), time.Now()
	leases := make([]store.Lease, len(cells))
	for i := range cells {
		l, err := s.Read("p", []string{"x"}, cells[i].Samples)
		require.NoError(b, err)
		leases[i] = l
	}
	in = time.Since(began)
	for _, l := range leases {
		l.Release()
	}
	return out, in
}

// BenchmarkSmallValues spills 100,000 values of 4 KiB in steps, reads them at random in batches, and opens the folder of a
// killed process with as many.
func BenchmarkSmallValues(b *testing.B) {
	const count, size = 100_000, 4 << 10
	var plainOut, plainIn, spilled, read, opened time.Duration
	for b.Loop() {
		dir := benchFolder(b)
		o, i := plainSmall(b, dir, count, size)
		plainOut, plainIn = plainOut+o, plainIn+i
		tier, err := Open(Options{Dir: filepath.Join(dir, "tier"), Durability: Relaxed})
		require.NoError(b, err)
		s := table.New(table.Options{Memory: memory(b), Disk: tier, Threshold: 1 << 40})
		tier.Attach(s)
		cells := fillTable(b, s, count, size)
		began := time.Now()
		for at := 0; at < count; at += 2000 {
			_, err := s.Move(cells[at:at+2000], table.ToDisk, 0)
			require.NoError(b, err)
		}
		spilled += time.Since(began)
		began = time.Now()
		order := rand.Perm(count)
		for at := 0; at < count; at += 1000 {
			list := make([]schema.Sample, 1000)
			for k := range list {
				list[k] = cells[order[at+k]].Samples[0]
			}
			l, err := s.Read("p", []string{"x"}, list)
			require.NoError(b, err)
			l.Release()
		}
		read += time.Since(began)
		tier.closeFiles()
		require.NoError(b, tier.lock.Close())
		began = time.Now()
		again, err := OpenStore(Options{Dir: filepath.Join(dir, "tier"), Durability: Relaxed}, memory(b), 0)
		require.NoError(b, err)
		opened += time.Since(began)
		require.Equal(b, int64(count), again.Stats().Cells)
		require.NoError(b, again.Close())
	}
	b.ReportMetric(float64(plainOut)/float64(spilled), "spill/plain")
	b.ReportMetric(float64(plainIn)/float64(read), "read/plain")
	b.ReportMetric(opened.Seconds()/float64(b.N), "open-s")
}

// plainSmall writes in batches of 2000 values and reads value by value at random.
func plainSmall(b *testing.B, dir string, count int, size int64) (out, in time.Duration) {
	f, err := os.Create(filepath.Join(dir, "plain"))
	require.NoError(b, err)
	defer func() { _ = f.Close() }()
	batch := make([]byte, 2000*size)
	for i := range batch {
		batch[i] = byte(i)
	}
	began := time.Now()
	for at := 0; at < count; at += 2000 {
		_, err := f.WriteAt(batch, int64(at)*size)
		require.NoError(b, err)
	}
	out = time.Since(began)
	order := rand.Perm(count)
	began = time.Now()
	for i, k := range order {
		_, err := f.ReadAt(batch[int64(i%1000)*size:int64(i%1000+1)*size], int64(k)*size)
		require.NoError(b, err)
	}
	return out, time.Since(began)
}
