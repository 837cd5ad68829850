package controller_test

import (
	"os"
	"testing"

	"transferqueue/core/arena"
)

// The first large write of a process opens /proc/self/pagemap, which stays open: not a leak of the test that does it.
func TestMain(m *testing.M) {
	openPagemap()
	os.Exit(m.Run())
}

func openPagemap() {
	const size = 1 << 20
	a, err := arena.New(arena.Options{})
	if err != nil {
		panic(err)
	}
	defer a.Close()
	b, err := a.Alloc(size)
	if err != nil {
		panic(err)
	}
	fd, mapped, err := a.Segment(b.Segment)
	if err != nil {
		panic(err)
	}
	defer os.NewFile(uintptr(fd), "segment").Close()
	m, err := arena.Map(fd, mapped)
	if err != nil {
		panic(err)
	}
	defer m.Close()
	if err := m.Write(b.Offset, make([]byte, size)); err != nil {
		panic(err)
	}
	a.Free(b.Segment, b.Offset, b.Size)
}

// stride is how far apart the calls are that fail, or at which a process dies: all do one after the other; with -short, which is
// for the race detector, every fifth.
func stride() int {
	if testing.Short() {
		return 5
	}
	return 1
}
