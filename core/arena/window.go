package arena

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"transferqueue/core/internal/memcopy"
	"transferqueue/core/tqerr"
)

const (
	// windowStep is how much of a copy shares one look at the page tables.
	windowStep = 2 << 20
	// windowMin is the size from which looking pays; below it a copy just faults.
	windowMin = 64 << 10
)

// window is a process's shared mapping of a segment, and its descriptor.
type window struct {
	fd  int
	mem []byte
}

// pageState is where a page of a window stands for this process.
type pageState int

const (
	absent   pageState = iota // a hole
	unmapped                  // resident, but this process would fault
	mapped                    // in this process's page tables
)

// write copies src into the window. Faulting a hole in is the dearest way to write it: the kernel zeroes a page only for it to
// be overwritten. So holes are written by pwrite, resident pages that are not mapped here yet are mapped many at a time,
// and mapped ones are just copied to. What is found for a step's first page is taken for all of it; a wrong guess costs time only.
func (w *window) write(off int64, src []byte) error {
	if len(src) < windowMin {
		memcopy.Put(w.mem[off:], src)
		return nil
	}
	for len(src) > 0 {
		n := min(int64(len(src)), windowStep-off%windowStep)
		if state := w.state(off + min(n-1, pageSize)); state == absent {
			if err := w.pwrite(off, src[:n]); err != nil {
				return err
			}
		} else {
			w.mapIn(state, off, n)
			memcopy.Put(w.mem[off:off+n], src[:n])
		}
		off, src = off+n, src[n:]
	}
	return nil
}

// read copies out of the window, mapping resident pages many at a time.
func (w *window) read(dst []byte, off int64) {
	if len(dst) < windowMin {
		copy(dst, w.mem[off:])
		return
	}
	move := memcopy.Copy
	if len(dst) >= memcopy.GetThreshold {
		move = memcopy.CopyNT
	}
	for len(dst) > 0 {
		n := min(int64(len(dst)), windowStep-off%windowStep)
		w.mapIn(w.state(off+min(n-1, pageSize)), off, n)
		move(dst, w.mem[off:off+n])
		off, dst = off+n, dst[n:]
	}
}

// mapIn brings the pages of a range into the page tables when the first is not. A read fault maps its neighbours too, and
// pages of a shared memfd are mapped writable even then, so reading is the cheap way to prepare for writing as well.
func (w *window) mapIn(state pageState, off, n int64) {
	if state == mapped {
		return
	}
	first := off &^ pageMask
	_ = unix.Madvise(w.mem[first:min(int64(len(w.mem)), int64(roundUp(uint64(off+n), pageSize)))], unix.MADV_POPULATE_READ)
}

func (w *window) state(off int64) pageState {
	page := off / pageSize
	var entry [1]uint64
	if readPagemap(w.mem, page, entry[:]) && entry[0]&pagemapPresent != 0 {
		return mapped
	}
	var resident byte
	at := unsafe.Pointer(unsafe.SliceData(w.mem[page*pageSize:]))
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(at), pageSize, uintptr(unsafe.Pointer(&resident)))
	if e != 0 || resident&1 == 0 {
		return absent
	}
	return unmapped
}

func (w *window) pwrite(off int64, src []byte) error {
	for len(src) > 0 {
		n, err := unix.Pwrite(w.fd, src, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return tqerr.Wrap(tqerr.ResourceExhausted, err, "unit memory: write of %d bytes", len(src))
		}
		off, src = off+int64(n), src[n:]
	}
	return nil
}
