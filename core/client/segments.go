package client

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// segments are the mappings of unit memory in this process, made when they are first needed and kept.
type segments struct {
	// using is held for reading by who touches mapped memory; close waits for it.
	using sync.RWMutex
	mu    struct {
		sync.Mutex
		byKey  map[segmentKey]*arena.Mapping
		views  map[*memory]*arena.Mapping
		parted map[*arena.Mapping]struct{} // of units that are gone, and viewed; see forget.go
		newest uint32                      // the highest number of a unit that was mapped
		closed bool
	}
}

type segmentKey struct{ unit, segment uint32 }

func (s *segments) init() {
	s.mu.byKey = map[segmentKey]*arena.Mapping{}
	s.mu.views = map[*memory]*arena.Mapping{}
	s.mu.parted = map[*arena.Mapping]struct{}{}
}

// close unmaps everything but what results view. Those keep what they show: the server may reuse the memory behind them as
// soon as the client is gone, so every page that shows it becomes the reader's own before.
func (s *segments) close() {
	s.using.Lock()
	defer s.using.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	for view := range s.mu.views {
		makeOwn(view.data)
	}
	for _, m := range s.mu.byKey {
		_ = m.Close() // one that is viewed stays for endView
	}
}

// makeOwn writes to every page of a view without changing it.
func makeOwn(data []byte) {
	page := uintptr(unix.Getpagesize())
	start := uintptr(unsafe.Pointer(&data[0])) &^ 3 // a mapping starts with a page, so this is still inside
	first := data[:1]
	for at := start; at < start+uintptr(len(data)); at = (at &^ (page - 1)) + page {
		word := (*uint32)(unsafe.Add(unsafe.Pointer(&first[0]), int(at)-int(uintptr(unsafe.Pointer(&first[0])))))
		atomic.AddUint32(word, 0)
	}
}

// addView remembers who views a mapping.
func (s *segments) addView(view *memory, m *arena.Mapping) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.views[view] = m
}

// dropView forgets a view that nobody reads any more. It reports that the client is closed, so that there is no lease to end.
func (s *segments) dropView(view *memory) (m *arena.Mapping, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m = s.mu.views[view]
	delete(s.mu.views, view)
	return m, s.mu.closed
}

// endView takes the pages of a dropped view back with what StartEnd returned.
func (s *segments) endView(m *arena.Mapping, finish func()) {
	finish()
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, parted := s.mu.parted[m]; s.mu.closed || parted {
		if m.Close() == nil { // the last view succeeds
			delete(s.mu.parted, m)
		}
	}
}

// mapping returns the mapping of a segment. The caller holds segments.using.
func (c *Client) mapping(ctx context.Context, unit, segment uint32) (*arena.Mapping, error) {
	key := segmentKey{unit, segment}
	if m, err := c.segments.find(key); m != nil || err != nil {
		return m, err
	}
	from := c.source(unit)
	if from == nil {
		return nil, tqerr.New(tqerr.Unimplemented, "segment %d of unit %d is on another host", segment, unit)
	}
	fd, size, err := from.Segment(ctx, unit, segment)
	if err != nil {
		return nil, err
	}
	fresh, err := arena.Map(fd, size)
	_ = unix.Close(fd)
	if err != nil {
		return nil, err
	}
	s := &c.segments
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.mu.byKey[key]; m != nil { // somebody else was faster
		_ = fresh.Close()
		return m, nil
	}
	s.mu.byKey[key] = fresh
	if unit > s.mu.newest {
		s.mu.newest = unit
		guard.Go("client segments", c.forgetGone) // it may be there in the place of another
	}
	return fresh, nil
}

func (s *segments) find(key segmentKey) (*arena.Mapping, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	return s.mu.byKey[key], nil
}

// read copies a block of unit memory.
func (c *Client) read(ctx context.Context, dst []byte, unit uint32, b wire.Block) error {
	if b.Size == 0 {
		return nil
	}
	m, err := c.mapping(ctx, unit, b.Segment)
	if err == nil {
		err = checkBlock(m, b)
	}
	if err == nil {
		m.Read(dst[:b.Size], b.Offset)
	}
	return err
}

// Descriptors lists the descriptors of the mapped segments, which a forked child closes so that unit memory goes back
// when its unit ends.
func (c *Client) Descriptors() []int {
	out := append(c.directs.descriptors(), c.streamDescriptors()...)
	out = append(out, c.ways.descriptors()...)
	s := &c.segments
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return out
	}
	for _, m := range s.mu.byKey {
		out = append(out, m.Descriptor())
	}
	for m := range s.mu.parted {
		out = append(out, m.Descriptor())
	}
	return out
}
