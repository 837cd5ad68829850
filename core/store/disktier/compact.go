package disktier

import (
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// compactStep is how many bytes are copied at a time: so much space compaction needs on a full disk.
const compactStep = 2 << 20

// wasteful reports whether a segment has much that is dead and cannot be punched, in bytes and as a share of something.
func wasteful(g *segment, of int64) bool {
	waste := g.resident() - g.live
	return waste >= pageAlign && waste*5 > of
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
			g.full, t.places.open = true, nil
			out = append(out, g.number)
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

// Compact copies what lives in wasteful segments, step by step, so that little space is needed beside them. Readers and
// writers go on meanwhile. It returns the bytes copied.
func (t *Tier) Compact() (copied int64, err error) {
	for _, number := range t.victims() {
		var step []table.Cells
		size := int64(0)
		list := t.table.List(true, number)
		for i := range list {
			step, size = append(step, list[i].Cells), size+list[i].Bytes
			if size < compactStep && i+1 < len(list) {
				continue
			}
			n, err := t.compactStep(step)
			if copied += n; err != nil {
				return copied, err
			}
			step, size = nil, 0
		}
	}
	return copied, nil
}

// compactStep moves some cells. On a full disk it takes the headroom, and puts it back when the step has freed as much.
func (t *Tier) compactStep(cells []table.Cells) (int64, error) {
	n, err := t.table.Move(cells, table.Compact, 0)
	if tqerr.CodeOf(err) != tqerr.ResourceExhausted {
		return n, err
	}
	if t.reserve.Truncate(0) != nil {
		return n, err
	}
	n, err = t.table.Move(cells, table.Compact, 0)
	if again := t.reserve.Allocate(0, t.opts.HeadroomBytes); again != nil && err == nil {
		err = t.failed(again, "reserve headroom")
	}
	return n, err
}
