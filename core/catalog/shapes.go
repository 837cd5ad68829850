package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
)

// shapes remembers the shape of every holder of a field: one base shape, and a number per row that deviates from it. While
// all agree it costs nothing per row.
type shapes struct {
	base      []int64 // nil: no holder yet
	ids       paged[uint32]
	others    []shape  // the shape with number n is others[n-1]
	unused    []uint32 // numbers without rows
	known     shapeTable
	deviating int // rows with a number
}

// shape is one numbered shape and how many rows have it.
type shape struct {
	dims []int64
	rows int
}

// of returns the shape of a row that holds the field.
func (s *shapes) of(i int64) []int64 {
	if s.deviating == 0 {
		return s.base
	}
	if id := s.ids.get(i); id != 0 {
		return s.others[id-1].dims
	}
	return s.base
}

// write sets the shapes of a column's rows; holders counts all rows of the field, these included.
func (s *shapes) write(col *schema.Column, indexes []int64, holders int) {
	if s.base == nil {
		s.base = append([]int64{}, firstShape(col)...)
	}
	if col.Form == schema.Uniform && s.deviating == 0 && slices.Equal(col.Shape, s.base) {
		return
	}
	for k, dims := range col.Shapes() {
		i, id := indexes[k], uint32(0)
		if !slices.Equal(dims, s.base) {
			if id = s.ids.get(i); id != 0 && slices.Equal(dims, s.others[id-1].dims) {
				continue
			}
			id = s.number(dims)
		}
		s.set(i, id)
	}
	s.settle(holders)
}

func firstShape(col *schema.Column) []int64 {
	for _, dims := range col.Shapes() {
		return dims
	}
	return nil
}

// erase forgets rows that do not hold the field any more; holders counts those that still do.
func (s *shapes) erase(rows bitset.Mask, holders int) {
	if s.deviating == 0 {
		return
	}
	for i := range rows.All() {
		s.set(i, 0)
	}
	s.settle(holders)
}

// number returns the number of a shape, giving it one if it has none.
func (s *shapes) number(dims []int64) uint32 {
	if id := s.known.find(s.others, dims); id != 0 {
		return id
	}
	entry := shape{dims: append([]int64{}, dims...)}
	var id uint32
	if n := len(s.unused); n > 0 {
		id, s.unused = s.unused[n-1], s.unused[:n-1]
		s.others[id-1] = entry
	} else {
		s.others = append(s.others, entry)
		id = uint32(len(s.others))
	}
	s.known.add(s.others, id)
	return id
}

// set gives row i a number, 0 for the base shape. A row that did not hold the field has 0 already.
func (s *shapes) set(i int64, id uint32) {
	old := s.ids.get(i)
	if old == id {
		return
	}
	if old != 0 {
		s.drop(old)
		s.deviating--
	}
	if id != 0 {
		s.others[id-1].rows++
		s.deviating++
		*s.ids.at(i) = id
	} else {
		s.ids.clear(i)
	}
}

// drop takes one row from a numbered shape and frees the number with the last.
func (s *shapes) drop(id uint32) {
	entry := &s.others[id-1]
	if entry.rows--; entry.rows > 0 {
		return
	}
	s.known.remove(s.others, id)
	*entry = shape{}
	s.unused = append(s.unused, id)
}

// settle goes back to one shape for all when the rows agree again.
func (s *shapes) settle(holders int) {
	switch {
	case s.deviating == 0:
		*s = shapes{base: s.base}
	case s.deviating == holders && s.known.n == 1:
		*s = shapes{base: s.others[s.known.any()-1].dims}
	}
}
