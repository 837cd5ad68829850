// Package alike finds the rows of a column that have the same bytes.
package alike

import (
	"bytes"
	"hash/maphash"

	"transferqueue/core/schema"
)

// Rows says for each row of a column which is the first that looks like it and has its bytes; nil when no two do. Rows without
// bytes are each the first of their kind. bytes are compared, so that no value takes the place of another.
func Rows(c *schema.Column, row func(i int) []byte) []int64 {
	type kind struct {
		hash uint64
		size int
	}
	seed := maphash.MakeSeed()
	like := c.Alike()
	first := make([]int64, c.Rows)
	seen := make(map[kind][]int64, c.Rows)
	at := make(map[*byte]int64, c.Rows) // rows by where they lie: of an expanded tensor all are one
	found := false
	for i := range c.Rows {
		first[i] = int64(i)
		data := row(i)
		if len(data) == 0 {
			continue
		}
		if k, known := at[&data[0]]; known && like(i, int(k)) && len(row(int(k))) == len(data) {
			first[i], found = first[k], true
			continue
		}
		at[&data[0]] = int64(i)
		key := kind{maphash.Bytes(seed, data), len(data)}
		equal := int64(-1)
		for _, k := range seen[key] {
			if like(i, int(k)) && bytes.Equal(row(int(k)), data) {
				equal = k
				break
			}
		}
		if equal >= 0 {
			first[i], found = equal, true
		} else {
			seen[key] = append(seen[key], int64(i))
		}
	}
	if !found {
		return nil
	}
	return first
}
