// Package merge computes the native merges of kv_update: what a cell holds after new bytes meet the stored ones.
//
// The functions are pure: they take descriptors and bytes and return descriptors and bytes, keep nothing between calls and
// may be called from any goroutine. Work is done a column at a time in two phases, so that an update can be refused
// before any memory is written: Plan checks every row and says what the result looks like, then the caller reserves
// room for it and Apply fills that room.
//
//	merge     result of one row                                  works on
//	concat    stored rows followed by new rows along dim 0       tensors of rank 1 and more, equal in all other dims
//	add       stored + new, element by element                   tensors of equal shape
//	max, min  the larger, the smaller element; NaN wins          tensors of equal shape that are not complex
//	replace   new                                                anything
//
// Kind and dtype of a cell never change. Elements are little endian, as torch lays them out on amd64 and arm64, and may
// lie at any address. Arithmetic follows torch: integers wrap, bool add is a logical or, and the floating point types of 16
// and 8 bits are computed in float32 and rounded to nearest even, overflow going where torch's conversion sends it
// (see small.go).
package merge

import (
	"sort"

	"transferqueue/core/schema"
)

// rule says how the shapes of a merge go together and how its bytes are made.
type rule uint8

const (
	join     rule = iota + 1 // along dim 0: bytes of a row behind bytes of a row
	pairwise                 // a kernel over elements of equal shapes
	takeNew
)

// Merge is one native merge. The zero value is not usable; Lookup returns the ones there are.
type Merge struct {
	name    string
	rule    rule
	kernels map[schema.DType]kernel // of a pairwise rule; an absent dtype has no such operation
}

var merges = map[string]Merge{
	"concat":  {name: "concat", rule: join},
	"add":     {name: "add", rule: pairwise, kernels: addKernels},
	"max":     {name: "max", rule: pairwise, kernels: maxKernels},
	"min":     {name: "min", rule: pairwise, kernels: minKernels},
	"replace": {name: "replace", rule: takeNew},
}

// Lookup returns the merge of that name: "concat", "add", "replace", "max" or "min".
func Lookup(name string) (Merge, bool) {
	m, ok := merges[name]
	return m, ok
}

// Rows gives the bytes of a column from row i on: all of row i, and behind it as many of the following rows as lie tightly
// in the same piece of memory. Longer pieces make Apply faster; a piece of one row is enough. Every byte it returns
// must belong to the column, in order. It is never asked for a row beyond the last.
type Rows func(i int) []byte

// Apply fills out, which holds exactly the bytes of the result that Plan returned for the same columns. It does not
// retain any of its arguments; out must not overlap the inputs. It panics when a Rows returns less than a row.
func (m Merge) Apply(
	result *schema.Column, out []byte, old *schema.Column, oldRows Rows, added *schema.Column, newRows Rows,
) {
	switch m.rule {
	case join:
		joinRows(result, out, old, oldRows, added, newRows)
	case pairwise:
		pairRows(m.kernels[result.DType], result.Offsets(), out, oldRows, newRows)
	case takeNew:
		offsets := result.Offsets()
		eachPiece(offsets, newRows, nil, func(from, to int64, piece, _ []byte) { copy(out[from:to], piece) })
	}
}

const shortPiece = "merge: the bytes of a row are fewer than its shape says"

// joinRows writes every stored row followed by its new rows. The outermost dimension is the one that grows, so a joined row
// is the bytes of the two one after the other.
func joinRows(
	result *schema.Column, out []byte, old *schema.Column, oldRows Rows, added *schema.Column, newRows Rows,
) {
	offsets := result.Offsets()
	first, second := reader{offsets: old.Offsets(), rows: oldRows}, reader{offsets: added.Offsets(), rows: newRows}
	for i := range result.Rows {
		n := copy(out[offsets[i]:], first.row(i))
		copy(out[offsets[i]+int64(n):], second.row(i))
	}
}

// reader hands out single rows of a column that is read in order, asking for each piece of memory once.
type reader struct {
	offsets []int64
	rows    Rows
	piece   []byte // bytes from row next on
}

func (r *reader) row(i int) []byte {
	n := r.offsets[i+1] - r.offsets[i]
	if int64(len(r.piece)) < n {
		r.piece = r.rows(i)
	}
	if int64(len(r.piece)) < n {
		panic(shortPiece)
	}
	row := r.piece[:n:n]
	r.piece = r.piece[n:]
	return row
}

// pairRows runs a kernel over the longest pieces that both sides have in one place.
func pairRows(run kernel, offsets []int64, out []byte, oldRows, newRows Rows) {
	eachPiece(offsets, oldRows, newRows, func(from, to int64, a, b []byte) { run(out[from:to], a, b) })
}

// eachPiece cuts the rows described by offsets into runs of whole rows that lie tightly in a, and in b unless it is nil, and
// calls do with the byte range of each run and with its bytes.
func eachPiece(offsets []int64, a, b Rows, do func(from, to int64, a, b []byte)) {
	var pieceA, pieceB []byte
	rows := len(offsets) - 1
	for i := 0; i < rows; {
		from := offsets[i]
		row := offsets[i+1] - from
		if int64(len(pieceA)) < row {
			pieceA = a(i)
		}
		room := len(pieceA)
		if b != nil {
			if int64(len(pieceB)) < row {
				pieceB = b(i)
			}
			room = min(room, len(pieceB))
		}
		// The first row end beyond the room; the row before it is the last that fits.
		next := i + sort.Search(rows-i, func(k int) bool { return offsets[i+k+1]-from > int64(room) })
		if next == i {
			panic(shortPiece)
		}
		n := offsets[next] - from
		if b == nil {
			do(from, offsets[next], pieceA[:n], nil)
		} else {
			do(from, offsets[next], pieceA[:n], pieceB[:n])
			pieceB = pieceB[n:]
		}
		pieceA = pieceA[n:]
		i = next
	}
}
