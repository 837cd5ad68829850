package arena

import (
	"sync"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
)

// Mapping is a client's view of one segment of a unit on the same host: a shared one, through which it writes what it puts
// and copies what it gets, and a private one, out of which it lends views without a copy. A second private one, made when it is
// first needed, lends pages whose lease in the first has ended so lately that what its reader wrote is not dropped yet.
//
// A view is a writable part of the private mapping. What a reader writes there goes to pages of its own and never reaches
// the unit; a page it has not written shows the unit's, so the lease of its read must last as long as the view. Two views
// never share a page, else one would see the other's writes; whoever asks second copies instead. All methods may be called
// from any goroutine.
type Mapping struct {
	window
	mu struct {
		sync.Mutex
		sides  [2]private
		closed bool
	}
	ended sync.Cond // a range has left ending
}

// private is a private mapping of the segment.
type private struct {
	mem    []byte // nil: not made yet
	leased ranges // of pages; on one side at a time
	ending ranges // of pages whose lease ends, but whose written pages are not dropped yet
}

// Map maps a segment. The descriptor stays the caller's.
func Map(fd int, size int64) (*Mapping, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "unit memory: duplicate descriptor")
	}
	mem, err := mapSegment(own, size, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(own)
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "unit memory: map %d bytes", size)
	}
	m := &Mapping{window: window{own, mem}}
	m.ended.L = &m.mu
	return m, nil
}

// Descriptor is the mapping's own descriptor of the segment.
func (m *Mapping) Descriptor() int { return m.fd }

// Shared is the segment itself.
func (m *Mapping) Shared() []byte { return m.mem }

// Write copies src to an offset of the segment the fastest way there is for the state its pages are in. The bytes are with
// the unit when it returns. ResourceExhausted means that the machine has no memory for a page.
func (m *Mapping) Write(off int64, src []byte) error { return m.write(off, src) }

// Read copies from an offset of the segment, mapping pages many at a time where they are not mapped yet.
func (m *Mapping) Read(dst []byte, off int64) { m.read(dst, off) }

// memoryLocked is the memory of a side, mapped when it is first needed. Only leased parts of it may be touched.
func (m *Mapping) memoryLocked(side *private) ([]byte, error) {
	if m.mu.closed {
		return nil, tqerr.New(tqerr.InvalidState, "unit memory: the mapping is closed")
	}
	if side.mem == nil {
		mem, err := mapSegment(m.fd, int64(len(m.mem)), unix.MAP_PRIVATE)
		if err != nil {
			return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "unit memory: map %d bytes privately", len(m.mem))
		}
		side.mem = mem
	}
	return side.mem, nil
}

func pagesOf(off, size int64) span {
	first := off / pageSize
	return span{uint64(first), uint64((off+size+pageMask)/pageSize - first)}
}

// Lease lends a part of a private mapping. It is refused when any page of the part is lent already, or when the mapping
// cannot be made; the caller copies then. The view may be written; it ends with EndLease.
func (m *Mapping) Lease(off, size int64) (data []byte, ok bool) {
	if size == 0 {
		return nil, true
	}
	pages := pagesOf(off, size)
	m.mu.Lock()
	defer m.mu.Unlock()
	side := m.freeLocked(pages)
	if side == nil {
		return nil, false
	}
	mem, err := m.memoryLocked(side)
	if err != nil {
		return nil, false
	}
	side.leased.insert(pages)
	return mem[off : off+size : off+size], true
}

// freeLocked is a side that can lend the pages, the first if possible: more of its pages are mapped. It waits while they end on
// both, which takes less time than a copy; nil: some are lent.
func (m *Mapping) freeLocked(pages span) *private {
	for {
		first, second := &m.mu.sides[0], &m.mu.sides[1]
		switch {
		case first.leased.overlaps(pages), second.leased.overlaps(pages):
			return nil
		case !first.ending.overlaps(pages):
			return first
		case !second.ending.overlaps(pages):
			return second
		}
		m.ended.Wait()
	}
}

// EndLease takes a view back. Nobody may touch it any more. A range that is not lent is ignored.
func (m *Mapping) EndLease(off, size int64) { m.StartEnd(off, size)() }

// StartEnd is the part of EndLease that takes no time; the function that it returns does the rest and must be called. Who
// asks for the pages between the two gets them from the other side, or waits.
func (m *Mapping) StartEnd(off, size int64) (finish func()) {
	pages := pagesOf(off, size)
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.mu.sides {
		side := &m.mu.sides[i]
		if lent, _ := side.leased.around(pages.start); size > 0 && lent == pages {
			side.leased.cut(pages)
			side.ending.insert(pages)
			return func() { m.finish(side, pages) }
		}
	}
	return func() {}
}

func (m *Mapping) finish(side *private, pages span) {
	dropWritten(side.mem, int64(pages.start), int64(pages.size))
	m.mu.Lock()
	defer m.mu.Unlock()
	side.ending.cut(pages)
	m.ended.Broadcast()
}

// Leases is the number of views that are lent.
func (m *Mapping) Leases() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.leasesLocked()
}

func (m *Mapping) leasesLocked() (n int) {
	for i := range m.mu.sides {
		n += m.mu.sides[i].leased.count + m.mu.sides[i].ending.count
	}
	return n
}

// Close unmaps all. It gives InvalidState and does nothing while a view is lent; the shared mapping must not be in use.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.closed {
		return nil
	}
	if n := m.leasesLocked(); n > 0 {
		return tqerr.New(tqerr.InvalidState, "unit memory: %d views are lent", n)
	}
	m.mu.closed = true
	err := unix.Munmap(m.mem)
	for i := range m.mu.sides {
		if mem := m.mu.sides[i].mem; mem != nil {
			if e := unix.Munmap(mem); err == nil {
				err = e
			}
		}
	}
	if e := unix.Close(m.fd); err == nil {
		err = e
	}
	return tqerr.Wrap(tqerr.IO, err, "unit memory: unmap")
}
