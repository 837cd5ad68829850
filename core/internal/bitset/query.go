package bitset

import (
	"iter"
	"math/bits"
)

// Query selects what is in every set of All and in no set of Not. All must not be empty. It reads the sets when it is
// scanned; they must not change during a scan.
type Query struct {
	All []*Set
	Not []*Set
}

// Words yields the words that have a selected member, ascending: 64*w is the number of the lowest bit.
func (q Query) Words() iter.Seq2[int64, uint64] {
	return func(yield func(int64, uint64) bool) {
		lead := q.sparsest()
		for at, p := range lead.pages {
			if p.words != nil && !q.scanPage(lead.first+int64(at), yield) {
				return
			}
		}
	}
}

// sparsest picks the set whose pages are walked: pages it lacks are skipped without looking at the others.
func (q Query) sparsest() *Set {
	lead := q.All[0]
	for _, s := range q.All[1:] {
		if s.n < lead.n {
			lead = s
		}
	}
	return lead
}

// scanPage reports false when the scan is over.
func (q Query) scanPage(number int64, yield func(int64, uint64) bool) bool {
	var words [pageWords]uint64
	if !q.combine(number, &words) {
		return true
	}
	for i, word := range words {
		if word != 0 && !yield(number<<6+int64(i), word) {
			return false
		}
	}
	return true
}

// combine computes one page of the result; false means that it is empty for lack of a page.
func (q Query) combine(number int64, out *[pageWords]uint64) bool {
	for i, s := range q.All {
		words := s.page(number)
		if words == nil {
			return false
		}
		if i == 0 {
			*out = *words
			continue
		}
		for k := range out {
			out[k] &= words[k]
		}
	}
	for _, s := range q.Not {
		if words := s.page(number); words != nil {
			for k := range out {
				out[k] &^= words[k]
			}
		}
	}
	return true
}

func (s *Set) page(number int64) *[pageWords]uint64 {
	at := number - s.first
	if at < 0 || at >= int64(len(s.pages)) {
		return nil
	}
	return s.pages[at].words
}

// Word returns the selected among the 64 from 64*w on as bits, the smallest in the lowest bit.
func (q Query) Word(w int64) uint64 {
	word := q.All[0].word(w)
	for _, s := range q.Not {
		if word == 0 {
			return 0
		}
		word &^= s.word(w)
	}
	for _, s := range q.All[1:] {
		if word == 0 {
			return 0
		}
		word &= s.word(w)
	}
	return word
}

// Count returns how many are selected, but counts no further than limit when limit is not negative.
func (q Query) Count(limit int) int {
	n := 0
	for _, word := range q.Words() {
		n += bits.OnesCount64(word)
		if limit >= 0 && n >= limit {
			return limit
		}
	}
	return n
}

// Append appends the selected members ascending, at most limit of them when limit is not negative.
func (q Query) Append(dst []int64, limit int) []int64 {
	if limit == 0 {
		return dst
	}
	for w, word := range q.Words() {
		for ; word != 0; word &= word - 1 {
			dst = append(dst, w<<6+int64(bits.TrailingZeros64(word)))
			if limit--; limit == 0 {
				return dst
			}
		}
	}
	return dst
}

// Members appends all members of the set ascending.
func (s *Set) Members(dst []int64) []int64 { return Query{All: []*Set{s}}.Append(dst, -1) }

// Filter returns those of the indexes that are selected, in their order, in a slice of its own.
func (q Query) Filter(indexes []int64) []int64 {
	out := make([]int64, 0, len(indexes))
	for _, i := range indexes {
		if i >= 0 && q.Has(i) {
			out = append(out, i)
		}
	}
	return out
}

// Has reports whether i is selected.
func (q Query) Has(i int64) bool {
	for _, s := range q.All {
		if !s.Has(i) {
			return false
		}
	}
	for _, s := range q.Not {
		if s.Has(i) {
			return false
		}
	}
	return true
}
