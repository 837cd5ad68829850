package catalog

import "iter"

// pageSize is the number of values that are allocated together.
const pageSize = 1024

// paged is an array indexed by row, of which only the pages that were written exist; the others read as zero values.
type paged[T any] struct {
	first int64 // number of the page pages[0]
	pages []*[pageSize]T
}

// get returns the value at i.
func (a *paged[T]) get(i int64) (v T) {
	at := i/pageSize - a.first
	if at < 0 || at >= int64(len(a.pages)) || a.pages[at] == nil {
		return v
	}
	return a.pages[at][i%pageSize]
}

// at returns the place of value i, allocating its page.
func (a *paged[T]) at(i int64) *T {
	number := i / pageSize
	switch end := a.first + int64(len(a.pages)); {
	case len(a.pages) == 0:
		a.first, a.pages = number, make([]*[pageSize]T, 1)
	case number >= end:
		a.pages = append(a.pages, make([]*[pageSize]T, number-end+1)...)
	case number < a.first:
		a.pages = append(make([]*[pageSize]T, a.first-number), a.pages...)
		a.first = number
	}
	p := &a.pages[number-a.first]
	if *p == nil {
		*p = new([pageSize]T)
	}
	return &(*p)[i%pageSize]
}

// clear makes value i zero without allocating anything.
func (a *paged[T]) clear(i int64) {
	at := i/pageSize - a.first
	if at >= 0 && at < int64(len(a.pages)) && a.pages[at] != nil {
		var zero T
		a.pages[at][i%pageSize] = zero
	}
}

// has reports whether the page of value i exists.
func (a *paged[T]) has(i int64) bool {
	at := i/pageSize - a.first
	return at >= 0 && at < int64(len(a.pages)) && a.pages[at] != nil
}

// spans yields the first index of every page that exists.
func (a *paged[T]) spans() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for at := range a.pages {
			if a.pages[at] != nil && !yield((a.first+int64(at))*pageSize) {
				return
			}
		}
	}
}
