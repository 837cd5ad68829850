package tiered

import (
	"errors"

	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// scratch is mapped disk space: files without a name, whose blocks are allocated before anybody touches them. It implements
// table.Scratch.
type scratch struct{ arena *arena.Arena }

func newScratch(folder string) (*scratch, error) {
	a, err := arena.New(arena.Options{Folder: folder})
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "scratch space in %s", folder)
	}
	return &scratch{a}, nil
}

// Alloc implements table.Scratch.
func (s *scratch) Alloc(size int64) (store.Block, error) {
	b, err := s.arena.Alloc(size)
	if err != nil || size == 0 {
		return store.Block{}, err
	}
	if err := s.arena.Reserve(b); err != nil {
		s.arena.Free(b.Segment, b.Offset, b.Size)
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return store.Block{}, tqerr.Wrap(tqerr.ResourceExhausted, err, "unit disk: scratch space of %d bytes, because memory has no room for them; clear samples or free disk space", size)
		}
		return store.Block{}, tqerr.Wrap(tqerr.IO, err, "unit disk: scratch space of %d bytes", size)
	}
	b.Segment += table.ScratchSegments
	return store.Block(b), nil
}

// Free implements table.Scratch.
func (s *scratch) Free(b store.Block) {
	if b.Size == 0 {
		return
	}
	at := arena.Block{Segment: b.Segment - table.ScratchSegments, Offset: b.Offset, Size: b.Size}
	s.arena.Discard(at)
	s.arena.Free(at.Segment, at.Offset, at.Size)
}

// Bytes implements table.Scratch.
func (s *scratch) Bytes(b store.Block) []byte {
	return s.arena.Bytes(b.Segment-table.ScratchSegments, b.Offset, b.Size)
}
