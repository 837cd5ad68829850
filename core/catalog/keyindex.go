package catalog

import (
	"hash/maphash"
	"slices"
)

// keyIndex leads from the keys of a partition to its samples. Of a key it has only the hash, the key itself is in Catalog.keys:
// so it grows without reading a key, the garbage collector finds nothing to follow in it, and a batch is hashed once however
// often its keys are looked up.
type keyIndex struct {
	slots []keySlot // none, or a power of two, of which a quarter at least is empty; a key is in the first free slot from its hash on
	count int
}

type keySlot struct {
	hash  uint64
	place int64 // one more than the index; 0: empty
}

var hashSeed = maphash.MakeSeed()

func hashOf(key string) uint64 { return maphash.String(hashSeed, key) }

func hashesOf(keys []string) []uint64 {
	out := make([]uint64, len(keys))
	for i, key := range keys {
		out[i] = hashOf(key)
	}
	return out
}

// find returns the index of a key. keys has the key of every index.
func (x *keyIndex) find(keys *paged[string], key string, hash uint64) (int64, bool) {
	if x.count == 0 {
		return 0, false
	}
	mask := uint64(len(x.slots) - 1)
	for at := hash & mask; x.slots[at].place != 0; at = (at + 1) & mask {
		if s := x.slots[at]; s.hash == hash && keys.get(s.place-1) == key {
			return s.place - 1, true
		}
	}
	return 0, false
}

// reserve makes room for n more keys.
func (x *keyIndex) reserve(n int) {
	size := max(len(x.slots), 8)
	for 4*(x.count+n) > 3*size {
		size *= 2
	}
	if size == len(x.slots) {
		return
	}
	old := x.slots
	x.slots = make([]keySlot, size)
	for _, s := range old {
		if s.place != 0 {
			x.put(s)
		}
	}
}

// add binds a key that is not in it.
func (x *keyIndex) add(hash uint64, index int64) {
	x.reserve(1)
	x.put(keySlot{hash, index + 1})
	x.count++
}

func (x *keyIndex) put(s keySlot) {
	mask := uint64(len(x.slots) - 1)
	at := s.hash & mask
	for x.slots[at].place != 0 {
		at = (at + 1) & mask
	}
	x.slots[at] = s
}

// remove takes out the key of an index, which must be in it. What stands behind it moves up, so that no search ends too early.
func (x *keyIndex) remove(hash uint64, index int64) {
	mask := uint64(len(x.slots) - 1)
	gap := hash & mask
	for x.slots[gap].place != index+1 {
		gap = (gap + 1) & mask
	}
	for at := (gap + 1) & mask; x.slots[at].place != 0; at = (at + 1) & mask {
		if (at-x.slots[at].hash)&mask >= (at-gap)&mask {
			x.slots[gap], gap = x.slots[at], at
		}
	}
	x.slots[gap] = keySlot{}
	x.count--
}

// find returns the index of a key.
func (c *Catalog) find(p *partition, key string) (int64, bool) {
	return p.byKey.find(&c.keys, key, hashOf(key))
}

// repeated returns the keys that occur more than once. An open table of positions is several times cheaper than a map.
func repeated(keys []string, hashes []uint64) (twice []string) {
	size := 4
	for size < 2*len(keys) {
		size *= 2
	}
	table := make([]int32, size) // one more than the position of a key
	for i, key := range keys {
		at := hashes[i] & uint64(size-1)
		for ; table[at] != 0; at = (at + 1) & uint64(size-1) {
			if k := table[at] - 1; hashes[k] == hashes[i] && keys[k] == key {
				if !slices.Contains(twice, key) {
					twice = append(twice, key)
				}
				break
			}
		}
		table[at] = int32(i + 1)
	}
	return twice
}
