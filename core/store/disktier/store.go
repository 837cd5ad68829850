package disktier

import (
	"transferqueue/core/arena"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
)

// Store is a disk tier by itself: every value lies on disk, and in memory only while it is staged or leased.
type Store struct {
	*table.Table
	tier *Tier
}

var _ store.Store = (*Store)(nil)

// OpenStore opens a store with the values that are in its folder. The arena is its staging; limit bounds the bytes of values,
// 0: none.
func OpenStore(o Options, memory *arena.Arena, limit int64) (*Store, error) {
	t, err := Open(o)
	if err != nil {
		return nil, err
	}
	s := &Store{table.New(table.Options{Memory: memory, Disk: t, DiskLimit: limit}), t}
	t.Attach(s.Table)
	return s, nil
}

// Tier is the files of the store.
func (s *Store) Tier() *Tier { return s.tier }

// Close closes the files; what is on disk stays there unless it is scratch.
func (s *Store) Close() error {
	if s.Closed() {
		return nil
	}
	if err := s.Table.Close(); err != nil {
		return err
	}
	return s.tier.Close()
}
