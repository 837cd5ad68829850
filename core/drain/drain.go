// Package drain is the job that moves samples off a unit: in which batches, how often something is tried, how fast, and what
// has become of it. It knows nothing of units: what moves a batch is a Session.
//
//	PENDING -> RUNNING -> SUCCEEDED | PARTIAL | FAILED
//	PENDING | RUNNING -> CANCELLING -> CANCELLED
//
// SUCCEEDED means that the unit itself has reported that it holds nothing. PARTIAL means that some cells could not be moved, or
// that time was over; FAILED that the job could not go on, most likely because its unit is gone. Whatever has not moved is where
// it was.
//
// A job walks over the samples of its unit, a bounded number at a step, and moves them in batches. What cannot be moved at the
// moment (no other unit has room, somebody writes it slowly) is passed over and found again by the next walk; it does not keep
// others from moving. Walks that achieve nothing become rare. A sample with a cell that cannot be copied is tried Attempts times and
// then stays as a whole, until somebody clears it.
package drain

import (
	"context"
	"fmt"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
)

// State of a job.
type State string

// The states. The last four are final.
const (
	Pending    State = "PENDING"
	Running    State = "RUNNING"
	Cancelling State = "CANCELLING"
	Succeeded  State = "SUCCEEDED"
	Partial    State = "PARTIAL"
	Failed     State = "FAILED"
	Cancelled  State = "CANCELLED"
)

// Final reports that the job has ended.
func (s State) Final() bool {
	return s == Succeeded || s == Partial || s == Failed || s == Cancelled
}

// The phases of a running job.
const (
	Copying = "copying"
	Waiting = "waiting" // everything has moved, but somebody still uses what the unit has kept for him
)

// The reasons why something does not move at the moment.
const (
	NoCapacity = "NO_CAPACITY" // no other unit has room
	Writing    = "WRITING"     // somebody writes it who takes time
	Retrying   = "RETRYING"    // it has failed, or no other unit can be reached, and is tried again
	Pinned     = "PINNED"      // readers hold what has moved already
	Staged     = "STAGED"      // writes are staged on the unit
	Clearing   = "CLEARING"    // the unit has not answered to a clear

	StreamBroken = "STREAM_BROKEN" // the unit answers, but its payload does not come
)

// Tiers of a store, as indexes.
const (
	Memory = iota
	LocalDisk
	NumTiers
)

// Options of a job.
type Options struct {
	Slots    int           // batches at a time
	Inflight int64         // bytes of all batches at a time; a sample that is larger moves alone
	Rate     int64         // bytes per second, 0: no limit
	Deadline time.Duration // 0: none
	Began    time.Time     // when the deadline has begun to run; zero: now
	Attempts int           // tries of a cell
}

// batchBytes is the most bytes of a batch but for a single sample: who writes to its samples waits for so long.
const batchBytes = 8 << 20

// batchSamples is the most samples of a batch.
const batchSamples = 256

// share is the part of Inflight that each batch may use.
func (o *Options) share() int64 { return max(o.Inflight/int64(o.Slots), 1) }

// limit is how many bytes a batch should have.
func (o *Options) limit() int64 {
	most := min(batchBytes, o.share())
	if o.Rate > 0 {
		most = min(most, o.Rate/int64(4*o.Slots))
	}
	return max(most, 1)
}

// Batch is samples of one partition.
type Batch struct {
	Partition string
	Samples   []schema.Sample
	// Wait is how long it waits in line with slow writers of its sample, which is the only one then; after that they are busy.
	Wait time.Duration
	// Bytes is not 0 when its only sample has more than the share of a batch: so many.
	Bytes int64
}

// Counted is cells by tier.
type Counted struct{ Cells, Bytes [NumTiers]int64 }

func (c *Counted) add(o *Counted) {
	for t := range NumTiers {
		c.Cells[t] += o.Cells[t]
		c.Bytes[t] += o.Bytes[t]
	}
}

func (c *Counted) cells() int64 { return c.Cells[Memory] + c.Cells[LocalDisk] }
func (c *Counted) bytes() int64 { return c.Bytes[Memory] + c.Bytes[LocalDisk] }

// Moved is what has come of a batch, also when there is an error.
type Moved struct {
	Counted
	Samples int // that live elsewhere now, or nowhere any more
	Left    []schema.Sample
	Busy    int   // somebody writes them
	Large   int64 // not 0: the first of Left has more bytes than may move: so many
}

// Add adds what has come of another batch, but for what is left of it and why.
func (m *Moved) Add(o *Moved) {
	m.add(&o.Counted)
	m.Samples += o.Samples
	m.Busy += o.Busy
}

// Held is what a unit holds.
type Held struct {
	Counted
	Samples, Leases, Staged, Other int64
	Moving                         bool // somebody else moves samples off it, or has while it was asked
}

// empty reports that the unit has nothing at all.
func (h *Held) empty() bool {
	return !h.Moving && h.Samples == 0 && h.Leases == 0 && h.Staged == 0 && h.Other == 0 && h.cells() == 0 && h.bytes() == 0
}

// CellError is about one cell that cannot be copied.
type CellError struct {
	Partition, Field string
	Sample           schema.Sample
	Fields           []string // of the sample
	Key              string   // "" when it has none
	Keyed            bool
	Cause            error
}

func (e *CellError) Error() string {
	return fmt.Sprintf("partition %q: sample %d: field %q: %v", e.Partition, e.Sample.Index, e.Field, e.Cause)
}

// Unwrap returns the cause.
func (e *CellError) Unwrap() error { return e.Cause }

// LostError says that the unit that is drained is gone.
type LostError struct{ Cause error }

func (e *LostError) Error() string { return "SOURCE_LOST: " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *LostError) Unwrap() error { return e.Cause }

// StreamError says that the unit that is drained answers, but that its payload does not come.
type StreamError struct{ Cause error }

func (e *StreamError) Error() string { return e.Cause.Error() }

// Unwrap returns the cause.
func (e *StreamError) Unwrap() error { return e.Cause }

// Session is what a job moves samples in. List and Freed are quick.
type Session interface {
	// List returns some samples that are on the unit, from a cursor on, and where to go on.
	List(from catalog.Cursor, most int) (b Batch, next catalog.Cursor, end bool)
	// Move moves samples of a batch, as many as have limit bytes, at least one, but none that has more than most. *CellError,
	// *LostError, *StreamError, and ResourceExhausted when no unit has room are told apart from other errors.
	Move(ctx context.Context, b *Batch, limit, most int64) (Moved, error)
	// Held asks the unit what it holds. Recount looks for what it holds and should not.
	Held(ctx context.Context, recount bool) (Held, error)
	// Freed returns a channel that is closed when room was freed somewhere. Take it before looking for room.
	Freed() <-chan struct{}
	// End tells how the job ends, before anybody else hears of it. After an error it has failed.
	End(s Status) error
}
