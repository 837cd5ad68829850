package bitset

import (
	"iter"
	"math/bits"
)

// Mask is a batch of indexes, folded into words. It is built once and applied to many sets: a thousand neighbouring
// indexes are sixteen words. Indexes may be unordered and may repeat; then a word may occur more than once.
type Mask []maskWord

type maskWord struct {
	word int64
	bits uint64
}

// NewMask folds indexes, none of which may be negative.
func NewMask(indexes []int64) Mask {
	m := make(Mask, 0, 1+len(indexes)/wordBits)
	for _, i := range indexes {
		w, bit := i>>6, uint64(1)<<(uint64(i)&63)
		if last := len(m) - 1; last >= 0 && m[last].word == w {
			m[last].bits |= bit
			continue
		}
		m = append(m, maskWord{w, bit})
	}
	return m
}

// All yields the indexes of the mask; a repeated one may come again.
func (m Mask) All() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for _, w := range m {
			for rest := w.bits; rest != 0; rest &= rest - 1 {
				if !yield(w.word<<6 + int64(bits.TrailingZeros64(rest))) {
					return
				}
			}
		}
	}
}

// AddAll makes all indexes of the mask members and returns how many were none before.
func (s *Set) AddAll(m Mask) int {
	n := 0
	for _, w := range m {
		n += s.addBits(w.word, w.bits)
	}
	return n
}

// RemoveAll takes all indexes of the mask out and returns how many were members.
func (s *Set) RemoveAll(m Mask) int {
	n := 0
	for _, w := range m {
		n += s.removeBits(w.word, w.bits)
	}
	return n
}

// HasAll reports whether every index of the mask is a member.
func (s *Set) HasAll(m Mask) bool {
	for _, w := range m {
		if w.bits&^s.word(w.word) != 0 {
			return false
		}
	}
	return true
}

// HasAny reports whether some index of the mask is a member.
func (s *Set) HasAny(m Mask) bool {
	for _, w := range m {
		if w.bits&s.word(w.word) != 0 {
			return true
		}
	}
	return false
}

// Intersect returns the part of the mask that is in the set, without repetitions when the set holds each index once in m.
func (s *Set) Intersect(m Mask) Mask {
	out := make(Mask, 0, len(m))
	for _, w := range m {
		if hit := w.bits & s.word(w.word); hit != 0 {
			out = append(out, maskWord{w.word, hit})
		}
	}
	return out
}
