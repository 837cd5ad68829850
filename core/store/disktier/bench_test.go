package disktier

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
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
	// Another process removes it when this one ends in whatever way, so that a killed one leaves no memory taken.
	remove := exec.Command("sh", "-c", `cat; rm -rf "$1"`, "sh", dir)
	remove.SysProcAttr = &unix.SysProcAttr{Setpgid: true} // what ends this one by a signal to its group does not reach it
	alive, err := remove.StdinPipe()
	require.NoError(b, err)
	require.NoError(b, remove.Start())
	b.Cleanup(func() {
		require.NoError(b, alive.Close())
		require.NoError(b, remove.Wait())
		require.NoDirExists(b, dir)
	})
	return dir
}

const benchTotal = 256 << 20

// spent is time on the clock and of the processor. On a machine that others use too, only the latter says much about what lies
// in memory.
type spent struct{ wall, cpu time.Duration }

// timed runs something on one thread.
func timed(b *testing.B, run func()) spent {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := func() time.Duration { // rusage only knows the last tick
		var used unix.Timespec
		require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used))
		return time.Duration(used.Nano())
	}
	began, before := time.Now(), cpu()
	run()
	return spent{time.Since(began), cpu() - before}
}

// benchTable holds values in memory that can spill.
func benchTable(b *testing.B, durability Durability) (*table.Table, *Tier, *arena.Arena) {
	a := memory(b)
	t, err := Open(Options{Dir: filepath.Join(benchFolder(b), "tier"), Durability: durability})
	require.NoError(b, err)
	tb := table.New(table.Options{Memory: a, Disk: t, Threshold: 1 << 40})
	t.Attach(tb)
	b.Cleanup(func() {
		require.NoError(b, tb.Close())
		require.NoError(b, t.Close())
	})
	return tb, t, a
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

// benchPairs of plain and ours, in turns, make one figure: what else the machine does meets both.
const benchPairs = 15

// pairs of plain times and ours.
type pairs struct{ plain, ours []spent }

func (p *pairs) add(plain, ours spent) {
	p.plain, p.ours = append(p.plain, plain), append(p.ours, ours)
}

// report gives medians of the ratios of the pairs, and the ratios of the best times, which other work has disturbed least. A
// virtual machine that does not get its processors counts processor time wrongly.
func (p *pairs) report(b *testing.B, name string, bytes int64) {
	wall, cpu, plain, ours := make([]float64, len(p.ours)), make([]float64, len(p.ours)), p.plain[0], p.ours[0]
	for i := range p.ours {
		wall[i] = float64(p.plain[i].wall) / float64(p.ours[i].wall)
		cpu[i] = float64(p.plain[i].cpu) / float64(p.ours[i].cpu)
		plain.wall, plain.cpu = min(plain.wall, p.plain[i].wall), min(plain.cpu, p.plain[i].cpu)
		ours.wall, ours.cpu = min(ours.wall, p.ours[i].wall), min(ours.cpu, p.ours[i].cpu)
	}
	b.ReportMetric(median(wall), name+"/plain")
	b.ReportMetric(median(cpu), name+"/plain-cpu")
	b.ReportMetric(float64(plain.wall)/float64(ours.wall), name+"/plain-best")
	b.ReportMetric(float64(plain.cpu)/float64(ours.cpu), name+"/plain-cpu-best")
	b.ReportMetric(float64(bytes)/ours.wall.Seconds()/1e9, name+"-GB/s-best")
}

// warm lets the file that is written next find pages that were in use a moment ago. Those that were free for some seconds may
// have gone back to the host of a virtual machine, and cost several times a copy when they are touched, whoever does it.
func warm(b *testing.B, dir string, from []byte, total int64) {
	f, err := os.Create(filepath.Join(dir, "warm"))
	require.NoError(b, err)
	for at := int64(0); at < total; at += int64(len(from)) {
		_, err := f.WriteAt(from, at)
		require.NoError(b, err)
	}
	require.NoError(b, f.Close())
	require.NoError(b, os.Remove(f.Name()))
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// BenchmarkSpillAndReadBack moves values to disk and reads them again, beside plain writes and reads of files of the same size
// out of and into the same memory. Both write to pages that another file had just before. Synced values are durable one by one, in
// both, and are read when the page cache has none of them.
func BenchmarkSpillAndReadBack(b *testing.B) {
	for _, durability := range []Durability{None, Strict} {
		for _, size := range []int64{1 << 20, 8 << 20, 64 << 20} {
			b.Run(fmt.Sprintf("%s/%dMiB", [...]string{None: "plain", Strict: "synced"}[durability], size>>20), func(b *testing.B) {
				benchSpill(b, durability, size)
			})
		}
	}
}

func benchSpill(b *testing.B, durability Durability, size int64) {
	s, t, a := benchTable(b, durability)
	to, err := a.Alloc(benchTotal)
	require.NoError(b, err)
	p := plainFile{dir: benchFolder(b), size: size, sync: durability == Strict, to: a.Bytes(to.Segment, to.Offset, to.Size)}
	clear(p.to) // its pages are there, as those of a unit are
	var out, in pairs
	b.SetBytes(benchTotal)
	for b.Loop() {
		for i := range benchPairs + 1 {
			cells := fillTable(b, s, int(benchTotal/size), size)
			var plain, ours [2]spent
			plainFirst := i%2 == 0
			if plainFirst {
				plain = p.run(b, blocksOf(b, s, cells))
			}
			from := blocksOf(b, s, cells)
			warm(b, p.dir, from[0], benchTotal)
			ours = spillAndRead(b, s, t, cells, p.sync)
			if !plainFirst {
				plain = p.run(b, from) // memory that is free, and keeps its pages
			}
			if i == 0 {
				continue // memory and files grow for the first time
			}
			out.add(plain[0], ours[0])
			in.add(plain[1], ours[1])
		}
	}
	out.report(b, "spill", benchTotal)
	in.report(b, "read", benchTotal)
}

// blocksOf is where values lie in memory.
func blocksOf(b *testing.B, s *table.Table, cells []table.Cells) [][]byte {
	out := make([][]byte, len(cells))
	for i := range cells {
		l, err := s.Read("p", []string{"x"}, cells[i].Samples)
		require.NoError(b, err)
		out[i] = s.Bytes(l.Columns()[0].Runs[0].Block)
		l.Release()
	}
	return out
}

// plainFile is what a program without a tier does.
type plainFile struct {
	dir  string
	size int64
	sync bool
	to   []byte
}

func (p *plainFile) run(b *testing.B, from [][]byte) (took [2]spent) {
	warm(b, p.dir, from[0], benchTotal)
	f, err := os.Create(filepath.Join(p.dir, "plain"))
	require.NoError(b, err)
	took[0] = timed(b, func() {
		for i, data := range from {
			_, err := f.WriteAt(data, int64(i)*p.size)
			require.NoError(b, err)
			if p.sync {
				require.NoError(b, unix.Fdatasync(int(f.Fd())))
			}
		}
	})
	if p.sync {
		forget(b, p.dir)
	}
	took[1] = timed(b, func() {
		for i := range from {
			at := int64(i) * p.size
			_, err := f.ReadAt(p.to[at:at+p.size], at)
			require.NoError(b, err)
		}
	})
	require.NoError(b, f.Close())
	require.NoError(b, os.Remove(f.Name()))
	return took
}

// forget takes the files of a folder, which are synced, out of the page cache. In a file system in memory it does nothing.
func forget(b *testing.B, dir string) {
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(b, err)
	for _, name := range names {
		f, err := os.Open(name)
		require.NoError(b, err)
		require.NoError(b, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		require.NoError(b, f.Close())
	}
}

func spillAndRead(b *testing.B, s *table.Table, t *Tier, cells []table.Cells, cold bool) (took [2]spent) {
	took[0] = timed(b, func() {
		for i := range cells {
			_, err := s.Move(cells[i:i+1], table.ToDisk, 0)
			require.NoError(b, err)
			if cold {
				require.NoError(b, t.Sync())
			}
		}
	})
	if cold {
		forget(b, t.opts.Dir)
	}
	leases := make([]store.Lease, len(cells))
	took[1] = timed(b, func() {
		for i := range cells {
			l, err := s.Read("p", []string{"x"}, cells[i].Samples)
			require.NoError(b, err)
			leases[i] = l
		}
	})
	for i, l := range leases {
		l.Release()
		s.Delete("p", []string{"x"}, cells[i].Samples)
	}
	require.NoError(b, t.Sync())
	return took
}

// BenchmarkSmallValues spills 100,000 values of 4 KiB in steps, reads them at random in batches, and opens the folder of a
// killed process with as many.
func BenchmarkSmallValues(b *testing.B) {
	const count, size, rounds = 100_000, 4 << 10, 7
	var out, in pairs
	var opened []float64
	for b.Loop() {
		for i := range rounds + 1 {
			dir := benchFolder(b)
			var plain, ours [2]spent
			var open spent
			if i%2 == 0 { // who is first gets other pages
				plain = plainSmall(b, dir, count, size)
			}
			ours, open = smallValues(b, filepath.Join(dir, "tier"), count, size)
			if i%2 == 1 {
				plain = plainSmall(b, dir, count, size)
			}
			require.NoError(b, os.RemoveAll(dir))
			if i > 0 { // the first has pages that nobody has touched yet
				out.add(plain[0], ours[0])
				in.add(plain[1], ours[1])
				opened = append(opened, open.wall.Seconds())
			}
		}
	}
	out.report(b, "spill", count*size)
	in.report(b, "read", count*size)
	b.ReportMetric(median(opened), "open-s")
}

func smallValues(b *testing.B, dir string, count int, size int64) (took [2]spent, opened spent) {
	a := memory(b)
	defer func() { _ = a.Close() }()
	tier, err := Open(Options{Dir: dir, Durability: Relaxed})
	require.NoError(b, err)
	s := table.New(table.Options{Memory: a, Disk: tier, Threshold: 1 << 40})
	tier.Attach(s)
	cells := fillTable(b, s, count, size)
	warm(b, filepath.Dir(dir), make([]byte, 1<<20), int64(count)*size)
	took[0] = timed(b, func() {
		for at := 0; at < count; at += 2000 {
			_, err := s.Move(cells[at:at+2000], table.ToDisk, 0)
			require.NoError(b, err)
		}
	})
	took[1] = timed(b, func() {
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
	})
	tier.closeFiles()
	require.NoError(b, tier.lock.Close())
	var again *Store
	opened = timed(b, func() {
		again, err = OpenStore(Options{Dir: dir, Durability: Relaxed}, a, 0)
		require.NoError(b, err)
	})
	require.Equal(b, int64(count), again.Stats().Cells)
	require.NoError(b, again.Close())
	require.NoError(b, os.RemoveAll(dir))
	return took, opened
}

// plainSmall writes in batches of 2000 values, which lie one behind the other, and reads value by value at random.
func plainSmall(b *testing.B, dir string, count int, size int64) (took [2]spent) {
	a := memory(b)
	defer func() { _ = a.Close() }()
	block, err := a.Alloc(int64(count) * size)
	require.NoError(b, err)
	values := a.Bytes(block.Segment, block.Offset, block.Size)
	for i := range values {
		values[i] = byte(i)
	}
	warm(b, dir, values[:1<<20], block.Size)
	f, err := os.Create(filepath.Join(dir, "plain"))
	require.NoError(b, err)
	took[0] = timed(b, func() {
		for from := int64(0); from < block.Size; from += 2000 * size {
			_, err := f.WriteAt(values[from:from+2000*size], from)
			require.NoError(b, err)
		}
	})
	order := rand.Perm(count)
	took[1] = timed(b, func() {
		for i, k := range order {
			to := int64(i%1000) * size
			_, err := f.ReadAt(values[to:to+size], int64(k)*size)
			require.NoError(b, err)
		}
	})
	require.NoError(b, f.Close())
	require.NoError(b, os.Remove(f.Name()))
	return took
}
