package catalog

import (
	"iter"
	"math/bits"
	"slices"

	"transferqueue/core/internal/bitset"
)

// births remembers in which order the samples of a partition came to be. The smallest free indexes are used first, so beside
// other partitions an index may be small and young. Samples that came one after another with consecutive indexes are one
// stretch; a partition that has grown alone is a single one, whatever its size.
type births struct {
	list  []stretch // oldest first
	next  int64     // number of the next birth
	high  int64     // no stretch reaches beyond
	prune int       // length of list at which stretches without samples are looked for
}

// stretch is the indexes [from, to), whose births have the numbers birth, birth+1 and so on.
type stretch struct{ from, to, birth int64 }

const fewStretches = 64

// add appends new samples in the order of their birth. active has them already, and no sample that is gone.
func (b *births) add(indexes []int64, active *bitset.Set) {
	pieces := stretchesOf(indexes)
	if len(b.list) > 0 && slices.ContainsFunc(pieces, func(s stretch) bool { return s.from < b.high }) {
		b.carve(pieces)
	}
	for _, s := range pieces {
		s.birth = b.next
		b.next += s.to - s.from
		b.high = max(b.high, s.to)
		if last := len(b.list) - 1; last >= 0 && b.list[last].continues(s) {
			b.list[last].to = s.to
		} else {
			b.list = append(b.list, s)
		}
	}
	if len(b.list) > max(b.prune, fewStretches) {
		b.list = slices.DeleteFunc(b.list, func(s stretch) bool { return !active.HasIn(s.from, s.to) })
		b.prune = 2 * len(b.list)
	}
}

// continues reports that s follows both in index and in birth.
func (a stretch) continues(s stretch) bool { return a.to == s.from && a.birth+a.to-a.from == s.birth }

// stretchesOf cuts a list of indexes where they are not consecutive.
func stretchesOf(indexes []int64) (out []stretch) {
	for k, i := range indexes {
		if k > 0 && i == indexes[k-1]+1 {
			out[len(out)-1].to++
		} else {
			out = append(out, stretch{from: i, to: i + 1})
		}
	}
	return out
}

// carve takes indexes out of older stretches, whose samples are gone: the indexes are used again.
func (b *births) carve(pieces []stretch) {
	sorted := slices.SortedFunc(slices.Values(pieces), func(x, y stretch) int { return int(x.from - y.from) })
	out := make([]stretch, 0, len(b.list)+len(pieces))
	for _, s := range b.list {
		k, _ := slices.BinarySearchFunc(sorted, s.from, func(p stretch, from int64) int { return int(p.to - from - 1) })
		for ; k < len(sorted) && sorted[k].from < s.to; k++ {
			if p := sorted[k]; p.from > s.from {
				out = append(out, stretch{s.from, p.from, s.birth})
			}
			if gone := sorted[k].to - s.from; gone > 0 {
				s.from, s.birth = s.from+gone, s.birth+gone
			}
		}
		if s.from < s.to {
			out = append(out, s)
		}
	}
	b.list = out
}

// reset forgets everything: the partition is empty.
func (b *births) reset() { *b = births{} }

// words yields what a query selects, oldest first: the birth number of bit 0 of each word, its index, and the bits, of which
// at least one is set.
func (b *births) words(q bitset.Query) iter.Seq2[birthWord, uint64] {
	return func(yield func(birthWord, uint64) bool) {
		for _, s := range b.list {
			for w := s.from >> 6; w<<6 < s.to; w++ {
				word := q.Word(w)
				if word == 0 {
					continue
				}
				if low := s.from - w<<6; low > 0 {
					word &= ^uint64(0) << uint64(low)
				}
				if high := s.to - w<<6; high < 64 {
					word &= 1<<uint64(high) - 1
				}
				if word != 0 && !yield(birthWord{s.birth + w<<6 - s.from, w << 6}, word) {
					return
				}
			}
		}
	}
}

type birthWord struct{ birth, index int64 }

// all yields what a query selects, oldest first.
func (b *births) all(q bitset.Query) iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for at, word := range b.words(q) {
			for ; word != 0; word &= word - 1 {
				if !yield(at.index + int64(bits.TrailingZeros64(word))) {
					return
				}
			}
		}
	}
}

// numbers returns the birth numbers of what a query selects, which is given as an ascending list.
func (b *births) numbers(q bitset.Query, selected []int64) []int64 {
	out := make([]int64, len(selected))
	for at, word := range b.words(q) {
		k, _ := slices.BinarySearch(selected, at.index+int64(bits.TrailingZeros64(word)))
		for ; word != 0; word &= word - 1 {
			out[k] = at.birth + int64(bits.TrailingZeros64(word))
			k++
		}
	}
	return out
}

// groups returns count groups of n selected samples that were born one right after another, oldest first, or nil when there
// are fewer. Groups do not overlap and may begin anywhere.
func (b *births) groups(q bitset.Query, n, count int) []int64 {
	want := n * count
	out := make([]int64, 0, want)
	streak, expected := 0, int64(-1)
	for at, word := range b.words(q) {
		for ; word != 0; word &= word - 1 {
			bit := int64(bits.TrailingZeros64(word))
			if at.birth+bit != expected {
				out, streak = out[:len(out)-streak], 0
			}
			expected = at.birth + bit + 1
			out = append(out, at.index+bit)
			if streak++; streak == n {
				streak = 0
				if len(out) == want {
					return out
				}
			}
		}
	}
	return nil
}
