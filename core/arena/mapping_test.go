package arena

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
)

// mapOf maps a segment as a client in another process would.
func mapOf(t testing.TB, a *Arena, segment uint32) *Mapping {
	t.Helper()
	fd, size, err := a.Segment(segment)
	require.NoError(t, err)
	m, err := Map(fd, size)
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

func TestSharedMappingIsTheUnitsMemory(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, 100)
	copy(m.Shared()[b.Offset:], "from the client")
	require.Equal(t, "from the client", string(a.Bytes(0, b.Offset, 15)))
	free(a, b)
}

// TestWriteAndReadInEveryPageState goes through holes, pages that only the other side touched, and mapped pages.
func TestWriteAndReadInEveryPageState(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, 9*mib)
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int64{0, 1, 1000, windowMin, 300_001, 5*mib + 7} {
		for _, shift := range []int64{0, 1, 4095, windowStep - 100} {
			src := make([]byte, size)
			for i := range src {
				src[i] = byte(rnd.Uint32())
			}
			off := b.Offset + shift
			fill(a, Block{0, off, size + 1}, 0xEE)
			for _, state := range []string{"resident", "hole", "mapped"} {
				if state == "hole" {
					require.NoError(t, unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, b.Offset, b.Size))
					require.Zero(t, resident(t, a))
				}
				require.NoError(t, m.Write(off, src))
				require.True(t, bytes.Equal(src, a.Bytes(0, off, size)), "%s, %d bytes at +%d", state, size, shift)
				got := make([]byte, size)
				m.Read(got, off)
				require.True(t, bytes.Equal(src, got), "%s, %d bytes at +%d", state, size, shift)
				if state == "resident" {
					require.Equal(t, byte(0xEE), a.Bytes(0, off+size, 1)[0])
				}
			}
		}
	}
	free(a, b)
}

func TestPageStates(t *testing.T) {
	if pagemap() < 0 {
		t.Skip("no /proc/self/pagemap, which alone tells in what state pages are")
	}
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, mib)
	require.Equal(t, absent, m.state(b.Offset))
	require.NoError(t, m.Write(b.Offset, make([]byte, b.Size)))
	require.Equal(t, unmapped, m.state(b.Offset), "a hole is filled without faults")
	require.NoError(t, m.Write(b.Offset, make([]byte, b.Size)))
	require.Equal(t, mapped, m.state(b.Offset+b.Size-1), "the second time it is mapped")
	require.Equal(t, unmapped, (*a.segments.Load())[0].state(b.Offset), "every process has its own page tables")
	require.NoError(t, unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, b.Offset, b.Size))
	require.Equal(t, absent, m.state(b.Offset))
	free(a, b)
}

func TestViewIsWritableAndIndependent(t *testing.T) {
	pagemap() // stays open
	leaktest.Check(t)
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, 3*pageSize+10)
	fill(a, b, 1)
	view, ok := m.Lease(b.Offset, b.Size)
	require.True(t, ok)
	require.Equal(t, 1, m.Leases())
	require.Equal(t, bytes.Repeat([]byte{1}, int(b.Size)), view)
	for i := range view[:2*pageSize] {
		view[i] = 9
	}
	require.Equal(t, byte(1), a.Bytes(0, b.Offset, 1)[0], "a reader's write stays with the reader")
	require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(m.Close()), "closing would pull the view away")

	m.EndLease(b.Offset, b.Size)
	fill(a, b, 2)
	view, ok = m.Lease(b.Offset, b.Size)
	require.True(t, ok)
	require.Equal(t, bytes.Repeat([]byte{2}, int(b.Size)), view, "a new view shows the unit's bytes")
	m.EndLease(b.Offset, b.Size)
	free(a, b)
}

func TestLeasesNeverShareAPage(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	_, ok := m.Lease(10*pageSize+100, 3*pageSize)
	require.True(t, ok)
	for name, r := range map[string][2]int64{
		"same": {10*pageSize + 100, 3 * pageSize}, "first page": {10 * pageSize, 1}, "last page": {14*pageSize - 1, 1},
		"inside": {11 * pageSize, 10}, "around": {0, 20 * pageSize}, "end": {9 * pageSize, pageSize + 1},
	} {
		_, ok := m.Lease(r[0], r[1])
		require.False(t, ok, name)
	}
	_, ok = m.Lease(9*pageSize, pageSize)
	require.True(t, ok)
	_, ok = m.Lease(14*pageSize, pageSize)
	require.True(t, ok)
	data, ok := m.Lease(11*pageSize, 0)
	require.True(t, ok, "nothing is always free")
	require.Empty(t, data)
	m.EndLease(11*pageSize, 0)
	m.EndLease(10*pageSize, 3*pageSize) // not what was lent
	require.Equal(t, 3, m.Leases())
	m.EndLease(10*pageSize+100, 3*pageSize)
	m.EndLease(9*pageSize, pageSize)
	m.EndLease(14*pageSize, pageSize)
	require.Zero(t, m.Leases())
}

// TestManyLeases lends random ranges of a segment whose unit keeps changing what is not lent, while readers write.
func TestManyLeases(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	const pages = 256
	b := alloc(t, a, pages*pageSize)
	unit := a.Bytes(0, b.Offset, b.Size)
	type view struct {
		at         int
		data, want []byte
	}
	var views []view
	lent, copied := 0, 0
	end := func(i int) {
		v := views[i]
		require.True(t, bytes.Equal(v.want, v.data), "a view changed under its reader, seed %d", seed)
		m.EndLease(b.Offset+int64(v.at), int64(len(v.data)))
		views = append(views[:i], views[i+1:]...)
		for j := range v.data { // the pin is over: the unit uses the memory again
			unit[v.at+j] = byte(rnd.Uint32())
		}
	}
	for range 3000 {
		for len(views) > 20 {
			end(rnd.IntN(len(views)))
		}
		at := rnd.IntN(len(unit) - 1)
		size := 1 + rnd.IntN(min(len(unit)-at, 6*pageSize))
		data, ok := m.Lease(b.Offset+int64(at), int64(size))
		if !ok {
			copied++
			continue
		}
		lent++
		require.True(t, bytes.Equal(unit[at:at+size], data), "a view shows something else than the unit, seed %d", seed)
		before := bytes.Clone(unit[at : at+size])
		for range rnd.IntN(4) {
			data[rnd.IntN(size)] ^= 0x55
		}
		require.True(t, bytes.Equal(before, unit[at:at+size]), "a reader's write reached the unit, seed %d", seed)
		views = append(views, view{at, data, bytes.Clone(data)})
	}
	for len(views) > 0 {
		end(0)
	}
	require.Greater(t, lent, 500)
	require.Greater(t, copied, 500)
	for i := range m.mu.sides {
		require.NoError(t, m.mu.sides[i].leased.check())
		require.NoError(t, m.mu.sides[i].ending.check())
	}
	free(a, b)
}

func TestEndLeaseKeepsPagesThatWereOnlyRead(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, 64*pageSize)
	fill(a, b, 1)
	view, ok := m.Lease(b.Offset, b.Size)
	require.True(t, ok)
	sum := byte(0)
	for i := 0; i < len(view); i += pageSize {
		sum += view[i]
	}
	require.Equal(t, byte(64), sum)
	view[20*pageSize] = 2
	m.EndLease(b.Offset, b.Size)
	var entries [64]uint64
	if !readPagemap(m.mu.sides[0].mem, b.Offset/pageSize, entries[:]) {
		t.Skip("no /proc/self/pagemap, which alone tells in what state pages are")
	}
	for i, entry := range entries {
		require.Equal(t, i != 20, entry&pagemapPresent != 0, "page %d", i)
	}
	free(a, b)
}

// Whoever asks for pages whose lease has just ended does not wait until what its reader wrote is dropped.
func TestViewOfPagesWhoseLeaseEnds(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	m := mapOf(t, a, 0)
	b := alloc(t, a, 4*pageSize)
	fill(a, b, 1)
	lease := func(off, size int64) []byte {
		view, ok := m.Lease(off, size)
		require.True(t, ok)
		require.Equal(t, bytes.Repeat([]byte{1}, int(size)), view)
		view[0] = 9
		return view
	}
	first := lease(b.Offset, b.Size)
	finishFirst := m.StartEnd(b.Offset, b.Size)
	second := lease(b.Offset, b.Size)
	require.NotSame(t, &first[0], &second[0])
	_, ok := m.Lease(b.Offset+pageSize, 1)
	require.False(t, ok, "the second side has lent it")
	finishFirst()
	_, ok = m.Lease(b.Offset+pageSize, 1)
	require.False(t, ok, "the first side does not lend it meanwhile")
	require.Equal(t, byte(9), second[0])

	finishSecond := m.StartEnd(b.Offset, b.Size)
	third := lease(b.Offset, b.Size)
	require.Same(t, &first[0], &third[0], "the side whose pages are mapped")
	finishThird := m.StartEnd(b.Offset, b.Size)
	require.Equal(t, 2, m.Leases())
	got := make(chan []byte)
	go func() {
		view, _ := m.Lease(b.Offset, b.Size)
		got <- view
	}()
	finishSecond() // of the two sides that end the one that is free first
	fourth := <-got
	require.Same(t, &second[0], &fourth[0])
	require.Equal(t, bytes.Repeat([]byte{1}, int(b.Size)), fourth, "what the second wrote is dropped")
	finishThird()
	m.EndLease(b.Offset, b.Size)
	require.Zero(t, m.Leases())
	free(a, b)
}
