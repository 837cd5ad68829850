package unit

import (
	"context"
	"time"

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

	// What a unit in another process is told instead of Operands' bytes and of Stage: where the operands are staged (nil: in
	// Operands), and how long the result may wait for memory.
	Staged store.Staged
	Wait   time.Duration
}

// ParseSpec is the share of a put with a data parser that one unit stores.
type ParseSpec struct {
	Partition string
	Keys      []string
	Rows      int
	Operands  []Operand
	Callable  []byte
	Dedup     []string // fields whose equal results are stored once
	Stage     func(columns []schema.Column) (store.Staged, error)

	Staged store.Staged // as in an UpdateSpec
	Wait   time.Duration
}

// Transformed is staged work: the columns as they will be stored.
type Transformed struct {
	Columns []schema.Column
	Staged  store.Staged
}

// Query asks for cells.
type Query struct {
	Partition string
	Fields    []string
	Samples   []schema.Sample
	Apart     bool  // one lease per field instead of one for all
	Later     bool  // what lies on disk is not loaded; Piece reads it
	Inline    int64 // a unit in another process sends the bytes when they are not more, and keeps no lease then unless Keep
	Keep      bool
}

// Cells is what a read has found.
type Cells struct {
	Columns []store.Leased
	Leases  []store.Lease // one for all columns, or one per column; none when Payload has the bytes and Keep was not asked for
	Payload []byte        // the bytes of all columns, one after another
	Filled  bool          // Payload has them
}

// Release ends all leases.
func (c *Cells) Release() {
	for _, l := range c.Leases {
		l.Release()
	}
	c.Leases = nil
}

// Reading is a read that has taken its place among the requests of its unit.
type Reading interface {
	// Ready reports that Wait returns at once.
	Ready() bool
	// Wait must be called once. When ctx ends first, nothing stays leased.
	Wait(ctx context.Context) (*Cells, error)
}

// Deleting is a delete that has taken its place among the requests of its unit.
type Deleting interface {
	// Done is closed when the unit has answered or is gone.
	Done() <-chan struct{}
	// Err is valid then.
	Err() error
}
