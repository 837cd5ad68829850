package bitset

import "math/bits"

// Free hands out the smallest numbers that are not in use. It is a tree of words: a bit of the lowest level is set when
// its number is in use, a bit of a higher level when the word below it is full; so a free number is found in as many
// steps as there are levels, however many are in use. The zero value has every number free.
type Free struct {
	levels [][]uint64
	used   int
}

// Used returns how many numbers are in use.
func (f *Free) Used() int { return f.used }

// Has reports whether i is in use.
func (f *Free) Has(i int64) bool {
	if i < 0 || len(f.levels) == 0 || i>>6 >= int64(len(f.levels[0])) {
		return false
	}
	return f.levels[0][i>>6]>>(uint64(i)&63)&1 != 0
}

// Take appends the n smallest numbers that are free, ascending, and puts them in use.
func (f *Free) Take(dst []int64, n int) []int64 {
	f.used += n
	for n > 0 {
		w := f.firstOpen()
		word := f.levels[0][w]
		for ; n > 0 && word != ^uint64(0); n-- {
			bit := bits.TrailingZeros64(^word)
			word |= 1 << bit
			dst = append(dst, w<<6+int64(bit))
		}
		f.levels[0][w] = word
		if word == ^uint64(0) {
			f.fill(w)
		}
	}
	return dst
}

// Use puts one number in use and reports whether it was free.
func (f *Free) Use(i int64) bool {
	if f.Has(i) {
		return false
	}
	if len(f.levels) == 0 {
		f.levels = [][]uint64{{0}}
	}
	w := i >> 6
	for top := len(f.levels) - 1; w>>(6*top) > 0; top++ {
		full := uint64(0)
		if f.levels[top][0] == ^uint64(0) {
			full = 1
		}
		f.levels = append(f.levels, []uint64{full})
	}
	for level := range f.levels {
		at := w >> (6 * level)
		if more := at + 1 - int64(len(f.levels[level])); more > 0 {
			f.levels[level] = append(f.levels[level], make([]uint64, more)...)
		}
	}
	f.used++
	f.levels[0][w] |= 1 << (uint64(i) & 63)
	if f.levels[0][w] == ^uint64(0) {
		f.fill(w)
	}
	return true
}

// Release gives a number back that is in use.
func (f *Free) Release(i int64) {
	f.used--
	for level := range f.levels {
		word := &f.levels[level][i>>6]
		full := *word == ^uint64(0)
		*word &^= 1 << (uint64(i) & 63)
		if !full {
			return
		}
		i >>= 6
	}
}

// firstOpen returns the first word of the lowest level that has room, growing the tree when there is none.
func (f *Free) firstOpen() int64 {
	if len(f.levels) == 0 {
		f.levels = [][]uint64{{0}}
	}
	top := len(f.levels) - 1
	if f.levels[top][0] == ^uint64(0) {
		f.levels = append(f.levels, []uint64{1})
		top++
	}
	w := int64(0)
	for level := top; level > 0; level-- {
		w = w<<6 + int64(bits.TrailingZeros64(^f.levels[level][w]))
		for below := level - 1; int64(len(f.levels[below])) <= w; {
			f.levels[below] = append(f.levels[below], 0)
		}
	}
	return w
}

// fill tells the higher levels that a word of the lowest level has become full.
func (f *Free) fill(w int64) {
	for level := 1; level < len(f.levels); level++ {
		word := &f.levels[level][w>>6]
		*word |= 1 << (uint64(w) & 63)
		if *word != ^uint64(0) {
			return
		}
		w >>= 6
	}
}
