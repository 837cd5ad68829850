// Package catalog is the state machine of the controller: which samples exist, which cells they have, what their keys and
// tags are, which task has consumed them, and on which unit they live. It never sees a cell's bytes.
//
// A Catalog does no I/O, starts no goroutines and reads no clock. It is not synchronised: the controller guards it with a
// read-write lock. Methods that are documented as read-only change nothing, not even a cache, and may run at the same time;
// all others need the lock alone. What a method returns is not changed afterwards and must not be changed by the caller.
//
// # States of an index
//
// Indexes are shared by all partitions. Each is in one state:
//
//	free      belongs to nobody; the smallest free one is used next
//	reserved  pre-allocated for a partition, seen by its consumers, not yet written
//	active    a sample, perhaps with a key
//	clearing  a sample that nobody sees any more, whose cells are being deleted by its unit
//
//	free -> reserved | active      a write, or the creation of a partition
//	reserved -> active | free      a write, or a clear
//	active -> clearing             StartClear…
//	clearing -> free               FinishClear; the generation of the index grows
//
// # Data
//
// What belongs to an index (generation, slot, key, tags) is in paged arrays over all indexes. What belongs to a partition
// is in bitsets: which indexes it owns, which of them have a field, which a task has consumed. A field's description is one
// type and one shape for all its holders, with numbered shapes for those that deviate. So a sample costs bits per field,
// and a scan for ready samples reads words.
package catalog

import (
	"math"
	"math/rand/v2"
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Options configures a catalog.
type Options struct {
	// PreAllocate is the number of indexes that a new partition reserves, at least 1.
	PreAllocate int
	// SampleLimitPerUnit bounds the samples of each unit; 0: no limit.
	SampleLimitPerUnit int64
}

// Catalog is the state of all partitions and the slot map.
type Catalog struct {
	preAllocate int
	sampleLimit int64

	partitions map[string]*partition
	order      []*partition // as created

	indexes     bitset.Free
	everUsed    int64         // one more than the largest index that was ever in use
	generations paged[uint32] // one less than the generation
	ceilings    paged[uint32] // the highest generation ever, where Adopt has restored a lower one
	slots       paged[uint16]
	keys        paged[string]
	tags        paged[[]byte]

	units       []*unit // as added
	unitOf      []*unit // of each slot
	slotSamples []int64
	epoch       uint64
	lineage     uint64 // see State
	resets      uint64 // how often tasks were let start over
}

// New makes an empty catalog without units.
func New(o Options) *Catalog {
	limit := o.SampleLimitPerUnit
	if limit <= 0 {
		limit = math.MaxInt64
	}
	return &Catalog{preAllocate: max(o.PreAllocate, 1), sampleLimit: limit, partitions: map[string]*partition{},
		unitOf: make([]*unit, numSlots), slotSamples: make([]int64, numSlots), lineage: rand.Uint64()}
}

// partition is one table.
type partition struct {
	name string

	owned  bitset.Set // reserved and active
	active bitset.Set
	keyed  bitset.Set // active with a key

	// clearing holds samples that nobody sees any more; clearingKeys leads a second clear to them.
	clearing     bitset.Set
	clearingKeys map[string][]int64

	byKey    keyIndex
	bindings uint64 // grows whenever byKey changes
	// registered lists the indexes of keys in registration order, -1 where one was cleared; position of an index is one
	// more than its place in the list, 0 for an index without a key.
	registered []int64
	position   paged[uint32]

	fields  map[string]*field
	sorted  []*field // by name
	ordered []*field // by registration

	consumed map[string]*bitset.Set // by task

	births   births // of the active samples, and perhaps of some that are gone
	complete bool   // a writer has said that nothing more comes
	leaving  bool   // it was cleared as a whole and is removed when its units have answered, unless it is written to before
}

// EnsurePartition makes sure that a partition exists, and reports whether it was created for that.
func (c *Catalog) EnsurePartition(name string) (created bool) {
	before := len(c.order)
	c.ensure(name)
	return len(c.order) > before
}

func (c *Catalog) ensure(name string) *partition {
	if p := c.partitions[name]; p != nil {
		return p
	}
	p := &partition{
		name:     name,
		fields:   map[string]*field{},
		consumed: map[string]*bitset.Set{},
	}
	c.partitions[name] = p
	c.order = append(c.order, p)
	p.owned.AddAll(bitset.NewMask(c.take(nil, c.preAllocate)))
	return p
}

// remove forgets a partition that has neither active nor clearing samples, and releases what it reserved.
func (c *Catalog) remove(p *partition) {
	for _, i := range p.owned.Members(nil) {
		c.release(i)
	}
	delete(c.partitions, p.name)
	c.order = slices.DeleteFunc(c.order, func(other *partition) bool { return other == p })
}

// take puts the n smallest free indexes in use.
func (c *Catalog) take(dst []int64, n int) []int64 {
	from := len(dst)
	dst = c.indexes.Take(dst, n)
	for _, i := range dst[from:] {
		c.generations.at(i) // reading it never has to allocate later
		c.everUsed = max(c.everUsed, i+1)
	}
	return dst
}

// release makes an index free. Its next sample has another generation.
func (c *Catalog) release(i int64) {
	generation := c.generations.at(i)
	*generation = max(*generation+1, c.ceilings.get(i))
	c.ceilings.clear(i)
	c.indexes.Release(i)
}

func (c *Catalog) sample(i int64) schema.Sample {
	return schema.Sample{Index: i, Generation: c.generations.get(i) + 1}
}

// Generation returns that of the sample which has an index now, 0 when a partition has none there. Read-only.
func (c *Catalog) Generation(partition string, index int64) uint32 {
	p := c.partitions[partition]
	if p == nil || index < 0 || !p.owned.Has(index) && !p.clearing.Has(index) {
		return 0
	}
	return c.generations.get(index) + 1
}

// owns reports whether a sample is one that p shows, reserved ones included.
func (c *Catalog) owns(p *partition, s schema.Sample) bool {
	return p != nil && s.Index >= 0 && p.owned.Has(s.Index) && c.generations.get(s.Index)+1 == s.Generation
}

// gone makes the error for a sample that p does not show, with its key where that is still known.
func (c *Catalog) gone(partition string, p *partition, s schema.Sample) error {
	if p != nil && s.Index >= 0 && p.clearing.Has(s.Index) && c.generations.get(s.Index)+1 == s.Generation {
		key := c.keys.get(s.Index)
		return gone(partition, s, key, slices.Contains(p.clearingKeys[key], s.Index))
	}
	return gone(partition, s, "", false)
}

// tagsOf returns the tags of a sample as they are handed out.
func (c *Catalog) tagsOf(i int64) []byte {
	if t := c.tags.get(i); t != nil {
		return t
	}
	return emptyTags
}

// keyOf returns the key of an active sample.
func (c *Catalog) keyOf(p *partition, i int64) (string, bool) {
	if p.position.get(i) == 0 {
		return "", false
	}
	return c.keys.get(i), true
}

// register binds a key to an active sample.
func (c *Catalog) register(p *partition, key string, hash uint64, i int64) {
	p.byKey.add(hash, i)
	p.bindings++
	*c.keys.at(i) = key
	p.registered = append(p.registered, i)
	*p.position.at(i) = uint32(len(p.registered))
	p.keyed.Add(i)
}

// unregister takes the key of a sample out of every listing. The key itself stays known for errors until the release.
func (p *partition) unregister(key string, i int64) {
	p.byKey.remove(hashOf(key), i)
	p.bindings++
	p.registered[p.position.get(i)-1] = -1
	p.position.clear(i)
	p.keyed.Remove(i)
	for n := len(p.registered); n > 0 && p.registered[n-1] == -1; n-- {
		p.registered = p.registered[:n-1]
	}
	if live := p.keyed.Count(); live == 0 {
		p.byKey, p.registered, p.position = keyIndex{}, nil, paged[uint32]{}
	} else if len(p.registered) > 2*live+pageSize {
		p.compact()
	}
}

// compact drops the places of cleared keys.
func (p *partition) compact() {
	p.registered = slices.DeleteFunc(p.registered, func(i int64) bool { return i == -1 })
	for at, i := range p.registered {
		*p.position.at(i) = uint32(at + 1)
	}
}

// lookup finds the partition or says that it is unknown.
func (c *Catalog) lookup(name string) (*partition, error) {
	if p := c.partitions[name]; p != nil {
		return p, nil
	}
	return nil, tqerr.New(tqerr.NotFound, "partition %q was not found", name)
}
