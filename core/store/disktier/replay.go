package disktier

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"transferqueue/core/store"
)

// restored is rows on disk that are cells.
type restored = entry

// replay is the state that frames lead to: for every cell the entry that bound it last, and the row there.
type replay struct {
	columns map[[2]string]map[int64]boundCell
	held    map[uint64][]entry // by number
	order   int
	owner   string
	change  uint64
}

type boundCell struct {
	entry *entry
	row   int
	seq   int // of the entry
}

func newReplay() *replay {
	return &replay{columns: map[[2]string]map[int64]boundCell{}, held: map[uint64][]entry{}}
}

// tail is what lies behind the frames that count.
type tail struct {
	data  []byte
	first int64 // bytes of the first frame
}

// read applies all frames. What is not a frame must be the torn end of the file: when all of it was written, or a whole frame lies
// behind it that was made after the missing one had become durable, the index is damaged.
func (r *replay) read(data []byte) (last uint64, rest tail, err error) {
	all := int64(len(data))
	for len(data) > 0 {
		h, body, ok := decodeFrame(data)
		if !ok || (last > 0 && h.number != last+1) {
			break
		}
		if err := r.apply(body); err != nil {
			return 0, rest, fmt.Errorf("frame %d: %w", h.number, err)
		}
		if last = h.number; rest.first == 0 {
			rest.first = frameBytes + int64(h.length)
		}
		data = data[frameBytes+int64(h.length):]
	}
	if last == 0 {
		return 0, rest, errors.New("its first frame is damaged")
	}
	at := headerBytes + all - int64(len(data))
	if damagedFrame(data, at) {
		return 0, rest, fmt.Errorf("frame %d is damaged, at byte %d", last+1, at)
	}
	for from := data; ; {
		next := bytes.Index(from, frameMagic)
		if next < 0 {
			break
		}
		from = from[next:]
		if h, _, ok := decodeFrame(from); ok && h.durable > last {
			return 0, rest, fmt.Errorf("frame %d is damaged, at byte %d; frame %d is not", last+1, at, h.number)
		}
		from = from[1:]
	}
	rest.data = data
	return last, rest, nil
}

// apply replays one frame.
func (r *replay) apply(body []byte) error {
	d := decoder{b: body}
	for len(d.b) > 0 {
		switch d.b[0] {
		case ownerEntry:
			d.byte()
			r.owner, r.change = d.text(), 0
			clear(r.held)
		case changeEntry:
			d.byte()
			r.change = d.uvarint(math.MaxUint64)
		case releaseEntry:
			d.byte()
			delete(r.held, d.uvarint(math.MaxUint64))
		case holdEntry:
			d.byte()
			txn := d.uvarint(math.MaxUint64)
			if e, ok := d.next(); ok && e.sums != nil {
				r.held[txn] = append(r.held[txn], e)
			} else {
				d.bad = true
			}
		default:
			if e, ok := d.next(); ok {
				r.cells(&e)
			}
		}
		if d.bad {
			return errors.New("an entry makes no sense")
		}
	}
	return nil
}

// cells replays a bind or a drop.
func (r *replay) cells(e *entry) {
	key := [2]string{e.partition, e.column.Field}
	cells := r.columns[key]
	if cells == nil {
		cells = map[int64]boundCell{}
		r.columns[key] = cells
	}
	r.order++
	for i, s := range e.samples {
		if e.sums == nil {
			delete(cells, s.Index)
		} else {
			cells[s.Index] = boundCell{e, i, r.order}
		}
	}
}

// entries returns the live rows: consecutive rows of one entry that live are one.
func (r *replay) entries() (out []restored) {
	keys := slices.Collect(maps.Keys(r.columns))
	slices.SortFunc(keys, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	for _, key := range keys {
		byEntry := map[int][]boundCell{}
		for _, c := range r.columns[key] {
			byEntry[c.seq] = append(byEntry[c.seq], c)
		}
		for _, seq := range slices.Sorted(maps.Keys(byEntry)) {
			rows := byEntry[seq]
			slices.SortFunc(rows, func(a, b boundCell) int { return a.row - b.row })
			for from := 0; from < len(rows); {
				to := from + 1
				for to < len(rows) && rows[to].row == rows[to-1].row+1 {
					to++
				}
				out = append(out, rows[from].entry.slice(rows[from].row, rows[from].row+to-from))
				from = to
			}
		}
	}
	return joinShared(out)
}

// joinShared makes the cells that name one block those of one entry: they share its only row.
func joinShared(list []restored) (out []restored) {
	first := map[store.Block]int{}
	for i := range list {
		e := &list[i]
		at, known := first[e.block]
		if known && e.block.Size > 0 && e.column.Rows == 1 && out[at].column.Rows == 1 {
			out[at].samples = append(slices.Clip(out[at].samples), e.samples...)
			continue
		}
		first[e.block] = len(out)
		out = append(out, *e)
	}
	return out
}

// slice is the rows [from, to) of a bind.
func (e *entry) slice(from, to int) entry {
	if from == 0 && to == len(e.samples) {
		return *e
	}
	offsets := e.column.Offsets()
	return entry{
		partition: e.partition, samples: e.samples[from:to], column: e.column.Slice(from, to), sums: e.sums[from:to],
		block: store.Block{Segment: e.block.Segment, Offset: e.block.Offset + offsets[from], Size: offsets[to] - offsets[from]},
	}
}
