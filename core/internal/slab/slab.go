// Package slab holds many small records that are named by a number instead of a pointer. A record type without pointers
// costs the garbage collector nothing, however many there are. Nothing here is safe for concurrent use.
package slab

import "slices"

const (
	shift = 7
	chunk = 1 << shift
	mask  = chunk - 1
)

// Slab is a table of records. Numbers start at 1, so that 0 can mean none; a freed number is given out again. The
// address of a record stays the same while it lives.
type Slab[T any] struct {
	// Keep is how many records' memory an empty table keeps beyond the first chunk.
	Keep int

	chunks []*[chunk]T
	free   []uint32
	next   uint32
	live   int
}

// New returns the number of a zero record.
func (s *Slab[T]) New() uint32 {
	s.live++
	if n := len(s.free); n > 0 {
		id := s.free[n-1]
		s.free = s.free[:n-1]
		return id
	}
	s.next++
	if int(s.next>>shift) == len(s.chunks) {
		s.chunks = append(s.chunks, new([chunk]T))
	}
	return s.next
}

// At returns the record of a number that New gave.
func (s *Slab[T]) At(id uint32) *T { return &s.chunks[id>>shift][id&mask] }

// Free clears the record. When it was the last one, the table gives its memory back.
func (s *Slab[T]) Free(id uint32) {
	var zero T
	*s.At(id) = zero
	s.live--
	if s.live == 0 {
		keep := min(len(s.chunks), max(1, s.Keep/chunk))
		s.free, s.next = s.free[:0], 0
		if keep < len(s.chunks) {
			s.chunks, s.free = slices.Clone(s.chunks[:keep]), nil
		}
		return
	}
	s.free = append(s.free, id)
}

// Cap is the number of records that fit without more memory.
func (s *Slab[T]) Cap() int { return len(s.chunks) * chunk }

// Len is the number of records that live.
func (s *Slab[T]) Len() int { return s.live }

// Each calls fn for every number that was ever given out, also for freed ones, whose records are zero.
func (s *Slab[T]) Each(fn func(id uint32, record *T)) {
	for id := uint32(1); id <= s.next; id++ {
		fn(id, s.At(id))
	}
}
