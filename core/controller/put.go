package controller

import (
	"cmp"
	"context"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// txn is a write between its first request and its commit or abort.
type txn struct {
	s      *Server
	req    *wire.PutRequest
	write  catalog.Write
	rows   int
	units  []uint32 // per row, where its cells are staged
	shares []share
	inline []byte // the payload, when it came with the request and is not staged
	loans  *loans // of a write in two steps
}

// share is the part of a write that one unit stores.
type share struct {
	unit   Unit
	runs   []int64 // pairs [from, to) of rows
	rows   int
	cols   []schema.Column
	staged store.Staged // nil: nothing staged
}

func (t *txn) abort() {
	for _, sh := range t.shares {
		if sh.staged != nil {
			sh.staged.Abort()
		}
	}
}

// transforms reports that the stored bytes are not those of the request: an update or a parsed put.
func (t *txn) transforms() bool { return t.req.Update || len(t.req.Callable) > 0 }

func (c *call) newTxn() (*txn, error) {
	t := &txn{s: c.s, req: &wire.PutRequest{}}
	if err := c.decode(t.req); err != nil {
		return nil, err
	}
	r := t.req
	w := catalog.Write{Partition: r.Partition, Keys: r.Keys, Insert: r.Insert, Tags: r.Tags, Update: r.Update}
	for i := range r.Columns {
		w.Columns = append(w.Columns, schema.Column(r.Columns[i]))
	}
	t.rows = len(w.Keys) + w.Insert
	if r.Samples != nil {
		w.Samples = samplesOf(r.Samples)
		t.rows = len(w.Samples)
	}
	t.write = w
	if len(r.Callable) > 0 && len(w.Columns) == 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "a callable needs columns to work on")
	}
	if r.Inline {
		t.inline = c.req.Payload
		want := int64(0)
		for i := range w.Columns {
			want += w.Columns[i].Bytes()
		}
		if want != int64(len(t.inline)) {
			return nil, tqerr.New(tqerr.InvalidArgument, "payload of %d bytes, the columns say %d", len(t.inline), want)
		}
	}
	return t, nil
}

func samplesOf(s *wire.Samples) []schema.Sample {
	out := make([]schema.Sample, len(s.Indexes))
	for i, index := range s.Indexes {
		out[i].Index = index
		if i < len(s.Generations) {
			out[i].Generation = uint32(s.Generations[i])
		}
	}
	return out
}

func (c *call) put() (any, error) {
	t, err := c.newTxn()
	if err != nil {
		return nil, err
	}
	err = t.stage()
	if tqerr.CodeOf(err) == tqerr.ResourceExhausted && t.couldFit() {
		return c.later(func(ctx context.Context) (any, error) {
			if err := c.whenRoom(ctx, t.stage); err != nil {
				return nil, err
			}
			return c.grant(t)
		})
	}
	if err != nil {
		return nil, err
	}
	return c.grant(t)
}

// grant answers a staged write: with its blocks, or by finishing it when no bytes are to come.
func (c *call) grant(t *txn) (any, error) {
	if t.req.Inline || len(t.write.Columns) == 0 {
		return c.apply(t)
	}
	id := c.req.Sequence
	if id == 0 {
		t.abort()
		return nil, tqerr.New(tqerr.InvalidArgument, "a write in two steps needs a sequence")
	}
	t.loans = &loans{}
	if err := c.client.keepTxn(id, t); err != nil {
		t.abort()
		return nil, err
	}
	c.undo = func() {
		if t := c.client.takeTxn(id); t != nil {
			t.abort()
		}
	}
	reply := &wire.PutReply{Txn: id}
	for _, sh := range t.shares {
		part := wire.Part{Unit: sh.unit.ID(), Rows: sh.runs}
		for _, b := range sh.staged.Blocks() {
			part.Blocks = append(part.Blocks, wire.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size})
		}
		reply.Parts = append(reply.Parts, part)
	}
	return reply, nil
}

// stage validates the write, decides where its new rows go, and reserves memory; nothing is visible. An inline operand of a
// transformation stays in the request and needs no memory.
func (t *txn) stage() error {
	s := t.s
	rowBytes := rowSizes(t.write.Columns)
	rooms := s.rooms()
	s.mu.RLock()
	units, err := s.mu.cat.Check(&t.write)
	if err == nil {
		err = s.mu.cat.Place(units, hostOfWriter, rowBytes, rooms)
	}
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	t.units = units
	t.shares = t.split(units)
	if len(t.write.Columns) == 0 || (t.transforms() && t.req.Inline) {
		return nil
	}
	for _, sh := range t.tightestFirst(rooms) {
		if sh.staged, err = sh.unit.Stage(t.write.Partition, sh.cols); err != nil {
			t.abort()
			t.shares = nil
			return err
		}
	}
	if t.req.Inline {
		t.fill()
	}
	return nil
}

// tightestFirst orders the shares by what they leave free on their units. A write that does not fit is then refused before
// anything was staged, and so frees nothing, which would wake all writes that wait for room, this one included.
func (t *txn) tightestFirst(rooms []catalog.Room) []*share {
	left := func(sh *share) int64 {
		k := slices.IndexFunc(rooms, func(r catalog.Room) bool { return r.Unit == sh.unit.ID() })
		free := rooms[k].Free
		for i := range sh.cols {
			free -= sh.cols[i].Bytes()
		}
		return free
	}
	out := make([]*share, len(t.shares))
	for i := range out {
		out[i] = &t.shares[i]
	}
	if len(out) > 1 {
		slices.SortFunc(out, func(a, b *share) int { return cmp.Compare(left(a), left(b)) })
	}
	return out
}

// hostOfWriter is where writers are: all of them are on this host until units on other hosts join.
const hostOfWriter = ""

// split groups the rows by unit.
func (t *txn) split(units []uint32) []share {
	var out []share
	for i := 0; i < len(units); {
		j := i + 1
		for j < len(units) && units[j] == units[i] {
			j++
		}
		k := slices.IndexFunc(out, func(sh share) bool { return sh.unit.ID() == units[i] })
		if k < 0 {
			k = len(out)
			out = append(out, share{unit: t.s.units[units[i]]})
		}
		out[k].runs = append(out[k].runs, int64(i), int64(j))
		out[k].rows += j - i
		i = j
	}
	for k := range out {
		out[k].cols = selectRuns(t.write.Columns, out[k].runs)
	}
	return out
}

// selectRuns returns the columns narrowed to pairs [from, to) of rows.
func selectRuns(columns []schema.Column, runs []int64) []schema.Column {
	out := make([]schema.Column, len(columns))
	for i := range columns {
		if len(runs) == 2 && int(runs[1]-runs[0]) == columns[i].Rows {
			out[i] = columns[i]
			continue
		}
		b := schema.NewBuilder(columns[i].Field)
		for r := 0; r < len(runs); r += 2 {
			b.Append(columns[i].Slice(int(runs[r]), int(runs[r+1])))
		}
		out[i] = b.Column()
	}
	return out
}

// fill copies an inline payload into the staged blocks.
func (t *txn) fill() {
	at := int64(0)
	for k := range t.write.Columns {
		column := &t.write.Columns[k]
		data := t.inline[at : at+column.Bytes()]
		at += int64(len(data))
		offsets := column.Offsets()
		for _, sh := range t.shares {
			dst := sh.unit.Bytes(sh.staged.Blocks()[k])
			for r := 0; r < len(sh.runs); r += 2 {
				dst = dst[copy(dst, data[offsets[sh.runs[r]]:offsets[sh.runs[r+1]]]):]
			}
		}
	}
}

// rowSizes returns a function that sums the bytes of a row over all columns.
func rowSizes(columns []schema.Column) func(int) int64 {
	uniform := int64(0)
	var ragged [][]int64
	for i := range columns {
		if columns[i].Form == schema.Uniform {
			uniform += columns[i].RowBytes()
		} else {
			ragged = append(ragged, columns[i].Offsets())
		}
	}
	return func(row int) int64 {
		n := uniform
		for _, offsets := range ragged {
			if row+1 < len(offsets) {
				n += offsets[row+1] - offsets[row]
			}
		}
		return n
	}
}

// couldFit reports whether the write would fit into empty units, so that waiting makes sense.
func (t *txn) couldFit() bool {
	total, largest := int64(0), int64(0)
	for _, u := range t.s.order {
		st := u.Stats()
		if st.MemoryLimit == 0 {
			return true
		}
		total += st.MemoryLimit
		largest = max(largest, st.MemoryLimit)
	}
	size := rowSizes(t.write.Columns)
	need := int64(0)
	for row := range t.rows {
		n := size(row)
		if need += n; n > largest || need > total {
			return false
		}
	}
	return true
}

// whenRoom tries something until it does not fail for want of room, whenever memory was freed, for PutWait at most.
func (c *call) whenRoom(ctx context.Context, try func() error) error {
	waiting, cancel := context.WithTimeout(ctx, c.s.opts.PutWait)
	defer cancel()
	for {
		freed := c.s.room.wait()
		err := try()
		if tqerr.CodeOf(err) != tqerr.ResourceExhausted {
			return err
		}
		select {
		case <-freed:
			continue
		case <-waiting.Done():
		}
		switch tqerr.CodeOf(ctx.Err()) {
		case tqerr.OK:
			return tqerr.Wrap(tqerr.ResourceExhausted, err, "no room after %s", c.s.opts.PutWait)
		case tqerr.DeadlineExceeded:
			return err
		default:
			return ctxError(ctx, "waiting for room")
		}
	}
}

func ctxError(ctx context.Context, doing string) error {
	code := tqerr.CodeOf(ctx.Err())
	if code == tqerr.DeadlineExceeded {
		return tqerr.New(code, "time is over while %s", doing)
	}
	return tqerr.New(code, "cancelled while %s", doing)
}
