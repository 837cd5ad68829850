package client

import (
	"context"
	"sync"

	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/wire"
)

// segments are the mappings of unit memory in this process, made when they are first needed and kept.
type segments struct {
	mu    sync.Mutex
	byKey map[segmentKey]*arena.Mapping
}

type segmentKey struct{ unit, segment uint32 }

func (s *segments) init() { s.byKey = map[segmentKey]*arena.Mapping{} }

// close keeps the mappings: results that are views live in them, and the process gives them back when it ends.
func (s *segments) close() {}

// mapping returns the mapping of a segment.
func (c *Client) mapping(ctx context.Context, unit, segment uint32) (*arena.Mapping, error) {
	key := segmentKey{unit, segment}
	c.segments.mu.Lock()
	defer c.segments.mu.Unlock()
	if m := c.segments.byKey[key]; m != nil {
		return m, nil
	}
	conn, _ := c.ack()
	fd, size, err := conn.Segment(ctx, unit, segment)
	if err != nil {
		return nil, err
	}
	m, err := arena.Map(fd, size)
	_ = unix.Close(fd) // the mapping has its own
	if err != nil {
		return nil, err
	}
	c.segments.byKey[key] = m
	return m, nil
}

// block returns the bytes of a block of unit memory.
func (c *Client) block(ctx context.Context, unit uint32, b wire.Block) ([]byte, error) {
	if b.Size == 0 {
		return nil, nil
	}
	m, err := c.mapping(ctx, unit, b.Segment)
	if err != nil {
		return nil, err
	}
	return m.Shared()[b.Offset : b.Offset+b.Size], nil
}

// Descriptors lists the descriptors of the mapped segments, which a forked child closes so that unit memory goes back
// when its unit ends.
func (c *Client) Descriptors() []int {
	c.segments.mu.Lock()
	defer c.segments.mu.Unlock()
	var out []int
	for _, m := range c.segments.byKey {
		out = append(out, m.Descriptor())
	}
	return out
}
