package controller

import (
	"context"
	"slices"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// txn is a write between its first request and its commit or abort.
type txn struct {
	id     uint64
	s      *Server
	req    *wire.PutRequest
	write  catalog.Write
	rows   int
	units  []uint32 // per row, where its cells are staged
	shares []share
	inline []byte // the payload, when it came with the request and is not staged
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
		first := err
		return c.later(func(ctx context.Context) (any, error) {
			if err := c.waitForRoom(ctx, t, first); err != nil {
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
	if !c.client.keepTxn(t) {
		t.abort()
		return nil, tqerr.New(tqerr.Cancelled, "the client is gone")
	}
	reply := &wire.PutReply{Txn: t.id}
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
	for i := range t.shares {
		sh := &t.shares[i]
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
	need, limit := int64(0), int64(0)
	for i := range t.write.Columns {
		need += t.write.Columns[i].Bytes()
	}
	for _, u := range t.s.order {
		st := u.Stats()
		if st.MemoryLimit == 0 {
			return true
		}
		limit += st.MemoryLimit
	}
	return need <= limit
}

// waitForRoom stages again whenever memory was freed, until it fits or PutWait or the request's time is over.
func (c *call) waitForRoom(ctx context.Context, t *txn, first error) error {
	timer := time.NewTimer(c.s.opts.PutWait)
	defer timer.Stop()
	for {
		freed := c.s.room.wait()
		err := t.stage()
		if tqerr.CodeOf(err) != tqerr.ResourceExhausted {
			return err
		}
		first = err
		select {
		case <-freed:
		case <-timer.C:
			return tqerr.Wrap(tqerr.ResourceExhausted, first, "no room after %s", c.s.opts.PutWait)
		case <-ctx.Done():
			if tqerr.CodeOf(ctx.Err()) == tqerr.DeadlineExceeded {
				return first
			}
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

func (c *call) takeTxn() (*txn, error) {
	var r wire.TxnRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	t := c.client.takeTxn(r.Txn)
	if t == nil {
		return nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", r.Txn)
	}
	return t, nil
}

func (c *call) commit() (any, error) {
	t, err := c.takeTxn()
	if err != nil {
		return nil, err
	}
	return c.apply(t)
}

func (c *call) abort() (any, error) {
	if t, err := c.takeTxn(); err == nil {
		t.abort()
	}
	return nil, nil
}

// apply makes a staged write visible, or hands it to what computes its bytes first.
func (c *call) apply(t *txn) (any, error) {
	if t.transforms() {
		return c.transform(t)
	}
	result, err := c.writing(t.cells, func() (any, error) {
		result, err := t.applyLocked()
		if err != nil {
			if tqerr.CodeOf(err) != tqerr.Conflict {
				t.abort()
			}
			return nil, err
		}
		return &wire.PutReply{Result: result}, nil
	}, t.abort)
	if tqerr.CodeOf(err) != tqerr.Conflict {
		return result, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		if err := t.restage(ctx, c.stageWhenRoom); err != nil {
			return nil, err
		}
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		result, err := t.applyLocked()
		if err != nil {
			t.abort()
			return nil, err
		}
		return &wire.PutReply{Result: result}, nil
	})
}

// restage moves staged rows to the units where they belong now: another client has created one of the keys meanwhile, or a
// sample was cleared and made anew.
func (t *txn) restage(ctx context.Context, stage stager) error {
	old := *t
	defer old.abort()
	t.shares = nil
	s := t.s
	rooms := s.rooms()
	s.mu.RLock()
	units, err := s.mu.cat.Check(&t.write)
	if err == nil {
		err = s.mu.cat.Place(units, hostOfWriter, rowSizes(t.write.Columns), rooms)
	}
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	t.units, t.shares = units, t.split(units)
	for i := range t.shares {
		sh := &t.shares[i]
		if len(old.shares) == 0 || old.shares[0].staged == nil {
			continue
		}
		if sh.staged, err = stage(ctx, sh.unit, t.write.Partition, sh.cols); err != nil {
			t.abort()
			return err
		}
	}
	t.copyFrom(&old)
	return nil
}

// copyFrom copies staged bytes row by row from another staging of the same write.
func (t *txn) copyFrom(old *txn) {
	from, to := pieces(old.shares), pieces(t.shares)
	for k := range t.write.Columns {
		source := make([][]byte, t.rows)
		for _, p := range from {
			sh := &old.shares[p.share]
			if sh.staged == nil {
				return
			}
			data, offsets := sh.unit.Bytes(sh.staged.Blocks()[k]), sh.cols[k].Offsets()
			for i := range p.rows {
				source[int(p.from)+i] = data[offsets[p.at+i]:offsets[p.at+i+1]]
			}
		}
		for _, p := range to {
			sh := &t.shares[p.share]
			data, offsets := sh.unit.Bytes(sh.staged.Blocks()[k]), sh.cols[k].Offsets()
			for i := range p.rows {
				copy(data[offsets[p.at+i]:offsets[p.at+i+1]], source[int(p.from)+i])
			}
		}
	}
}

// cells names what the write touches among the samples that exist. Called with mu held.
func (t *txn) cells() *writeSet {
	fields := make([]string, len(t.write.Columns))
	for i := range t.write.Columns {
		fields[i] = t.write.Columns[i].Field
	}
	return newWriteSet(t.write.Partition, fields, t.s.mu.cat.Existing(&t.write), false)
}

// applyLocked changes the catalog and commits the units. Called with mu held.
func (t *txn) applyLocked() (*wire.PutResult, error) {
	t.write.Unwatched = len(t.s.mu.watches[t.write.Partition]) == 0
	applied, err := t.s.mu.cat.Apply(&t.write, t.units)
	if err != nil {
		return nil, err
	}
	for _, sh := range t.shares {
		if sh.staged == nil {
			continue
		}
		samples := applied.Samples
		if sh.rows != len(samples) {
			samples = make([]schema.Sample, 0, sh.rows)
			for r := 0; r < len(sh.runs); r += 2 {
				samples = append(samples, applied.Samples[sh.runs[r]:sh.runs[r+1]]...)
			}
		}
		sh.staged.Commit(samples)
	}
	t.s.changed(t.write.Partition, applied.Events)
	result := &wire.PutResult{Fields: applied.Fields, Tags: someTags(applied.Tags)}
	result.Indexes, result.Generations = indexLists(applied.Samples)
	return result, nil
}

// someTags returns nil when no row has a tag, which spares the client a thousand empty dicts.
func someTags(tags [][]byte) [][]byte {
	if slices.ContainsFunc(tags, func(tag []byte) bool { return len(tag) > 1 }) { // an empty map has one byte
		return tags
	}
	return nil
}

func indexLists(samples []schema.Sample) (wire.Ints, wire.Ints) {
	indexes, generations := make(wire.Ints, len(samples)), make(wire.Ints, len(samples))
	for i, s := range samples {
		indexes[i], generations[i] = s.Index, int64(s.Generation)
	}
	return indexes, generations
}
