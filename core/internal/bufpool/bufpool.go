// Package bufpool keeps result memory: anonymous mappings outside the Go heap, on huge pages where the system gives them,
// handed out, given back when the last tensor over them dies, and reused while their pages are still there. A page fault
// costs about ten times the copy of a page, so a recycled buffer is what makes a large get fast.
package bufpool

import (
	"math/bits"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
)

const (
	minSize   = 4 << 10
	largeSize = 1 << 20 // from here on buffers start on a huge page
	hugePage  = 2 << 20 // alignment that lets the kernel use a huge page
	idleAfter = 10 * time.Second
	trimEvery = idleAfter / 4
)

// Pool hands out buffers. All methods may be called from any goroutine and from a finalizer: they hold one short lock.
type Pool struct {
	mu struct {
		sync.Mutex
		free    map[int64][]idle // by class size, oldest first
		live    int64
		idle    int64
		trimmer *time.Timer // runs while something is idle
		closed  bool
	}
}

type idle struct {
	data  []byte
	since time.Time
}

// New makes an empty pool.
func New() *Pool {
	p := &Pool{}
	p.mu.free = map[int64][]idle{}
	return p
}

// class rounds a size up to one of eight classes per power of two, so that at most an eighth is wasted.
func class(size int64) int64 {
	if size <= minSize {
		return minSize
	}
	step := int64(1) << max(bits.Len64(uint64(size-1))-4, 12)
	return (size + step - 1) / step * step
}

// Get returns a buffer of exactly size bytes (size > 0); its contents are arbitrary.
func (p *Pool) Get(size int64) ([]byte, error) {
	want := class(size)
	p.mu.Lock()
	if list := p.mu.free[want]; len(list) > 0 {
		last := list[len(list)-1]
		p.mu.free[want] = list[:len(list)-1]
		p.mu.idle -= want
		p.mu.live += want
		p.mu.Unlock()
		return last.data[:size], nil
	}
	p.mu.live += want
	p.mu.Unlock()
	data, err := allocate(want)
	if err != nil {
		p.mu.Lock()
		p.mu.live -= want
		p.mu.Unlock()
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "result memory of %d bytes", size)
	}
	return data[:size], nil
}

// allocate maps memory of a class. Large classes start on a huge page.
func allocate(size int64) ([]byte, error) {
	if size < largeSize {
		return unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	}
	raw, err := unix.MmapPtr(-1, 0, nil, uintptr(size+hugePage), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	head := (hugePage - int64(uintptr(raw)%hugePage)) % hugePage
	if head > 0 {
		_ = unix.MunmapPtr(raw, uintptr(head))
	}
	start := unsafe.Add(raw, head)
	if tail := hugePage - head; tail > 0 {
		_ = unix.MunmapPtr(unsafe.Add(start, size), uintptr(tail))
	}
	data := unsafe.Slice((*byte)(start), size)
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // a kernel without huge pages is only slower
	return data, nil
}

// Put takes a buffer of Get back.
func (p *Pool) Put(data []byte) {
	size := class(int64(len(data)))
	data = data[:size:size]
	p.mu.Lock()
	p.mu.live -= size
	if p.mu.closed {
		p.mu.Unlock()
		unmap(data)
		return
	}
	p.mu.idle += size
	p.mu.free[size] = append(p.mu.free[size], idle{data, time.Now()})
	if p.mu.trimmer == nil {
		p.mu.trimmer = time.AfterFunc(trimEvery, p.trimIdle)
	}
	p.mu.Unlock()
}

func unmap(data []byte) { _ = unix.MunmapPtr(unsafe.Pointer(&data[0]), uintptr(len(data))) }

// trimIdle gives memory back that nobody used for a while, and comes again while anything is idle.
func (p *Pool) trimIdle() {
	var err error
	defer guard.Recover(&err) // nobody else would, on a timer's goroutine
	p.trim(time.Now().Add(-idleAfter))
}

// trim unmaps buffers idle since before the given time.
func (p *Pool) trim(before time.Time) {
	var old [][]byte
	p.mu.Lock()
	for size, list := range p.mu.free {
		n := 0
		for n < len(list) && list[n].since.Before(before) {
			old = append(old, list[n].data)
			p.mu.idle -= size
			n++
		}
		p.mu.free[size] = append([]idle(nil), list[n:]...)
		if n == len(list) {
			delete(p.mu.free, size)
		}
	}
	if p.mu.trimmer != nil {
		p.mu.trimmer.Stop()
		p.mu.trimmer = nil
	}
	if len(p.mu.free) > 0 {
		p.mu.trimmer = time.AfterFunc(trimEvery, p.trimIdle)
	}
	p.mu.Unlock()
	for _, data := range old {
		unmap(data)
	}
}

// Stats returns bytes handed out and bytes kept for reuse.
func (p *Pool) Stats() (live, idle int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.live, p.mu.idle
}

// Close unmaps everything idle; buffers that are handed out are unmapped when they come back.
func (p *Pool) Close() {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.Unlock()
	p.trim(time.Now().Add(time.Hour))
}
