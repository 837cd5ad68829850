package catalog

import (
	"math/rand/v2"
	"slices"
)

// shapeTable finds the number of a shape by its dimensions. It is an open table with linear probing: ragged columns look up
// every row that is written, which a map with encoded keys makes twice as slow. The zero value is empty.
type shapeTable struct {
	slots []uint32 // numbers, 0 for an empty slot; the length is a power of two, at most half are used
	n     int
}

var shapeSeed = rand.Uint64()

func hashShape(dims []int64) uint64 {
	h := shapeSeed + uint64(len(dims))
	for _, d := range dims {
		h = (h ^ uint64(d)) * 0x9e3779b97f4a7c15
		h ^= h >> 32
	}
	return h
}

// find returns the number of a shape, 0 if it has none.
func (t *shapeTable) find(all []shape, dims []int64) uint32 {
	if t.n == 0 {
		return 0
	}
	for at := t.home(dims); t.slots[at] != 0; at = t.next(at) {
		if slices.Equal(all[t.slots[at]-1].dims, dims) {
			return t.slots[at]
		}
	}
	return 0
}

// add enters a number that is not there.
func (t *shapeTable) add(all []shape, id uint32) {
	if 2*(t.n+1) > len(t.slots) {
		old := t.slots
		t.slots = make([]uint32, max(8, 2*len(old)))
		for _, other := range old {
			if other != 0 {
				t.enter(all, other)
			}
		}
	}
	t.enter(all, id)
	t.n++
}

func (t *shapeTable) enter(all []shape, id uint32) {
	at := t.home(all[id-1].dims)
	for t.slots[at] != 0 {
		at = t.next(at)
	}
	t.slots[at] = id
}

// remove takes a number out that is there, and moves those behind it that would not be found any more.
func (t *shapeTable) remove(all []shape, id uint32) {
	hole := t.home(all[id-1].dims)
	for t.slots[hole] != id {
		hole = t.next(hole)
	}
	t.n--
	t.slots[hole] = 0
	for at := t.next(hole); t.slots[at] != 0; at = t.next(at) {
		moved := t.slots[at]
		t.slots[at] = 0
		t.enter(all, moved)
	}
}

// any returns some number of a table that is not empty.
func (t *shapeTable) any() uint32 {
	at := slices.IndexFunc(t.slots, func(id uint32) bool { return id != 0 })
	return t.slots[at]
}

func (t *shapeTable) home(dims []int64) int { return int(hashShape(dims) & uint64(len(t.slots)-1)) }
func (t *shapeTable) next(at int) int       { return (at + 1) & (len(t.slots) - 1) }
