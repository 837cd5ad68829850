// Package memtier is the memory tier of a unit by itself: a table of cells whose bytes all lie in an arena.
package memtier

import (
	"transferqueue/core/arena"
	"transferqueue/core/store/table"
)

// Options of a memory tier.
type Options struct {
	// Arena holds the bytes. The store frees what it allocated there but does not close it.
	Arena *arena.Arena
	// Limit bounds staged, live and zombie bytes together; 0 means no limit.
	Limit int64
}

// Store implements store.Store.
type Store = table.Table

// New makes an empty store.
func New(o Options) *Store { return table.New(table.Options{Memory: o.Arena, MemoryLimit: o.Limit}) }
