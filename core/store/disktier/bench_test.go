package disktier

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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

// spent is time on the clock and of the processor. On a machine that others use too, only the latter says much about what lies
// in memory.
type spent struct{ wall, cpu time.Duration }

func (s spent) plus(o spent) spent { return spent{s.wall + o.wall, s.cpu + o.cpu} }

// timed runs something on one thread.
func timed(b *testing.B, run func()) spent {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := func() time.Duration {
		var used unix.Rusage
		require.NoError(b, unix.Getrusage(unix.RUSAGE_THREAD, &used))
		return time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	began, before := time.Now(), cpu()
	run()
	return spent{time.Since(began), cpu() - before}
}

// report tells how fast something is compared with something plain.
func report(b *testing.B, name string, plain, ours spent) {
	b.ReportMetric(float64(plain.wall)/float64(ours.wall), name+"/plain")
	b.ReportMetric(float64(plain.cpu)/float64(ours.cpu), name+"/plain-cpu")
}

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
			var plainOut, plainIn, spilled, read spent
			b.SetBytes(benchTotal)
			for b.Loop() {
				o, i := plainFiles(b, size)
				plainOut, plainIn = plainOut.plus(o), plainIn.plus(i)
				o, i = spillAndRead(b, size)
				spilled, read = spilled.plus(o), read.plus(i)
			}
			report(b, "spill", plainOut, spilled)
			report(b, "read", plainIn, read)
			b.ReportMetric(float64(b.N)*benchTotal/spilled.wall.Seconds()/1e9, "spill-GB/s")
			b.ReportMetric(float64(b.N)*benchTotal/read.wall.Seconds()/1e9, "read-GB/s")
		})
	}
}

func plainFiles(b *testing.B, size int64) (out, in spent) {
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
	out = timed(b, func() {
		for at := int64(0); at < benchTotal; at += size {
			_, err := f.WriteAt(data[at:at+size], at)
			require.NoError(b, err)
		}
	})
	in = timed(b, func() {
		for at := int64(0); at < benchTotal; at += size {
			_, err := f.ReadAt(target[at:at+size], at)
			require.NoError(b, err)
		}
	})
	a.Free(block.Segment, block.Offset, block.Size)
	a.Free(to.Segment, to.Offset, to.Size)
	return out, in
}

func spillAndRead(b *testing.B, size int64) (out, in spent) {
	s, _ := benchTable(b, None)
	cells := fillTable(b, s, int(benchTotal/size), size)
	out = timed(b, func() {
		for i := range cells {
			_, err := s.Move(cells[i:i+1], table.ToDisk, 0)
			require.NoError(b, err)
		}
	})
	leases := make([]store.Lease, len(cells))
	in = timed(b, func() {
		for i := range cells {
			l, err := s.Read("p", []string{"x"}, cells[i].Samples)
			require.NoError(b, err)
			leases[i] = l
		}
	})
	for _, l := range leases {
		l.Release()
	}
	return out, in
}

// BenchmarkSmallValues spills 100,000 values of 4 KiB in steps, reads them at random in batches, and opens the folder of a
// killed process with as many.
func BenchmarkSmallValues(b *testing.B) {
	const count, size = 100_000, 4 << 10
	var plainOut, plainIn, spilled, read, opened spent
	for b.Loop() {
		dir := benchFolder(b)
		o, i := plainSmall(b, dir, count, size)
		plainOut, plainIn = plainOut.plus(o), plainIn.plus(i)
		tier, err := Open(Options{Dir: filepath.Join(dir, "tier"), Durability: Relaxed})
		require.NoError(b, err)
		s := table.New(table.Options{Memory: memory(b), Disk: tier, Threshold: 1 << 40})
		tier.Attach(s)
		cells := fillTable(b, s, count, size)
		spilled = spilled.plus(timed(b, func() {
			for at := 0; at < count; at += 2000 {
				_, err := s.Move(cells[at:at+2000], table.ToDisk, 0)
				require.NoError(b, err)
			}
		}))
		read = read.plus(timed(b, func() {
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
		}))
		tier.closeFiles()
		require.NoError(b, tier.lock.Close())
		var again *Store
		opened = opened.plus(timed(b, func() {
			again, err = OpenStore(Options{Dir: filepath.Join(dir, "tier"), Durability: Relaxed}, memory(b), 0)
			require.NoError(b, err)
		}))
		require.Equal(b, int64(count), again.Stats().Cells)
		require.NoError(b, again.Close())
	}
	report(b, "spill", plainOut, spilled)
	report(b, "read", plainIn, read)
	b.ReportMetric(opened.wall.Seconds()/float64(b.N), "open-s")
	b.ReportMetric(opened.cpu.Seconds()/float64(b.N), "open-cpu-s")
}

// plainSmall writes in batches of 2000 values and reads value by value at random.
func plainSmall(b *testing.B, dir string, count int, size int64) (out, in spent) {
	f, err := os.Create(filepath.Join(dir, "plain"))
	require.NoError(b, err)
	defer func() { _ = f.Close() }()
	batch := make([]byte, 2000*size)
	for i := range batch {
		batch[i] = byte(i)
	}
	out = timed(b, func() {
		for at := 0; at < count; at += 2000 {
			_, err := f.WriteAt(batch, int64(at)*size)
			require.NoError(b, err)
		}
	})
	order := rand.Perm(count)
	in = timed(b, func() {
		for i, k := range order {
			_, err := f.ReadAt(batch[int64(i%1000)*size:int64(i%1000+1)*size], int64(k)*size)
			require.NoError(b, err)
		}
	})
	return out, in
}
