package schema

import (
	"slices"

	"transferqueue/core/tqerr"
)

// Samples is how many samples the rows of a column are for.
func (c *Column) Samples() int {
	if c.Share != nil {
		return len(c.Share)
	}
	return c.Rows
}

// checkShare refuses rows that are not there, and rows that no sample has.
func (c *Column) checkShare() error {
	if c.Share == nil {
		return nil
	}
	held, left := make([]bool, c.Rows), c.Rows
	for i, row := range c.Share {
		if int64(row) >= int64(c.Rows) {
			return tqerr.New(tqerr.InvalidArgument, "field %q: sample %d has row %d of %d", c.Field, i, row, c.Rows)
		}
		if !held[row] {
			held[row] = true
			left--
		}
	}
	if left > 0 {
		return tqerr.New(tqerr.InvalidArgument, "field %q: %d of %d rows are those of no sample", c.Field, left, c.Rows)
	}
	return nil
}

// Alike returns a function that reports whether two rows look alike, so that they can be one if their bytes are equal too.
func (c *Column) Alike() func(i, j int) bool {
	switch c.Form {
	case Varying:
		return func(i, j int) bool { return c.Lengths[i] == c.Lengths[j] }
	case Objects:
		return func(i, j int) bool { return c.Sizes[i] == c.Sizes[j] && c.Codecs[i] == c.Codecs[j] }
	case Free:
		starts := make([]int, c.Rows+1)
		for i, n := range c.NDims {
			starts[i+1] = starts[i] + int(n)
		}
		shape := func(i int) []int64 { return c.Dims[starts[i]:starts[i+1]] }
		return func(i, j int) bool { return slices.Equal(shape(i), shape(j)) }
	default:
		return func(int, int) bool { return true }
	}
}
