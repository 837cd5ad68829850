package arena

import (
	"transferqueue/core/internal/slab"
)

const (
	fan       = 32
	depth     = 12   // levels of a path; a tree of this depth would have more nodes than memory
	keepNodes = 1024 // room for nodes that a tree keeps when it has shrunk to its root
)

// span is a half-open interval of addresses, or of pages.
type span struct{ start, size uint64 }

func (s span) end() uint64 { return s.start + s.size }

// node is one node of a ranges tree. In a leaf, start and size are the spans. In an inner node, start is the lowest start
// and size the largest size below kid, both exact.
type node struct {
	start [fan]uint64
	size  [fan]uint64
	kid   [fan]uint32
	n     int32
	inner bool
}

// ranges is an ordered set of disjoint spans: a B+ tree without pointers whose inner nodes also know the largest span below
// them, so that the lowest span that is large enough is found on one way down.
type ranges struct {
	nodes slab.Slab[node]
	root  uint32
	count int
	total uint64 // sum of all sizes
}

// path is a position in the tree: a node of every level and an index into it. The last level is a leaf.
type path struct {
	id    [depth]uint32
	at    [depth]int32
	level int
}

func (p *path) leaf() (uint32, int32) { return p.id[p.level], p.at[p.level] }

// seek finds the last span that starts at or below addr; the index in the leaf is -1 when there is none.
func (r *ranges) seek(addr uint64) (p path) {
	id := r.root
	for {
		n := r.nodes.At(id)
		at := n.n - 1
		for at >= 0 && n.start[at] > addr {
			at--
		}
		if n.inner {
			at = max(at, 0)
		}
		p.id[p.level], p.at[p.level] = id, at
		if !n.inner {
			return p
		}
		id = n.kid[at]
		p.level++
	}
}

// next moves to the following span and reports whether there is one. A position before the first span moves to it.
func (r *ranges) next(p *path) bool {
	level := p.level
	for p.at[level]++; p.at[level] >= r.nodes.At(p.id[level]).n; p.at[level]++ {
		if level == 0 {
			return false
		}
		level--
	}
	for ; level < p.level; level++ {
		p.id[level+1], p.at[level+1] = r.nodes.At(p.id[level]).kid[p.at[level]], 0
	}
	return true
}

func (r *ranges) get(p *path) span {
	id, at := p.leaf()
	n := r.nodes.At(id)
	return span{n.start[at], n.size[at]}
}

// around returns the neighbours of an address: the last span that starts at or below it, and the first above it.
// A span of size 0 means none.
func (r *ranges) around(addr uint64) (before, after span) {
	if r.count == 0 {
		return
	}
	p := r.seek(addr)
	if _, at := p.leaf(); at >= 0 {
		before = r.get(&p)
	}
	if r.next(&p) {
		after = r.get(&p)
	}
	return
}

// overlaps reports whether any span shares an address with s.
func (r *ranges) overlaps(s span) bool {
	before, after := r.around(s.start)
	return before.end() > s.start || (after.size > 0 && after.start < s.end())
}

// merge adds a span that overlaps none and joins it with the neighbours that touch it.
func (r *ranges) merge(s span) span {
	if r.count == 0 {
		r.insert(s)
		return s
	}
	p := r.seek(s.start)
	_, at := p.leaf()
	joinsBefore := at >= 0 && r.get(&p).end() == s.start
	after := p
	joinsAfter := false
	if r.next(&after) {
		start := r.get(&after).start
		if start < s.end() {
			panic("arena: a range is freed twice")
		}
		joinsAfter = start == s.end()
	}
	if at >= 0 && r.get(&p).end() > s.start {
		panic("arena: a range is freed twice")
	}
	if joinsAfter {
		next := r.get(&after)
		s.size += next.size
		if !joinsBefore {
			r.put(&after, s)
			return s
		}
		r.delete(&after)
		p = r.seek(s.start)
	}
	if joinsBefore {
		s = span{r.get(&p).start, r.get(&p).size + s.size}
		r.put(&p, s)
		return s
	}
	r.insert(s)
	return s
}

// cut takes a span out of the one that contains it.
func (r *ranges) cut(s span) {
	p := r.seek(s.start)
	whole := r.get(&p)
	head, tail := span{whole.start, s.start - whole.start}, span{s.end(), whole.end() - s.end()}
	switch {
	case head.size == 0 && tail.size == 0:
		r.delete(&p)
	case head.size == 0:
		r.put(&p, tail)
	default:
		r.put(&p, head)
		if tail.size > 0 {
			r.insert(tail)
		}
	}
}

// put replaces the span at a position by one that lies between the same neighbours.
func (r *ranges) put(p *path, s span) {
	id, at := p.leaf()
	n := r.nodes.At(id)
	r.total += s.size - n.size[at]
	n.start[at], n.size[at] = s.start, s.size
	r.lift(p, p.level)
}

// lift brings the ancestors of the node at a level of the path up to date.
func (r *ranges) lift(p *path, level int) {
	for ; level > 0; level-- {
		n, up, at := r.nodes.At(p.id[level]), r.nodes.At(p.id[level-1]), p.at[level-1]
		largest := n.largest()
		if up.start[at] == n.start[0] && up.size[at] == largest {
			return
		}
		up.start[at], up.size[at] = n.start[0], largest
	}
}

func (n *node) largest() uint64 {
	largest := uint64(0)
	for _, size := range n.size[:n.n] {
		largest = max(largest, size)
	}
	return largest
}

func (r *ranges) insert(s span) {
	if r.root == 0 {
		r.root = r.nodes.New()
	}
	r.count++
	r.total += s.size
	p := r.seek(s.start)
	r.insertAt(&p, p.level, p.at[p.level]+1, s, 0)
}

// insertAt puts an entry at an index of the node at a level, splitting full nodes up to the root.
func (r *ranges) insertAt(p *path, level int, at int32, s span, kid uint32) {
	n := r.nodes.At(p.id[level])
	if n.n < fan {
		n.insert(at, s, kid)
		r.lift(p, level)
		return
	}
	newID := r.nodes.New()
	right := r.nodes.At(newID)
	half := int32(fan / 2)
	if at == fan {
		half = fan - 1 // ascending inserts leave full nodes behind
	}
	right.inner = n.inner
	right.n = fan - half
	copy(right.start[:], n.start[half:])
	copy(right.size[:], n.size[half:])
	copy(right.kid[:], n.kid[half:])
	n.n = half
	if at <= half {
		n.insert(at, s, kid)
	} else {
		right.insert(at-half, s, kid)
	}
	if level > 0 {
		r.lift(p, level)
		r.insertAt(p, level-1, p.at[level-1]+1, span{right.start[0], right.largest()}, newID)
		return
	}
	left := r.root
	r.root = r.nodes.New()
	root := r.nodes.At(r.root)
	root.inner, root.n = true, 2
	root.start[0], root.size[0], root.kid[0] = n.start[0], n.largest(), left
	root.start[1], root.size[1], root.kid[1] = right.start[0], right.largest(), newID
}

func (n *node) insert(at int32, s span, kid uint32) {
	copy(n.start[at+1:n.n+1], n.start[at:n.n])
	copy(n.size[at+1:n.n+1], n.size[at:n.n])
	copy(n.kid[at+1:n.n+1], n.kid[at:n.n])
	n.start[at], n.size[at], n.kid[at] = s.start, s.size, kid
	n.n++
}

func (n *node) remove(at int32) {
	copy(n.start[at:n.n-1], n.start[at+1:n.n])
	copy(n.size[at:n.n-1], n.size[at+1:n.n])
	copy(n.kid[at:n.n-1], n.kid[at+1:n.n])
	n.n--
}

func (r *ranges) delete(p *path) {
	id, at := p.leaf()
	r.count--
	r.total -= r.nodes.At(id).size[at]
	r.removeAt(p, p.level)
	if r.nodes.Len() == 1 && r.nodes.Cap() > keepNodes {
		root := *r.nodes.At(r.root)
		r.nodes = slab.Slab[node]{}
		r.root = r.nodes.New()
		*r.nodes.At(r.root) = root
	}
}

// removeAt removes the entry the path points to at a level. A node that becomes empty goes; one that becomes small takes
// its right neighbour in when both fit.
func (r *ranges) removeAt(p *path, level int) {
	id := p.id[level]
	n := r.nodes.At(id)
	n.remove(p.at[level])
	if level == 0 {
		for n.inner && n.n == 1 {
			r.root = n.kid[0]
			r.nodes.Free(id)
			id = r.root
			n = r.nodes.At(id)
		}
		return
	}
	if n.n == 0 {
		r.nodes.Free(id)
		r.removeAt(p, level-1)
		return
	}
	r.lift(p, level)
	up, at := r.nodes.At(p.id[level-1]), p.at[level-1]
	if n.n > fan/4 || at+1 >= up.n {
		return
	}
	right := r.nodes.At(up.kid[at+1])
	if n.n+right.n > fan*3/4 {
		return
	}
	copy(n.start[n.n:], right.start[:right.n])
	copy(n.size[n.n:], right.size[:right.n])
	copy(n.kid[n.n:], right.kid[:right.n])
	n.n += right.n
	r.nodes.Free(up.kid[at+1])
	r.lift(p, level)
	p.at[level-1]++
	r.removeAt(p, level-1)
}

// misfits bounds how many spans that are large enough but badly aligned a search looks at before it asks for one that
// fits wherever it starts.
const misfits = 16

// fit returns the lowest place for size bytes that starts on a multiple of align.
func (r *ranges) fit(size, align uint64) (start uint64, ok bool) {
	if r.count == 0 {
		return 0, false
	}
	tries := misfits
	if start, ok = r.fitBelow(r.root, size, size, align, &tries); ok || tries > 0 {
		return start, ok
	}
	tries = 1
	return r.fitBelow(r.root, size+align-1, size, align, &tries)
}

// fitBelow looks at spans of at least atLeast bytes below a node, lowest first.
func (r *ranges) fitBelow(id uint32, atLeast, size, align uint64, tries *int) (uint64, bool) {
	n := r.nodes.At(id)
	for i := int32(0); i < n.n && *tries > 0; i++ {
		if n.size[i] < atLeast {
			continue
		}
		if n.inner {
			if start, ok := r.fitBelow(n.kid[i], atLeast, size, align, tries); ok {
				return start, true
			}
			continue
		}
		start := (n.start[i] + align - 1) &^ (align - 1)
		if start+size <= n.start[i]+n.size[i] {
			return start, true
		}
		*tries--
	}
	return 0, false
}

// below returns the highest span that starts below addr and has at least atLeast bytes.
func (r *ranges) below(addr, atLeast uint64) (span, bool) {
	if r.count == 0 {
		return span{}, false
	}
	return r.belowIn(r.root, addr, atLeast)
}

func (r *ranges) belowIn(id uint32, addr, atLeast uint64) (span, bool) {
	n := r.nodes.At(id)
	for i := n.n - 1; i >= 0; i-- {
		if n.start[i] >= addr || n.size[i] < atLeast {
			continue
		}
		if !n.inner {
			return span{n.start[i], n.size[i]}, true
		}
		if s, ok := r.belowIn(n.kid[i], addr, atLeast); ok {
			return s, true
		}
	}
	return span{}, false
}

// each calls fn for every span in order.
func (r *ranges) each(fn func(span)) {
	if r.count == 0 {
		return
	}
	p := r.seek(0)
	if _, at := p.leaf(); at < 0 && !r.next(&p) {
		return
	}
	for ok := true; ok; ok = r.next(&p) {
		fn(r.get(&p))
	}
}
