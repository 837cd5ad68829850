package arena

import (
	"os"

	"golang.org/x/sys/unix"
)

// segment is one memfd of a unit, or a file without a name, and this process's mapping of it.
type segment struct {
	window
	size int64
}

// newSegment makes a memfd that nobody can resize: a client's mapping never ends in SIGBUS because a peer shrank it.
func newSegment(size int64) (*segment, error) {
	fd, err := unix.MemfdCreate("tq-unit", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	if err = unix.Ftruncate(fd, size); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	}
	var mem []byte
	if err == nil {
		mem, err = mapSegment(fd, size, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &segment{window{fd, mem}, size}, nil
}

// newFileSegment makes a segment of disk space: a file that has no name, so that it ends with its last user. Its pages have to
// be allocated before they are touched (Arena.Reserve), or a full disk is a SIGBUS.
func newFileSegment(folder string, size int64) (*segment, error) {
	fd, err := nameless(folder)
	if err != nil {
		return nil, err
	}
	var mem []byte
	if err = unix.Ftruncate(fd, size); err == nil {
		mem, err = mapSegment(fd, size, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &segment{window{fd, mem}, size}, nil
}

// mapSegment maps all of a segment. Unit memory is left out of core dumps, which would otherwise be as large as it. A forked
// child does not inherit the shared mapping, or its life would prolong that of the memory; private views it does inherit.
func mapSegment(fd int, size int64, sharing int) ([]byte, error) {
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, sharing|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP)
	if sharing == unix.MAP_SHARED {
		_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	}
	return mem, nil
}

func (s *segment) close() error {
	err := unix.Munmap(s.mem)
	if e := unix.Close(s.fd); err == nil {
		err = e
	}
	return err
}

// nameless makes a file without a name.
func nameless(folder string) (int, error) {
	fd, err := unix.Open(folder, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != unix.EOPNOTSUPP && err != unix.EISDIR {
		return fd, err
	}
	f, err := os.CreateTemp(folder, "unnamed-*") // the file system cannot make one
	if err != nil {
		return -1, err
	}
	defer func() { _ = f.Close() }()
	if err := os.Remove(f.Name()); err != nil {
		return -1, err
	}
	return unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
}
