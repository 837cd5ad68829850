// Package arena is the shared memory of one unit: where cells lie, and how a client on the same host reaches them.
//
// Memory comes in segments. A segment is a sealed memfd, as large as the machine's memory and almost all of it a hole, that
// the unit and its local clients map; it costs nothing until pages of it are touched. Alloc hands out byte ranges, Free
// takes back any part of one, to the byte: the rows of a column lie tightly and are freed one by one.
//
// Every byte of a segment is in one of four states:
//
//	allocated   handed out by Alloc
//	warm        free, on a page that may be resident
//	punching    free, on a page that is being returned to the system right now
//	cold        free, on a whole page that is a hole: never touched, or returned
//
//	cold --Alloc--> allocated --Free--> warm --Alloc--> allocated
//	                                    warm --Run--> punching --> cold
//
// Cold ranges consist of whole pages, so they say page by page what is not resident, and everything else counts as
// resident. Touching a hole costs ten times a copy; therefore Alloc prefers warm memory, and Run returns pages only when
// they have not been wanted for a while. Both kinds prefer low addresses, which keeps memory compact.
//
// Locks: Arena.io, held by Run around system calls, comes before Arena.mu, which guards the ranges and is never held
// across a call that touches pages. The package runs on Linux only.
package arena

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
)

const (
	pageSize     = 4096
	pageMask     = pageSize - 1
	smallAlign   = 64       // alignment below pageAlignMin: a cache line, and enough for every dtype
	pageAlignMin = 64 << 10 // allocations from here on start on a page, so that a reader can map them

	minSegment   = 1 << 30
	segmentShift = 48 // an address in the ranges is segment<<segmentShift | offset
	offsetMask   = 1<<segmentShift - 1
	maxSegments  = 1 << (64 - segmentShift)
)

// Block is an allocated byte range of one segment.
type Block struct {
	Segment uint32
	Offset  int64
	Size    int64
}

func (b Block) span() span {
	return span{uint64(b.Segment)<<segmentShift | uint64(b.Offset), uint64(b.Size)}
}

func blockOf(s span) Block {
	return Block{uint32(s.start >> segmentShift), int64(s.start & offsetMask), int64(s.size)}
}

// Options of an arena. The zero value is good for a unit.
type Options struct {
	// SegmentBytes is the size of a segment; 0 means the next power of two above the machine's memory, at least 1 GiB.
	// It is address space, not memory. Larger values get a segment of their own.
	SegmentBytes int64
	// PopulateAhead lets Run allocate the pages of a large block while its writer fills it from the front. It helps where a
	// second core is idle and page faults are cheap, and costs a core otherwise; see Mapping.Write for the other way.
	PopulateAhead bool
	// Folder makes the segments files without a name in it instead of memory.
	Folder string
}

// Arena is the memory of one unit. All methods may be called from any goroutine.
type Arena struct {
	segmentBytes  int64
	populateAhead bool
	folder        string
	segments      atomic.Pointer[[]*segment] // grows under mu, read without it
	wake          chan struct{}              // has room for one: Run has something new to look at
	io            sync.Mutex
	mu            struct {
		sync.Mutex
		warm, cold ranges
		used       int64
		total      int64
		closed     bool
		sweeper    sweeper
		populate   []span
	}
}

// Stats counts bytes of an arena.
type Stats struct {
	Used     int64 // allocated, to the byte
	Resident int64 // on pages that may be resident: Used, warm free memory, and what rounding to pages adds
	Warm     int64 // free and reusable without a page fault
	Mapped   int64 // address space of all segments
	Segments int
	Ranges   int // free ranges, a measure of fragmentation
}

// New makes an arena with one segment. ResourceExhausted means that not even the smallest could be mapped.
func New(o Options) (*Arena, error) {
	a := &Arena{segmentBytes: o.SegmentBytes, populateAhead: o.PopulateAhead, folder: o.Folder, wake: make(chan struct{}, 1)}
	if a.segmentBytes <= 0 {
		a.segmentBytes = defaultSegment()
	}
	a.segmentBytes = int64(roundUp(uint64(a.segmentBytes), pageSize))
	a.segments.Store(&[]*segment{})
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.growLocked(pageSize); err != nil {
		return nil, err
	}
	return a, nil
}

// defaultSegment is the next power of two that all of the machine's memory fits in.
func defaultSegment() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return minSegment
	}
	ram := uint64(info.Totalram) * uint64(info.Unit)
	return max(minSegment, int64(1)<<min(bits.Len64(ram-1), segmentShift-1))
}

func roundUp(n, align uint64) uint64 { return (n + align - 1) &^ (align - 1) }

// Alloc reserves size bytes. Blocks of 64 KiB and more start on a page, others on 64 bytes; size 0 gives the zero block.
// The contents are arbitrary. ResourceExhausted means that the system refuses another segment.
func (a *Arena) Alloc(size int64) (Block, error) {
	if size == 0 {
		return Block{}, nil
	}
	if size < 0 || size > offsetMask-pageSize {
		return Block{}, tqerr.New(tqerr.InvalidArgument, "unit memory: allocation of %d bytes", size)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return Block{}, tqerr.New(tqerr.InvalidState, "unit memory: the arena is closed")
	}
	s, ok := a.takeLocked(uint64(size))
	if !ok {
		if err := a.growLocked(size); err != nil {
			return Block{}, err
		}
		s, _ = a.takeLocked(uint64(size))
	}
	a.mu.used += size
	return blockOf(s), nil
}

// takeLocked finds size free bytes, warm ones first.
func (a *Arena) takeLocked(size uint64) (span, bool) {
	align := uint64(smallAlign)
	if size >= pageAlignMin {
		align = pageSize
	}
	if start, ok := a.mu.warm.fit(size, align); ok {
		s := span{start, size}
		a.mu.warm.cut(s)
		a.mu.sweeper.low = min(a.mu.sweeper.low, a.mu.warm.total)
		return s, true
	}
	start, ok := a.mu.cold.fit(roundUp(size, pageSize), pageSize)
	if !ok {
		return span{}, false
	}
	s, pages := span{start, size}, span{start, roundUp(size, pageSize)}
	a.mu.cold.cut(pages)
	if rest := pages.size - size; rest > 0 {
		a.mu.warm.merge(span{s.end(), rest})
	}
	if a.populateAhead && size >= populateMin {
		a.mu.populate = append(a.mu.populate, pages)
		a.wakeRun()
	}
	return s, true
}

// growLocked adds a segment that has room for size bytes, halving the size when the system refuses.
func (a *Arena) growLocked(size int64) error {
	need := int64(roundUp(uint64(size), pageSize))
	old := *a.segments.Load()
	if len(old) == maxSegments {
		return tqerr.New(tqerr.ResourceExhausted, "unit memory: %d segments are in use", maxSegments)
	}
	for want := max(need, a.segmentBytes); ; want /= 2 {
		want = max(want, need)
		s, err := a.newSegment(want)
		if err == nil {
			a.segments.Store(ref(append(old[:len(old):len(old)], s)))
			a.mu.total += want
			a.mu.cold.merge(Block{Segment: uint32(len(old)), Size: want}.span())
			return nil
		}
		if want == need || want <= minSegment {
			return tqerr.Wrap(tqerr.ResourceExhausted, err, "unit memory: a segment of %d bytes", want)
		}
	}
}

func (a *Arena) newSegment(size int64) (*segment, error) {
	if a.folder != "" {
		return newFileSegment(a.folder, size)
	}
	return newSegment(size)
}

// Reserve takes the space of an allocated range from the file system. IO errors such as a full disk are returned as they are.
func (a *Arena) Reserve(b Block) error {
	s := (*a.segments.Load())[b.Segment]
	return retry(func() error { return unix.Fallocate(s.fd, 0, b.Offset, b.Size) })
}

// Discard gives the space of the whole pages of an allocated range back. They read as zeros then.
func (a *Arena) Discard(b Block) {
	first, last := int64(roundUp(uint64(b.Offset), pageSize)), (b.Offset+b.Size)&^pageMask
	if last > first {
		s := (*a.segments.Load())[b.Segment]
		_ = retry(func() error {
			return unix.Fallocate(s.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, first, last-first)
		})
	}
}

func ref[T any](v T) *T { return &v }

// Free gives back size bytes of an allocation, all of it or any part. It panics when a byte is free already, because the
// same bytes may have a new owner then.
func (a *Arena) Free(segment uint32, off, size int64) {
	if size == 0 {
		return
	}
	s := Block{segment, off, size}.span()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return
	}
	if segments := *a.segments.Load(); int(segment) >= len(segments) || off < 0 || size < 0 || off+size > segments[segment].size {
		panic(fmt.Sprintf("arena: free of %d bytes at %d of segment %d", size, off, segment))
	}
	if a.mu.cold.overlaps(s) {
		panic("arena: a range is freed twice")
	}
	a.mu.warm.merge(s)
	a.mu.used -= size
	a.dropPopulateLocked(s)
	a.freedLocked(s)
}

func (a *Arena) wakeRun() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Bytes is the memory of a range, which the caller has allocated. It is valid until Close.
func (a *Arena) Bytes(segment uint32, off, size int64) []byte {
	if size == 0 {
		return nil
	}
	return (*a.segments.Load())[segment].mem[off : off+size : off+size]
}

// Write copies src to an allocated range in this process's mapping; see Mapping.Write.
func (a *Arena) Write(segment uint32, off int64, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	return (*a.segments.Load())[segment].write(off, src)
}

// Read copies an allocated range into dst; see Mapping.Read.
func (a *Arena) Read(dst []byte, segment uint32, off int64) {
	if len(dst) > 0 {
		(*a.segments.Load())[segment].read(dst, off)
	}
}

// Descriptors lists the descriptors of all segments.
func (a *Arena) Descriptors() []int {
	var out []int
	for _, s := range *a.segments.Load() {
		out = append(out, s.fd)
	}
	return out
}

// Segment returns a duplicate of a segment's descriptor, which the caller closes, and the segment's size.
func (a *Arena) Segment(segment uint32) (fd int, size int64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	segments := *a.segments.Load()
	if a.mu.closed || int(segment) >= len(segments) {
		return -1, 0, tqerr.New(tqerr.NotFound, "unit memory: no segment %d", segment)
	}
	fd, err = unix.FcntlInt(uintptr(segments[segment].fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, 0, tqerr.Wrap(tqerr.IO, err, "unit memory: duplicate descriptor of segment %d", segment)
	}
	return fd, segments[segment].size, nil
}

// Stats returns current counts.
func (a *Arena) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Stats{
		Used:     a.mu.used,
		Resident: a.mu.total - int64(a.mu.cold.total),
		Warm:     int64(a.mu.warm.total),
		Mapped:   a.mu.total,
		Segments: len(*a.segments.Load()),
		Ranges:   a.mu.warm.count + a.mu.cold.count,
	}
}

// Close unmaps all segments of this process. Nothing may use memory of the arena any more; clients that have mapped a segment
// keep theirs. Run returns soon after.
func (a *Arena) Close() error {
	a.io.Lock()
	defer a.io.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return nil
	}
	a.mu.closed = true
	a.wakeRun()
	var first error
	for _, s := range *a.segments.Load() {
		if err := s.close(); err != nil && first == nil {
			first = tqerr.Wrap(tqerr.IO, err, "unit memory: unmap")
		}
	}
	return first
}
