package arena

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestBothWaysFindWhatWasWritten drops written pages by the kernel's scan and by reading the page map: either way the pages
// that were written show the file again, the others stay mapped, and what lies outside stays as it is.
func TestBothWaysFindWhatWasWritten(t *testing.T) {
	const pages = 300
	ways := map[string]func(mem []byte, first, count int64){
		"as leases do": dropWritten,
		"page by page": func(mem []byte, first, count int64) { readWritten(mem, first, first+count) },
	}
	for name, drop := range ways {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
			require.NoError(t, err)
			defer func() { require.NoError(t, unix.Close(fd)) }()
			require.NoError(t, unix.Ftruncate(fd, pages*pageSize))
			shared, err := unix.Mmap(fd, 0, pages*pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			require.NoError(t, err)
			defer func() { require.NoError(t, unix.Munmap(shared)) }()
			private, err := unix.Mmap(fd, 0, pages*pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
			require.NoError(t, err)
			defer func() { require.NoError(t, unix.Munmap(private)) }()
			random := rand.New(rand.NewPCG(1, 2))
			written := map[int]bool{}
			for page := range pages {
				shared[page*pageSize] = 1
				require.Equal(t, byte(1), private[page*pageSize])
				if page == 0 || page == pages-1 || random.IntN(2) == 0 {
					private[page*pageSize] = 2
					written[page] = true
				}
			}
			const first, count = 1, pages - 2
			drop(private, first, count)
			var entries [pages]uint64 // before anything is touched, which would map its neighbours
			require.True(t, readPagemap(private, 0, entries[:]))
			for page, entry := range entries {
				inside := page >= first && page < first+count
				present, file := entry&pagemapPresent != 0, entry&pagemapFile != 0
				if inside && written[page] {
					require.False(t, present, "page %d was written and is still there", page)
				} else {
					require.True(t, present, "page %d went although it was only read, or is none of the view", page)
					require.Equal(t, !written[page], file, "page %d", page)
				}
				want := byte(1)
				if written[page] && !inside {
					want = 2
				}
				require.Equal(t, want, private[page*pageSize], "page %d", page)
			}
		})
	}
}

// TestTheScanIsWhatThisKernelHas keeps the fast way from being lost unnoticed where the kernel has it.
func TestTheScanIsWhatThisKernelHas(t *testing.T) {
	var name unix.Utsname
	require.NoError(t, unix.Uname(&name))
	mem := make([]byte, 4*pageSize)
	start := uint64(uintptr(unsafe.Pointer(&mem[0]))) &^ (pageSize - 1)
	reached := scanWritten(start, start+pageSize, func(uint64, uint64) {})
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	require.NoError(t, err)
	if major > 6 || (major == 6 && minor >= 7) {
		require.Equal(t, start+pageSize, reached)
	}
}
