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

// scanArgument is struct pm_scan_arg of linux/fs.h, region is struct page_region.
type scanArgument struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages uint64
	inverted, mask, anyOf, returned                         uint64
}

type region struct{ start, end, categories uint64 }

const (
	pagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg), since Linux 6.7
	pageFile    = 1 << 2
	pagePresent = 1 << 3
	pageSwapped = 1 << 4
)

// scanWritten calls drop for every range of pages that the reader wrote, addresses from start to end. It reports how far it
// came: where the kernel has no such call, nowhere.
func scanWritten(start, end uint64, drop func(from, to uint64)) (reached uint64) {
	var found [64]region
	for start < end {
		arg := scanArgument{
			start: start, end: end, vec: uint64(uintptr(unsafe.Pointer(&found[0]))), vecLen: uint64(len(found)),
			inverted: pageFile, mask: pageFile, anyOf: pagePresent | pageSwapped, returned: pagePresent | pageSwapped,
		}
		arg.size = uint64(unsafe.Sizeof(arg))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pagemap()), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || arg.walkEnd <= start {
			return start
		}
		for _, r := range found[:n] {
			drop(r.start, r.end)
		}
		start = arg.walkEnd
	}
	return start
}

// dropWritten gives up the reader's copies of pages [first, first+count) of a private mapping, so that the pages show the
// segment again. Pages it only read stay mapped. When it cannot be told which are which, all of them go.
func dropWritten(mem []byte, first, count int64) {
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	reached := scanWritten(base+uint64(first*pageSize), base+uint64((first+count)*pageSize), func(from, to uint64) {
		dropPages(mem, int64(from-base)/pageSize, int64(to-base)/pageSize)
	})
	readWritten(mem, int64(reached-base)/pageSize, first+count)
}

func dropPages(mem []byte, from, to int64) {
	if from < to {
		_ = unix.Madvise(mem[from*pageSize:min(to*pageSize, int64(len(mem)))], unix.MADV_DONTNEED)
	}
}

// readWritten does for pages [first, end) what scanWritten does, page by page.
func readWritten(mem []byte, first, end int64) {
	const batch = 4096
	entries := make([]uint64, max(min(batch, end-first), 0))
	for ; first < end; first += batch {
		part := entries[:min(batch, end-first)]
		if !readPagemap(mem, first, part) {
			dropPages(mem, first, end)
			return
		}
		from := first // pages [from, i) were written
		for i, entry := range part {
			present, file := entry&pagemapPresent != 0, entry&pagemapFile != 0
			if written := (present && !file) || entry&pagemapSwapped != 0; !written {
				dropPages(mem, from, first+int64(i))
				from = first + int64(i) + 1
			}
		}
		dropPages(mem, from, first+int64(len(part)))
	}
}
