package disktier

import (
	"errors"

	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// wasteLeast is how much must be dead in a segment before anybody copies it.
const wasteLeast = 16 << 10

// wasteful reports whether a segment has much that is dead and cannot be punched, in bytes and as a share of something.
func wasteful(g *segment, of int64) bool {
	waste := g.resident() - g.live
	return waste >= wasteLeast && waste*5 > of
}

// victims are the segments that are worth copying. The open one is closed when it is one of them. Empty columns' blocks have
// no bytes and do not count.
func (t *Tier) victims() (out []uint32) {
	t.places.Lock()
	defer t.places.Unlock()
	total := int64(0)
	t.segments.Range(func(_, v any) bool {
		total += v.(*segment).resident()
		return true
	})
	t.segments.Range(func(_, v any) bool {
		switch g := v.(*segment); {
		case g.full && wasteful(g, g.resident()):
			out = append(out, g.number)
		case g == t.places.open && wasteful(g, total):
			t.places.open = nil
			if !t.retire(g) { // it could not be emptied before
				out = append(out, g.number)
			}
		}
		return true
	})
	return out
}

// Wasteful reports whether Compact has something to do.
func (t *Tier) Wasteful() bool {
	t.places.Lock()
	defer t.places.Unlock()
	total, found := int64(0), false
	t.segments.Range(func(_, v any) bool {
		total += v.(*segment).resident()
		return true
	})
	t.segments.Range(func(_, v any) bool {
		g := v.(*segment)
		found = (g.full && wasteful(g, g.resident())) || (g == t.places.open && wasteful(g, total))
		return !found
	})
	return found
}

// compactRounds bounds how often Compact looks again: what it empties makes the waste elsewhere a larger share.
const compactRounds = 4

// Compact copies the small values that live in wasteful segments, step by step, so that little space is needed beside them.
// Large ones stay: the pages around them can be punched. Readers and writers go on meanwhile. It returns the bytes copied.
func (t *Tier) Compact() (copied int64, err error) {
	for range compactRounds {
		n := int64(0)
		for _, number := range t.victims() {
			k, err := t.compactSegment(number)
			if n += k; err != nil {
				return copied + n, err
			}
		}
		if copied += n; n == 0 {
			break
		}
	}
	return copied, nil
}

func (t *Tier) compactSegment(number uint32) (copied int64, err error) {
	var step []table.Cells
	size := int64(0)
	move := func() error {
		n, err := t.compactStep(step)
		copied, step, size = copied+n, nil, 0
		return err
	}
	for _, l := range t.table.List(true, number) {
		if l.Bytes >= pageAlign {
			continue
		}
		step, size = append(step, l.Cells), size+l.Bytes
		if size >= t.opts.HeadroomBytes/4 {
			if err := move(); err != nil {
				return copied, err
			}
		}
	}
	return copied, move()
}

// compactStep moves some cells. On a full disk it takes the headroom, and puts it back when the step has freed as much.
func (t *Tier) compactStep(cells []table.Cells) (int64, error) {
	if len(cells) == 0 {
		return 0, nil
	}
	n, err := t.table.Move(cells, table.Compact, 0)
	if tqerr.CodeOf(err) != tqerr.ResourceExhausted {
		return n, errors.Join(err, t.Sync())
	}
	if t.reserve.Truncate(0) != nil {
		return n, err
	}
	if n, err = t.table.Move(cells, table.Compact, 0); err == nil {
		err = t.Sync()
	}
	if again := t.reserve.Allocate(0, t.opts.HeadroomBytes); again != nil && err == nil {
		err = t.failed(again, "reserve headroom")
	}
	return n, err
}
