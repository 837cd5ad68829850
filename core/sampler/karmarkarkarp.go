package sampler

import (
	"cmp"
	"container/heap"
	"slices"
)

// The largest differencing method of Karmarkar and Karp for k sets: a state is a way to put some of the items into k sets;
// the two states with the largest spread are combined, the largest sets of one with the smallest of the other, until one
// is left. All orders are total, so that equal inputs give equal parts in Go and in Python.

// set is some items and their sum, in the order in which they were put together.
type set struct {
	sum   float64
	items []item
}

type item struct {
	index  int
	length float64
}

// compareSets orders by sum, then by number of items, then by the items.
func compareSets(a, b set) int {
	return cmp.Or(
		cmp.Compare(a.sum, b.sum),
		cmp.Compare(len(a.items), len(b.items)),
		slices.CompareFunc(a.items, b.items, func(x, y item) int {
			return cmp.Or(cmp.Compare(x.index, y.index), cmp.Compare(x.length, y.length))
		}),
	)
}

// state is k sets, the largest first.
type state []set

func newState(items []item, k int) state {
	s := make(state, k)
	for i, it := range items {
		s[i] = set{it.length, []item{it}}
	}
	return s.sorted()
}

func (s state) sorted() state {
	slices.SortStableFunc(s, func(a, b set) int { return compareSets(b, a) })
	return s
}

func (s state) spread() float64 { return s[0].sum - s[len(s)-1].sum }

// combine puts the sets of other, which is of no use afterwards, to those of s.
func (s state) combine(other state) state {
	for i := range s {
		o := other[len(s)-1-i]
		s[i].sum += o.sum
		s[i].items = append(s[i].items, o.items...)
	}
	return s.sorted()
}

// states is a heap: the state with the largest spread is first, of those the one with the largest set.
type states []state

func (h states) Len() int { return len(h) }
func (h states) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[j].spread(), h[i].spread()), compareSets(h[j][0], h[i][0])) < 0
}
func (h states) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *states) Push(x any)   { *h = append(*h, x.(state)) }
func (h *states) Pop() any {
	last := len(*h) - 1
	out := (*h)[last]
	*h = (*h)[:last]
	return out
}

// Partition deals items of given lengths out to k parts with about the same sum, largest part first, the items of each
// ascending. With equal every part has as many items, which their number must allow; without it there must be at least k.
func Partition(lengths []float64, k int, equal bool) [][]int {
	items := make([]item, len(lengths))
	for i, n := range lengths {
		items[i] = item{i, n}
	}
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(cmp.Compare(a.length, b.length), cmp.Compare(a.index, b.index))
	})
	together := 1
	if equal {
		together = k
	}
	var all states
	for run := range slices.Chunk(items, together) {
		all = append(all, newState(run, k))
	}
	heap.Init(&all)
	for len(all) > 1 {
		first, second := heap.Pop(&all).(state), heap.Pop(&all).(state)
		heap.Push(&all, first.combine(second))
	}
	parts := make([][]int, k)
	for i, s := range all[0] {
		for _, it := range s.items {
			parts[i] = append(parts[i], it.index)
		}
		slices.Sort(parts[i])
	}
	return parts
}
