package storetest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// filled is a column with the bytes of its rows.
type filled struct {
	schema.Column
	rows [][]byte
}

// row is a row as a reader sees it.
type row struct {
	kind  schema.Kind
	dtype schema.DType
	shape string
	codec schema.Codec
	bytes string
}

// list spells every row out, whatever the form.
func (f filled) list() []row {
	out := make([]row, f.Rows)
	for i, shape := range f.Shapes() {
		out[i] = row{kind: f.Kind, dtype: f.DType, bytes: string(f.rows[i])}
		if f.Form == schema.Objects {
			out[i].codec = f.Codecs[i]
		} else {
			out[i].shape = fmt.Sprint(slices.Clone(shape))
		}
	}
	return out
}

// pick returns the rows at positions, as a reader that asks for them gets them.
func (f filled) pick(positions ...int) filled {
	b := schema.NewBuilder(f.Field)
	out := filled{}
	for _, i := range positions {
		b.Append(f.Slice(i, i+1))
		out.rows = append(out.rows, f.rows[i])
	}
	out.Column = b.Column()
	return out
}

// expand spells out the rows of all samples of a column with shared ones.
func (f filled) expand() filled {
	if f.Share == nil {
		return f
	}
	positions := make([]int, len(f.Share))
	for i, row := range f.Share {
		positions[i] = int(row)
	}
	return f.pick(positions...)
}

// withBytes gives every row of a column bytes that depend on the seed and the row.
func withBytes(c schema.Column, seed uint64) filled {
	rnd := rand.New(rand.NewPCG(seed, 0))
	offsets := c.Offsets()
	f := filled{Column: c, rows: make([][]byte, c.Rows)}
	for i := range f.rows {
		f.rows[i] = make([]byte, offsets[i+1]-offsets[i])
		for j := range f.rows[i] {
			f.rows[i][j] = byte(rnd.Uint32())
		}
	}
	return f
}

// dense is a float32 column whose rows have the given shape.
func dense(field string, rows int, seed uint64, shape ...int64) filled {
	return withBytes(schema.Column{
		Field: field, Kind: schema.Tensor, DType: schema.Float32, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape,
	}, seed)
}

// bytesColumn is a uint8 column whose rows have size bytes.
func bytesColumn(field string, rows int, size int64, seed uint64) filled {
	return withBytes(schema.Column{
		Field: field, Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: []int64{size},
	}, seed)
}

// varying is an int64 column of rows [length, 2].
func varying(field string, seed uint64, lengths ...int64) filled {
	return withBytes(schema.Column{
		Field: field, Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: len(lengths), Form: schema.Varying,
		Shape: []int64{0, 2}, Vary: 0, Lengths: lengths,
	}, seed)
}

// free is an int64 column of rows of any shape.
func free(field string, seed uint64, shapes ...[]int64) filled {
	c := schema.Column{Field: field, Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: len(shapes), Form: schema.Free}
	for _, shape := range shapes {
		c.NDims, c.Dims = append(c.NDims, uint8(len(shape))), append(c.Dims, shape...)
	}
	return withBytes(c, seed)
}

// object is a column of opaque values of the given sizes; the codec of row i is i+1.
func object(field string, seed uint64, sizes ...int64) filled {
	c := schema.Column{Field: field, Kind: schema.Object, Rows: len(sizes), Form: schema.Objects, Sizes: sizes}
	for i := range sizes {
		c.Codecs = append(c.Codecs, schema.Codec(i%200+1))
	}
	return withBytes(c, seed)
}

func descriptors(columns []filled) []schema.Column {
	out := make([]schema.Column, len(columns))
	for i := range columns {
		out[i] = columns[i].Column
	}
	return out
}

func fill(s store.Store, tx store.Staged, columns []filled) {
	for i, b := range tx.Blocks() {
		to := s.Bytes(b)
		for _, bytes := range columns[i].rows {
			to = to[copy(to, bytes):]
		}
	}
}

// rowsOf copies a leased column out.
func rowsOf(s store.Store, l store.Leased) filled {
	out := filled{Column: l.Column}
	var data []byte
	rows := 0
	for _, run := range l.Runs {
		data = append(data, s.Bytes(run.Block)...)
		rows += run.Rows
	}
	offsets := l.Column.Offsets()
	if rows != l.Column.Rows || int64(len(data)) != offsets[l.Column.Rows] {
		panic(fmt.Sprintf("storetest: runs hold %d rows in %d bytes, the column %d in %d", rows, len(data), l.Column.Rows, offsets[l.Column.Rows]))
	}
	for i := range l.Column.Rows {
		out.rows = append(out.rows, data[offsets[i]:offsets[i+1]])
	}
	return out
}

// samples are count samples of generation 1 from an index on.
func samples(from int64, count int) []schema.Sample {
	out := make([]schema.Sample, count)
	for i := range out {
		out[i] = schema.Sample{Index: from + int64(i), Generation: 1}
	}
	return out
}

// newer are the same samples one generation later.
func newer(old []schema.Sample) []schema.Sample {
	out := slices.Clone(old)
	for i := range out {
		out[i].Generation++
	}
	return out
}

func at(from []schema.Sample, positions ...int) []schema.Sample {
	out := make([]schema.Sample, len(positions))
	for i, p := range positions {
		out[i] = from[p]
	}
	return out
}
