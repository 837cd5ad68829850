package arena

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bits of an entry of /proc/self/pagemap, one native uint64 per page.
const (
	pagemapPresent = 1 << 63
	pagemapSwapped = 1 << 62
	pagemapFile    = 1 << 61 // the page belongs to the file; a private page that was written does not
)

// pagemap is opened once and stays open: it shows the process that opened it, and the library never runs in a child of it.
var pagemap = sync.OnceValue(func() int {
	fd, err := unix.Open("/proc/self/pagemap", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
})

// readPagemap fills entries for the pages of mem from page on, and reports whether it could.
func readPagemap(mem []byte, page int64, entries []uint64) bool {
	fd := pagemap()
	if fd < 0 {
		return false
	}
	raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(entries))), len(entries)*8)
	at := (int64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))/pageSize + page) * 8
	for len(raw) > 0 {
		n, err := unix.Pread(fd, raw, at)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return false
		}
		raw, at = raw[n:], at+int64(n)
	}
	return true
}

// dropWritten gives up the reader's copies of pages [first, first+count) of a private mapping, so that the pages show the
// segment again. Pages it only read stay mapped. When the page map cannot be read, all of them go.
func dropWritten(mem []byte, first, count int64) {
	const batch = 4096
	entries := make([]uint64, min(batch, count))
	drop := func(from, to int64) {
		if from < to {
			_ = unix.Madvise(mem[from*pageSize:min(to*pageSize, int64(len(mem)))], unix.MADV_DONTNEED)
		}
	}
	for end := first + count; first < end; first += batch {
		part := entries[:min(batch, end-first)]
		if !readPagemap(mem, first, part) {
			drop(first, end)
			return
		}
		from := first // pages [from, i) were written
		for i, entry := range part {
			present, file := entry&pagemapPresent != 0, entry&pagemapFile != 0
			if written := (present && !file) || entry&pagemapSwapped != 0; !written {
				drop(from, first+int64(i))
				from = first + int64(i) + 1
			}
		}
		drop(from, first+int64(len(part)))
	}
}
