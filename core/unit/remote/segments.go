package remote

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// patience is how long a unit may take to hand out a descriptor.
const patience = 10 * time.Second

// segments are the unit's segments as far as somebody has asked for them: the controller hands their descriptors on to
// clients and maps them where it needs bytes itself.
type segments struct {
	mu struct {
		sync.Mutex
		mapped map[uint32]*arena.Mapping
		closed bool
	}
}

func (s *segments) init() { s.mu.mapped = map[uint32]*arena.Mapping{} }

func (s *segments) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	for _, m := range s.mu.mapped {
		_ = m.Close()
	}
	s.mu.mapped = nil
}

func (s *segments) find(number uint32) *arena.Mapping {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.mapped[number]
}

// mapping returns the mapping of a segment, for which it may have to ask the unit.
func (u *Unit) mapping(number uint32) (*arena.Mapping, error) {
	if m := u.segments.find(number); m != nil {
		return m, nil
	}
	if err := u.Lost(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(u.ctx, patience)
	defer cancel()
	fd, size, err := u.conn.Segment(ctx, 0, number)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.CodeOf(err), err, "unit %q", u.at.Name)
	}
	fresh, err := arena.Map(fd, size)
	_ = unix.Close(fd)
	if err != nil {
		return nil, err
	}
	s := &u.segments
	s.mu.Lock()
	defer s.mu.Unlock()
	switch m := s.mu.mapped[number]; {
	case s.mu.closed:
		_ = fresh.Close()
		return nil, tqerr.New(tqerr.Unavailable, "unit %q was closed", u.at.Name)
	case m != nil: // somebody else was faster
		_ = fresh.Close()
		return m, nil
	}
	s.mu.mapped[number] = fresh
	return fresh, nil
}

// Segment gives a duplicate of a segment's descriptor, which the caller closes, and its size. It may wait for the unit.
func (u *Unit) Segment(number uint32) (int, int64, error) {
	m, err := u.mapping(number)
	if err != nil {
		return -1, 0, err
	}
	fd, err := unix.FcntlInt(uintptr(m.Descriptor()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, 0, tqerr.Wrap(tqerr.ResourceExhausted, err, "unit %q: segment %d", u.at.Name, number)
	}
	return fd, int64(len(m.Shared())), nil
}

// Bytes is the memory of a block that is staged or leased. It may wait for the unit, once per segment.
func (u *Unit) Bytes(b store.Block) ([]byte, error) {
	if b.Size == 0 {
		return nil, nil
	}
	m, err := u.mapping(b.Segment)
	if err != nil {
		return nil, err
	}
	if all := m.Shared(); b.Offset >= 0 && b.Size > 0 && b.Offset <= int64(len(all)) && b.Size <= int64(len(all))-b.Offset {
		return all[b.Offset : b.Offset+b.Size : b.Offset+b.Size], nil
	}
	return nil, tqerr.New(tqerr.Corruption, "unit %q: block of %d bytes at %d of segment %d of %d", u.at.Name, b.Size, b.Offset, b.Segment, len(m.Shared()))
}

// Descriptors lists the descriptors that a forked child must close.
func (u *Unit) Descriptors() []int {
	var out []int
	if d, ok := u.conn.(interface{ Descriptors() []int }); ok {
		out = d.Descriptors()
	}
	u.segments.mu.Lock()
	defer u.segments.mu.Unlock()
	for _, m := range u.segments.mu.mapped {
		out = append(out, m.Descriptor())
	}
	return out
}
