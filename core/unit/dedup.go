package unit

import (
	"transferqueue/core/internal/alike"
	"transferqueue/core/schema"
)

// once is a column whose equal rows are one, and the bytes of the rows that are left.
func once(c *schema.Column, data []byte) (schema.Column, [][]byte) {
	offsets := c.Offsets()
	row := func(i int) []byte { return data[offsets[i]:offsets[i+1]] }
	first := alike.Rows(c, row)
	if first == nil {
		return *c, [][]byte{data}
	}
	b := schema.NewBuilder(c.Field)
	place := make([]uint32, c.Rows)
	share := make([]uint32, c.Rows)
	var pieces [][]byte
	for i, k := range first {
		if int(k) == i {
			place[i] = uint32(len(pieces))
			b.AppendRows(c, i, i+1)
			pieces = append(pieces, row(i))
		}
		share[i] = place[k]
	}
	out := b.Column()
	out.Share = share
	return out, pieces
}
