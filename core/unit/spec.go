package unit

import (
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// Operand is a column of a write with its bytes, rows tightly packed.
type Operand struct {
	Column schema.Column
	Bytes  []byte
}

// UpdateSpec is the share of an update that one unit computes.
type UpdateSpec struct {
	Partition string
	Samples   []schema.Sample
	Keys      []string // nil when the rows are not named by keys
	Operands  []Operand
	Merge     string // native merge, or "" for Callable
	Callable  []byte
	Stage     func(columns []schema.Column) (store.Staged, error) // reserves memory for the result
}

// ParseSpec is the share of a put with a data parser that one unit stores.
type ParseSpec struct {
	Partition string
	Keys      []string
	Rows      int
	Operands  []Operand
	Callable  []byte
	Stage     func(columns []schema.Column) (store.Staged, error)
}

// Transformed is staged work: the columns as they will be stored.
type Transformed struct {
	Columns []schema.Column
	Staged  store.Staged
}
