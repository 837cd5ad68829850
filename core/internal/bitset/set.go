// Package bitset holds sets of small integers: row indexes of a partition. A Set is paged, so that a set whose members lie
// close together costs one bit per member wherever they lie; a Mask is a batch of indexes prepared once and applied to many
// sets; a Query scans the intersection of several sets word by word; Free hands out the smallest numbers not in use.
//
// Nothing here is synchronised. Methods that do not change a value may be called from many goroutines at once.
package bitset

import "math/bits"

const (
	wordBits  = 64
	pageWords = 64
)

// page is one allocated piece of a set; a page without members is not kept.
type page struct {
	words *[pageWords]uint64
	n     int
}

// Set is a set of non-negative integers. The zero value is empty.
type Set struct {
	first int64 // number of the page pages[0]
	pages []page
	n     int
}

// Count returns the number of members.
func (s *Set) Count() int { return s.n }

// Has reports whether i is a member.
func (s *Set) Has(i int64) bool { return s.word(i>>6)>>(uint64(i)&63)&1 != 0 }

// word returns the 64 members from 64*w on as bits.
func (s *Set) word(w int64) uint64 {
	at := w>>6 - s.first
	if at < 0 || at >= int64(len(s.pages)) || s.pages[at].words == nil {
		return 0
	}
	return s.pages[at].words[w&63]
}

// Word returns the 64 members from 64*w on as bits, the smallest in the lowest bit.
func (s *Set) Word(w int64) uint64 { return s.word(w) }

// HasIn reports whether some i with from <= i < to is a member.
func (s *Set) HasIn(from, to int64) bool {
	for w := from >> 6; w<<6 < to; w++ {
		word := s.word(w)
		if low := from - w<<6; low > 0 {
			word &= ^uint64(0) << uint64(low)
		}
		if high := to - w<<6; high < wordBits {
			word &= 1<<uint64(high) - 1
		}
		if word != 0 {
			return true
		}
	}
	return false
}

// Add makes i a member and reports whether it was none before.
func (s *Set) Add(i int64) bool { return s.addBits(i>>6, 1<<(uint64(i)&63)) > 0 }

// Remove takes i out and reports whether it was a member.
func (s *Set) Remove(i int64) bool { return s.removeBits(i>>6, 1<<(uint64(i)&63)) > 0 }

// Reset takes all members out and gives the memory back.
func (s *Set) Reset() { *s = Set{} }

func (s *Set) addBits(w int64, mask uint64) int {
	p := s.grow(w >> 6)
	if p.words == nil {
		p.words = new([pageWords]uint64)
	}
	word := &p.words[w&63]
	added := bits.OnesCount64(mask &^ *word)
	*word |= mask
	p.n += added
	s.n += added
	return added
}

func (s *Set) removeBits(w int64, mask uint64) int {
	at := w>>6 - s.first
	if at < 0 || at >= int64(len(s.pages)) || s.pages[at].words == nil {
		return 0
	}
	p := &s.pages[at]
	word := &p.words[w&63]
	removed := bits.OnesCount64(mask & *word)
	*word &^= mask
	p.n -= removed
	s.n -= removed
	switch {
	case s.n == 0:
		s.Reset()
	case p.n == 0:
		p.words = nil
	}
	return removed
}

// grow returns the entry of a page, extending the range of pages in either direction.
func (s *Set) grow(number int64) *page {
	switch end := s.first + int64(len(s.pages)); {
	case len(s.pages) == 0:
		s.first, s.pages = number, make([]page, 1)
	case number >= end:
		s.pages = append(s.pages, make([]page, number-end+1)...)
	case number < s.first:
		s.pages = append(make([]page, s.first-number, s.first-number+int64(len(s.pages))), s.pages...)
		s.first = number
	}
	return &s.pages[number-s.first]
}
