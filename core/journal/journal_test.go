package journal_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
)

// counter is a state machine: what it was told, in order. A state of it is how many numbers there were, and their sum.
type counter struct {
	count, sum uint64
	sequences  []uint64
}

func number(n uint64) []byte { return append([]byte{'n'}, binary.LittleEndian.AppendUint64(nil, n)...) }

func (c *counter) take(sequence uint64, record []byte) error {
	n := binary.LittleEndian.Uint64(record[1:])
	switch record[0] {
	case 'n':
		c.count++
		c.sum += n
		c.sequences = append(c.sequences, sequence)
	case 'c':
		c.count = n
	case 's':
		c.sum = n
	}
	return nil
}

func (c *counter) write(put func([]byte) error) error {
	if err := put(append([]byte{'c'}, binary.LittleEndian.AppendUint64(nil, c.count)...)); err != nil {
		return err
	}
	return put(append([]byte{'s'}, binary.LittleEndian.AppendUint64(nil, c.sum)...))
}

// options are small, so that everything happens often.
func options(fs vfs.Disk, d journal.Durability) journal.Options {
	return journal.Options{Dir: "/j", Durability: d, AllocateBytes: 512, FS: fs}
}

// open opens a journal and reads it.
func open(o journal.Options) (*journal.Log, *counter, error) {
	l, err := journal.Open(o)
	if err != nil {
		return nil, nil, err
	}
	c := &counter{}
	if _, err := l.Recover(c.take); err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return l, c, nil
}

func turn(l *journal.Log, c *counter) error {
	t, err := l.Begin()
	if err != nil {
		return err
	}
	t.Switch()
	return t.Finish(c.write)
}

// begun is open and the turn that has to follow.
func begun(t *testing.T, o journal.Options) (*journal.Log, *counter) {
	l, c, err := open(o)
	require.NoError(t, err)
	require.NoError(t, turn(l, c))
	t.Cleanup(func() { _ = l.Close() })
	return l, c
}

func add(t *testing.T, l *journal.Log, c *counter, n uint64) {
	_, err := l.Append(false, number(n))
	require.NoError(t, err)
	require.NoError(t, c.take(0, number(n)))
}

func TestWhatWasAppendedComesBack(t *testing.T) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		fs := vfs.NewMem(0)
		l, c := begun(t, options(fs, d))
		last := uint64(0)
		for n := range uint64(100) {
			sequence, err := l.Append(false, number(n), number(n))
			require.NoError(t, err)
			require.Equal(t, last+1, sequence)
			last = sequence
			require.NoError(t, c.take(0, number(n)))
			require.NoError(t, c.take(0, number(n)))
			if n == 60 {
				require.True(t, l.Overgrown())
				require.NoError(t, turn(l, c))
				require.False(t, l.Overgrown())
			}
		}
		require.Equal(t, last, l.Last())
		require.NoError(t, l.Sync(last))
		require.True(t, l.Durable(last))
		require.NoError(t, l.Close())
		again, found, err := open(options(fs, d))
		require.NoError(t, err)
		require.Equal(t, [2]uint64{c.count, c.sum}, [2]uint64{found.count, found.sum})
		require.Len(t, found.sequences, 2*39, "only what came after the state is read one by one")
		require.Equal(t, last, found.sequences[77])
		_, err = again.Append(false, number(1))
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err), "before a turn nothing can be appended")
		require.NoError(t, turn(again, found))
		sequence, err := again.Append(false, number(1))
		require.NoError(t, err)
		require.Greater(t, sequence, last+1<<20, "numbers of what a power loss may have taken are not used again")
		require.NoError(t, again.Close())
	}
}

// workload does changes and turns until a call fails, and says what it was told the success of: changes that are durable.
func workload(fs vfs.Disk, d journal.Durability) (acknowledged, attempted counter, failed error) {
	l, c, err := open(options(fs, d))
	if err != nil {
		return acknowledged, attempted, err
	}
	defer func() { failed = errors.Join(failed, l.Close()) }()
	acknowledged, attempted = *c, *c
	if err := turn(l, c); err != nil {
		return acknowledged, attempted, err
	}
	for n := uint64(1); n <= 40; n++ {
		attempted = *c
		_ = attempted.take(0, number(n))
		sequence, err := l.Append(false, number(n))
		if err != nil {
			return acknowledged, attempted, err
		}
		*c = attempted
		if err := l.Sync(sequence); err != nil {
			return acknowledged, attempted, err
		}
		acknowledged = *c
		if n%10 == 0 {
			if err := turn(l, c); err != nil {
				return acknowledged, attempted, err
			}
		}
	}
	return acknowledged, attempted, nil
}

// Whatever call fails, what was acknowledged is there afterwards, and nothing that was not attempted.
func TestEveryCallCanFail(t *testing.T) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		for _, why := range []error{unix.EIO, unix.ENOSPC} {
			for at, more := 0, true; more; at++ {
				for _, forever := range []bool{false, true} {
					mem := vfs.NewMem(0)
					fs := &vfs.FailingDisk{Disk: mem, At: at, Err: why, Forever: forever}
					done, tried, err := workload(fs, d)
					if more = fs.Failed(); !more {
						require.NoError(t, err)
					}
					after := mem.Killed()
					if d == journal.Strict {
						after = mem.Crash(nil)
					}
					l, found, err := open(options(after, d))
					require.NoError(t, err, "call %d", at)
					require.Contains(t, [][2]uint64{{done.count, done.sum}, {tried.count, tried.sum}}, [2]uint64{found.count, found.sum}, "call %d", at)
					require.NoError(t, turn(l, found))
					require.NoError(t, l.Close())
				}
			}
		}
	}
}

// After a failure that passes the same log goes on: a write that has failed is tried again, a broken log is replaced.
func TestAJournalHeals(t *testing.T) {
	mem := vfs.NewMem(0)
	fs := &vfs.FailingDisk{Disk: mem, At: -1, Err: unix.EIO}
	l, c := begun(t, options(fs, journal.Strict))
	add(t, l, c, 1)
	fs.Only, fs.At, fs.Forever = "write", 0, true
	_, err := l.Append(false, number(2))
	require.Equal(t, tqerr.IO, tqerr.CodeOf(err))
	fs.Heal()
	require.NoError(t, l.Broken())
	add(t, l, c, 3)
	fs.Only, fs.At, fs.Forever = "sync", 0, true
	require.Error(t, l.Sync(l.Last()))
	fs.Heal()
	_, err = l.Append(false, number(4))
	require.Equal(t, tqerr.IO, tqerr.CodeOf(err), "an fsync that has failed is not tried again")
	require.Error(t, l.Sync(l.Last()))
	require.NoError(t, turn(l, c))
	add(t, l, c, 5)
	require.NoError(t, l.Sync(l.Last()))
	_, found, err := open(options(mem.Crash(nil), journal.Strict))
	require.NoError(t, err)
	require.Equal(t, uint64(9), found.sum)
}

// complete is a disk whose writes of a number fail when they have written everything.
type complete struct {
	vfs.Disk
	fails int // so many writes from now
}

func (d *complete) Create(name string) (vfs.DiskFile, error) {
	f, err := d.Disk.Create(name)
	return completeFile{f, d}, err
}

type completeFile struct {
	vfs.DiskFile
	d *complete
}

func (f completeFile) WriteAt(p []byte, off int64) (int, error) {
	n, err := f.DiskFile.WriteAt(p, off)
	if f.d.fails > 0 {
		f.d.fails--
		return n, unix.EIO
	}
	return n, err
}

// A change that was refused does not count, whatever was written of it. Where that is not certain Append says so.
func TestWhatWasRefusedDoesNotCount(t *testing.T) {
	for fails, want := range map[int]uint64{1: 1, 2: 1 + 2} {
		mem := vfs.NewMem(0)
		fs := &complete{Disk: mem}
		l, c := begun(t, options(fs, journal.Relaxed))
		add(t, l, c, 1)
		fs.fails = fails
		sequence, err := l.Append(false, number(2))
		require.Equal(t, tqerr.IO, tqerr.CodeOf(err))
		require.Equal(t, fails > 1, sequence > 0)
		_, found, err := open(options(mem.Killed(), journal.Relaxed))
		require.NoError(t, err)
		require.LessOrEqual(t, found.sum, want)
		require.NoError(t, l.Broken())
		add(t, l, c, 4)
		_, found, err = open(options(mem.Killed(), journal.Relaxed))
		require.NoError(t, err)
		require.EqualValues(t, 5, found.sum)
	}
}

// What an fsync has failed for is not durable after the next one: only a state that has it may take its place.
func TestAFailedSyncIsHealedByANewerStateOnly(t *testing.T) {
	for older, fails := range map[bool]int{true: 0, false: 1} {
		mem := vfs.NewMem(0)
		fs := &vfs.FailingDisk{Disk: mem, At: -1, Err: unix.EIO, Only: "sync"}
		l, c := begun(t, options(fs, journal.Strict))
		add(t, l, c, 1)
		turned, err := l.Begin()
		require.NoError(t, err)
		turned.Switch()
		state := *c
		add(t, l, c, 2)
		fs.FailNext(fails) // of the log before the turn, or of that behind it
		require.Equal(t, tqerr.IO, tqerr.CodeOf(l.Sync(l.Last())))
		require.True(t, fs.Failed())
		require.Error(t, l.Broken())
		require.NoError(t, turned.Finish(state.write))
		require.Equal(t, older, l.Broken() == nil)
		if !older {
			require.Error(t, l.Sync(l.Last()))
			require.False(t, l.Durable(l.Last()))
			require.NoError(t, turn(l, c))
		}
		add(t, l, c, 4)
		require.NoError(t, l.Sync(l.Last()))
		_, found, err := open(options(mem.Crash(nil), journal.Strict))
		require.NoError(t, err)
		require.EqualValues(t, 7, found.sum)
	}
}

// With strict durability a power loss takes nothing that Sync has returned for, whatever else reached the disk by chance.
func TestPowerLoss(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		fs := vfs.NewMem(0)
		l, c := begun(t, options(fs, journal.Strict))
		sums := map[uint64]bool{0: true} // after each change
		synced := uint64(0)
		for range 20 + rnd.IntN(60) {
			switch rnd.IntN(12) {
			case 0:
				require.NoError(t, l.Sync(l.Last()))
				synced = c.sum
			case 1:
				require.NoError(t, turn(l, c))
				synced = c.sum
			case 2: // a turn whose state is never finished
				turned, err := l.Begin()
				require.NoError(t, err)
				turned.Switch()
			default:
				add(t, l, c, 1+rnd.Uint64N(1000))
				sums[c.sum] = true
			}
		}
		_, found, err := open(options(fs.Crash(rnd), journal.Strict))
		require.NoError(t, err, "seed %d", seed)
		require.GreaterOrEqual(t, found.sum, synced, "seed %d", seed)
		require.True(t, sums[found.sum], "seed %d: %d is the sum after no change", seed, found.sum)
	}
}

// files gives the bytes of a journal with two logs' worth of changes, the first half of them in a state.
func files(t *testing.T, d journal.Durability) (fs *vfs.Mem, logFile, stateFile string, sum uint64) {
	fs = vfs.NewMem(0)
	l, c := begun(t, options(fs, d))
	for n := range uint64(20) {
		add(t, l, c, n)
	}
	require.NoError(t, turn(l, c))
	for n := range uint64(20) {
		add(t, l, c, n)
		require.NoError(t, l.Sync(l.Last()))
	}
	require.NoError(t, l.Close())
	return fs.Killed(), "/j/log-00000002", "/j/state-00000002", c.sum
}

func read(t *testing.T, fs vfs.Disk, path string) []byte {
	f, err := fs.Open(path)
	require.NoError(t, err)
	size, err := f.Size()
	require.NoError(t, err)
	data := make([]byte, size)
	_, err = f.ReadAt(data, 0)
	require.NoError(t, err)
	return data
}

func write(t *testing.T, fs vfs.Disk, path string, data []byte) {
	_ = fs.Remove(path)
	f, err := fs.Create(path)
	require.NoError(t, err)
	_, err = f.WriteAt(data, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// used is the part of a log that has frames. The last record is a small number, which ends in zeros.
func used(data []byte) int {
	n := len(data)
	for n > 0 && data[n-1] == 0 {
		n--
	}
	return n + 7
}

// A log that was cut off gives what is before the cut, whatever the place.
func TestTornTails(t *testing.T) {
	fs, log, _, sum := files(t, journal.Relaxed)
	whole := read(t, fs, log)
	end := used(whole)
	last := map[string]uint64{} // bytes of a frame that are zero are as good as written
	for cut := 64; cut <= end; cut++ {
		for _, rest := range []string{"", "zeros", "garbage"} {
			torn := append([]byte{}, whole[:cut]...)
			switch rest {
			case "zeros":
				torn = append(torn, make([]byte, 100)...)
			case "garbage":
				torn = append(torn, "TQj\x01 is no frame"...)
			}
			write(t, fs, log, torn)
			l, found, err := open(options(fs, journal.Relaxed))
			if rest == "garbage" && err != nil { // it fills the frame up, which is not torn then
				require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
				require.ErrorContains(t, err, "is damaged, at byte")
				require.Equal(t, torn, read(t, fs, log))
				continue
			}
			require.NoError(t, err, "cut at %d, %s", cut, rest)
			require.GreaterOrEqual(t, found.sum, last[rest])
			last[rest] = found.sum
			require.NoError(t, l.Close())
		}
	}
	require.Equal(t, map[string]uint64{"": sum, "zeros": sum, "garbage": sum}, last)
}

// A bit that has changed in the last frame, behind which nothing says that it was whole, is damage all the same when all of the frame
// is there: it names the file and the place, and nothing is changed. A frame whose end is missing is torn.
func TestADamagedTailIsToldFromATornOne(t *testing.T) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		fs := vfs.NewMem(0)
		l, c := begun(t, options(fs, d))
		add(t, l, c, 1)
		before := c.sum
		add(t, l, c, 0x0101010101010101) // which does not end in zeros
		require.NoError(t, l.Close())
		const log = "/j/log-00000001"
		whole := read(t, fs, log)
		begin, end, slipped := bytes.LastIndex(whole, []byte("TQj\x01")), len(bytes.TrimRight(whole, "\x00")), 0
		for at := begin; at < end; at++ {
			torn, bad := bytes.Clone(whole), bytes.Clone(whole)
			clear(torn[at:])
			write(t, fs, log, torn)
			l, found, err := open(options(fs, d))
			require.NoError(t, err, "cut at %d", at)
			require.Equal(t, before, found.sum)
			require.NoError(t, l.Close())

			bad[at] ^= 1 << (at % 8)
			write(t, fs, log, bad)
			if l, found, err = open(options(fs, d)); err == nil {
				slipped++
				require.Equal(t, before, found.sum)
				require.NoError(t, l.Close())
				continue
			}
			require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
			require.ErrorContains(t, err, fmt.Sprintf("log-00000001: change 2 is damaged, at byte %d", begin))
			require.Equal(t, bad, read(t, fs, log))
		}
		require.LessOrEqual(t, slipped, 4, "it is longer than what is there")
	}
}

// A bit that has changed anywhere is found, but in what may be a torn tail, and changes nothing.
func TestFlippedBits(t *testing.T) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		fs, log, state, sum := files(t, d)
		for _, path := range []string{log, state} {
			whole := read(t, fs, path)
			end := len(whole)
			if path == log {
				end = used(whole)
			}
			for at := range end {
				bad := append([]byte{}, whole...)
				bad[at] ^= 1 << (at % 8)
				write(t, fs, path, bad)
				l, found, err := open(options(fs, d))
				if err == nil { // in the last frame
					require.Equal(t, log, path)
					require.Equal(t, sum-19, found.sum, "bit of byte %d of %s", at, path)
					require.Greater(t, at, end-60)
					require.NoError(t, l.Close())
					continue
				}
				require.Contains(t, []tqerr.Code{tqerr.Corruption, tqerr.VersionMismatch}, tqerr.CodeOf(err), "byte %d of %s: %v", at, path, err)
				require.ErrorContains(t, err, filepath.Base(path))
				require.Equal(t, bad, read(t, fs, path))
			}
			write(t, fs, path, whole)
		}
	}
}

// What is not of this journal, or of a newer program, is refused and left as it is.
func TestStrangeFolders(t *testing.T) {
	newer := func(data []byte) []byte {
		data[10] = 2
		return withSum(data)
	}
	cases := map[string]struct {
		change func(fs vfs.Disk, log, state string)
		code   tqerr.Code
		names  string
	}{
		"a foreign file": {func(fs vfs.Disk, _, _ string) { write(t, fs, "/j/notes.txt", []byte("mine")) }, tqerr.AlreadyExists, "notes.txt"},
		"a newer log":    {func(fs vfs.Disk, log, _ string) { write(t, fs, log, newer(read(t, fs, log))) }, tqerr.VersionMismatch, "log-00000002"},
		"a newer state":  {func(fs vfs.Disk, _, state string) { write(t, fs, state, newer(read(t, fs, state))) }, tqerr.VersionMismatch, "state-00000002"},
		"an empty log":   {func(fs vfs.Disk, log, _ string) { write(t, fs, log, nil) }, tqerr.Corruption, "log-00000002"},
		"an empty state": {func(fs vfs.Disk, _, state string) { write(t, fs, state, nil) }, tqerr.Corruption, "state-00000002"},
		"a short state":  {func(fs vfs.Disk, _, state string) { write(t, fs, state, read(t, fs, state)[:100]) }, tqerr.Corruption, "state-00000002"},
		"a longer state": {func(fs vfs.Disk, _, state string) { write(t, fs, state, append(read(t, fs, state), 1)) }, tqerr.Corruption, "state-00000002"},
		"no log":         {func(fs vfs.Disk, log, _ string) { require.NoError(t, fs.Remove(log)) }, tqerr.Corruption, "log-00000002"},
		"no state":       {func(fs vfs.Disk, _, state string) { require.NoError(t, fs.Remove(state)) }, tqerr.Corruption, "log-00000001"},
		"another's state": {func(fs vfs.Disk, _, state string) {
			other, _, s, _ := files(t, journal.Relaxed)
			write(t, fs, state, read(t, other, s))
		}, tqerr.Corruption, "log-00000002"},
		"a log as a state":  {func(fs vfs.Disk, log, state string) { write(t, fs, state, read(t, fs, log)) }, tqerr.Corruption, "state-00000002"},
		"a log of a number": {func(fs vfs.Disk, log, _ string) { write(t, fs, "/j/log-00000003", read(t, fs, log)) }, tqerr.Corruption, "log-00000003"},
		"a gap":             {func(fs vfs.Disk, log, _ string) { write(t, fs, "/j/log-00000004", read(t, fs, log)) }, tqerr.Corruption, "log-00000003"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			fs, log, state, _ := files(t, journal.Relaxed)
			c.change(fs, log, state)
			before, err := fs.List("/j")
			require.NoError(t, err)
			_, _, err = open(options(fs, journal.Relaxed))
			require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, c.names)
			after, err := fs.List("/j")
			require.NoError(t, err)
			require.ElementsMatch(t, before, after)
		})
	}
}

// withSum writes the checksum of a header anew.
func withSum(data []byte) []byte {
	binary.LittleEndian.PutUint32(data[60:], journal.Sum(data[:60]))
	return data
}

// A frame that is missing from the middle is found, also when the bytes where it was are zero.
func TestAHoleIsNoTail(t *testing.T) {
	fs, log, _, _ := files(t, journal.Strict)
	data := read(t, fs, log)
	for i := 64; i < 64+38; i++ {
		data[i] = 0
	}
	write(t, fs, log, data)
	_, _, err := open(options(fs, journal.Strict))
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "log-00000002")
}

func TestOneAtATime(t *testing.T) {
	fs := vfs.NewMem(0)
	begun(t, options(fs, journal.Relaxed))
	_, err := journal.Open(options(fs, journal.Relaxed))
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "in use")
}

// A full disk takes no change but what frees something, for which space was kept; and everything again when there is room.
func TestAFullDisk(t *testing.T) {
	fs := vfs.NewMem(32 << 10)
	o := options(fs, journal.Relaxed)
	o.AllocateBytes = 8 << 10
	l, c := begun(t, o)
	fs.Resize(fs.Used())
	var err error
	for n := uint64(0); err == nil; n++ {
		if _, err = l.Append(false, number(n)); err == nil {
			require.NoError(t, c.take(0, number(n)))
		}
	}
	require.Equal(t, tqerr.IO, tqerr.CodeOf(err))
	require.ErrorIs(t, err, unix.ENOSPC)
	for n := range uint64(50) {
		_, err := l.Append(true, number(n))
		require.NoError(t, err)
		require.NoError(t, c.take(0, number(n)))
	}
	fs.Resize(1 << 20)
	add(t, l, c, 1)
	_, found, err := open(options(fs.Killed(), journal.Relaxed))
	require.NoError(t, err)
	require.Equal(t, c.sum, found.sum)
}

// Many that sync at the same time share what they wait for, while turns happen.
func TestGroupCommit(t *testing.T) {
	fs := vfs.NewMem(0)
	l, c := begun(t, options(fs, journal.Strict))
	var all sync.WaitGroup
	var mu sync.Mutex
	for g := range uint64(8) {
		all.Add(1)
		go func() {
			defer all.Done()
			for n := range uint64(50) {
				mu.Lock()
				sequence, err := l.Append(false, number(g*n))
				_ = c.take(0, number(g*n))
				mu.Unlock()
				if err != nil || l.Sync(sequence) != nil {
					t.Errorf("change %d failed", sequence)
				}
			}
		}()
	}
	for range 10 {
		next, err := l.Begin()
		require.NoError(t, err)
		mu.Lock()
		next.Switch()
		state := *c
		mu.Unlock()
		require.NoError(t, next.Finish(state.write))
	}
	all.Wait()
	_, found, err := open(options(fs.Crash(nil), journal.Strict))
	require.NoError(t, err)
	require.Equal(t, [2]uint64{c.count, c.sum}, [2]uint64{found.count, found.sum})
}

// A journal that has ended leaves nothing, also when the process died before it was removed.
func TestTheEnd(t *testing.T) {
	fs := vfs.NewMem(0)
	l, c := begun(t, options(fs, journal.Relaxed))
	add(t, l, c, 1)
	require.NoError(t, l.End())
	killed := fs.Killed()
	require.NoError(t, l.Close())
	names, err := fs.List("/j")
	require.NoError(t, err)
	require.Empty(t, names)
	again, found, err := open(options(killed, journal.Relaxed))
	require.NoError(t, err)
	require.Zero(t, found.count)
	require.NoError(t, again.Close())
}

// The format does not change: what was written once is readable for ever.
func TestGolden(t *testing.T) {
	dir := t.TempDir()
	names, err := filepath.Glob("testdata/v1/*")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	for _, name := range names {
		data, err := os.ReadFile(name)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(name)), data, 0o600))
	}
	l, found, err := open(journal.Options{Dir: dir, Durability: journal.Strict})
	require.NoError(t, err)
	require.Equal(t, [2]uint64{7, 28}, [2]uint64{found.count, found.sum})
	require.NoError(t, turn(l, found))
	require.NoError(t, l.Close())
}

// TestWriteGolden writes the files of TestGolden, when asked to, for a new version of the format.
func TestWriteGolden(t *testing.T) {
	dir := os.Getenv("JOURNAL_GOLDEN")
	if dir == "" {
		t.Skip("no test: it writes the golden files of a new format into the folder that JOURNAL_GOLDEN names")
	}
	l, c := begun(t, journal.Options{Dir: dir, Durability: journal.Strict, AllocateBytes: 64})
	for n := uint64(1); n <= 7; n++ {
		add(t, l, c, n)
		if n == 4 {
			require.NoError(t, turn(l, c))
		}
	}
	require.NoError(t, l.Close())
	require.NoError(t, os.Remove(filepath.Join(dir, "lock")))
}

func BenchmarkAppend(b *testing.B) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		for _, size := range []int{200, 20000} {
			b.Run(fmt.Sprintf("%d/%d", d, size), func(b *testing.B) {
				l, err := journal.Open(journal.Options{Dir: b.TempDir(), Durability: d})
				require.NoError(b, err)
				c := &counter{}
				_, err = l.Recover(c.take)
				require.NoError(b, err)
				require.NoError(b, turn(l, c))
				record := make([]byte, size)
				b.SetBytes(int64(size))
				for b.Loop() {
					sequence, err := l.Append(false, record)
					if err != nil || l.Sync(sequence) != nil {
						b.Fatal("cannot append")
					}
				}
				require.NoError(b, l.Close())
			})
		}
	}
}
