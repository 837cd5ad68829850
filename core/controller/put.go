package controller

import (
	"cmp"
	"context"
	"math"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// txn is a write between its first request and its commit or abort.
type txn struct {
	s      *Server
	req    *wire.PutRequest
	write  catalog.Write
	rows   int
	same   same     // nil: no rows are stored once for several
	units  []uint32 // per row, where its cells are staged
	shares []share
	inline []byte           // the payload, when it came with the request and is not staged
	loans  *transport.Loans // of a write in two steps
	memory [][]byte         // of its blocks, for streams of a client that cannot map it
	from   string           // machine of the writer
	origin origin           // of the request that finishes it
}

// share is the part of a write that one unit stores.
type share struct {
	unit   node
	runs   []int64 // pairs [from, to) of rows
	rows   int
	cols   []schema.Column
	once   [][]int64    // per column whose equal rows are stored once, the runs that are stored; nil: none
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
	t := &txn{s: c.s, req: &wire.PutRequest{}, from: c.machine()}
	if err := c.decode(t.req); err != nil {
		return nil, err
	}
	r := t.req
	w := catalog.Write{Partition: r.Partition, Keys: r.Keys, Insert: r.Insert, Tags: r.Tags, Update: r.Update, Last: r.Last}
	for i := range r.Columns {
		w.Columns = append(w.Columns, schema.Column(r.Columns[i]))
	}
	t.rows = len(w.Keys) + w.Insert
	if r.Samples != nil {
		c.s.identify(r.Partition, r.Samples)
		w.Samples = samplesOf(r.Samples)
		t.rows = len(w.Samples)
	}
	t.write = w
	var err error
	if t.same, err = sharing(r, w.Columns); err == nil {
		err = dedupOf(r)
	}
	if err != nil {
		return nil, err
	}
	if len(r.Callable) > 0 && len(w.Columns) == 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "a callable needs columns to work on")
	}
	if r.Inline || len(r.Columns) == 0 {
		c.kind = kind(wire.OpCommit)
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

// identify gives samples without a generation, which is what metadata made by hand has, that of the sample which has the index
// at this moment. The request names one sample from here on, also in the journal.
func (s *Server) identify(partition string, samples *wire.Samples) {
	if samples == nil || !slices.Contains(samples.Generations, 0) {
		return
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	for i, generation := range samples.Generations[:min(len(samples.Generations), len(samples.Indexes))] {
		if generation == 0 {
			samples.Generations[i] = int64(s.mu.cat.Generation(partition, samples.Indexes[i]))
		}
	}
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
	rooms, err := t.place()
	if err != nil {
		return nil, err
	}
	waits := t.waits()
	if !waits {
		if err = t.reserve(c.ctx, rooms); err == nil {
			return c.grant(t)
		}
		if !t.worthWaiting(err) {
			return nil, err
		}
	}
	return c.later(func(ctx context.Context) (any, error) {
		if waits {
			err = t.reserve(ctx, rooms)
		}
		if t.worthWaiting(err) {
			err = c.whenRoom(ctx, err, func() error { return t.stage(ctx) })
		}
		if err != nil {
			return nil, err
		}
		return c.grant(t)
	})
}

// worthWaiting reports that a write failed for want of room that others may free.
func (t *txn) worthWaiting(err error) bool {
	return tqerr.CodeOf(err) == tqerr.ResourceExhausted && t.couldFit()
}

// waits reports that the memory of a write lies with units that answer later.
func (t *txn) waits() bool {
	return t.needsMemory() && slices.ContainsFunc(t.shares, func(sh share) bool { return sh.unit.waits() })
}

// needsMemory is false for an inline operand of a transformation, which stays in the request, and without columns.
func (t *txn) needsMemory() bool {
	return len(t.write.Columns) > 0 && (!t.transforms() || !t.req.Inline)
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
	t.loans = &transport.Loans{}
	if c.remote {
		if err := t.findMemory(); err != nil {
			t.abort()
			return nil, err
		}
	}
	if err := c.client.keepTxn(id, t); err != nil {
		t.abort()
		return nil, err
	}
	c.undo = func() {
		if t := c.client.takeTxn(id); t != nil {
			t.abort()
		}
	}
	reply := &wire.PutReply{Txn: id, Grants: writeGrants(t.shares)}
	for _, sh := range t.shares {
		reply.Shared = append(reply.Shared, sh.sharedOf(len(reply.Parts))...)
		part := wire.Part{Unit: sh.unit.ID(), Rows: sh.runs}
		for _, b := range sh.staged.Blocks() {
			part.Blocks = append(part.Blocks, wire.Block{Segment: b.Segment, Offset: b.Offset, Size: b.Size})
		}
		reply.Parts = append(reply.Parts, part)
	}
	return reply, nil
}

// stage places the write and reserves memory; nothing is visible.
func (t *txn) stage(ctx context.Context) error {
	rooms, err := t.place()
	if err != nil {
		return err
	}
	return t.reserve(ctx, rooms)
}

// place validates the write and decides where its new rows go.
func (t *txn) place() ([]catalog.Room, error) {
	s := t.s
	rooms := s.rooms()
	s.mu.RLock()
	units, err := s.mu.cat.Check(&t.write)
	if err == nil {
		err = s.mu.cat.Place(units, t.from, t.storedSizes(), rooms)
	}
	s.mu.RUnlock()
	if err != nil {
		return nil, s.explain(err)
	}
	t.units = units
	t.shares = t.split(units)
	return rooms, nil
}

// reserve takes memory on all units or on none, and copies bytes that came with the request there.
func (t *txn) reserve(ctx context.Context, rooms []catalog.Room) (err error) {
	if !t.needsMemory() {
		return nil
	}
	ordered, fits := t.tightestFirst(rooms)
	limit := 1 // what a unit here refuses ends it before more is staged
	if fits && t.waits() {
		limit = len(ordered)
	}
	err = together(ctx, len(ordered), limit, func(ctx context.Context, i int) (err error) {
		sh := ordered[i]
		var payload []byte
		if t.req.Inline && sh.unit.waits() {
			payload = t.payloadOf(sh)
		}
		sh.staged, err = sh.unit.Stage(ctx, t.write.Partition, sh.cols, payload)
		return err
	})
	if err != nil {
		t.abort()
		t.shares = nil
		return err
	}
	if t.misplaced() {
		t.abort()
		if rooms, err = t.place(); err != nil {
			t.shares = nil
			return err
		}
		return t.reserve(ctx, rooms)
	}
	if t.req.Inline {
		t.fill()
	}
	return nil
}

// tightestFirst orders the shares by what they leave free on their units, and tells whether all leave something. A write that
// does not fit is then refused before anything was staged, and so frees nothing, which would wake all writes that wait for
// room, this one included.
func (t *txn) tightestFirst(rooms []catalog.Room) (ordered []*share, fits bool) {
	left := func(sh *share) int64 {
		free := int64(0) // of a unit that is gone
		if k := slices.IndexFunc(rooms, func(r catalog.Room) bool { return r.Unit == sh.unit.ID() }); k >= 0 {
			free = rooms[k].Free
		}
		for i := range sh.cols {
			free -= sh.cols[i].Bytes()
		}
		return free
	}
	out := make([]*share, len(t.shares))
	for i := range out {
		out[i] = &t.shares[i]
	}
	if len(out) < 2 {
		return out, true
	}
	slices.SortFunc(out, func(a, b *share) int { return cmp.Compare(left(a), left(b)) })
	return out, left(out[0]) >= 0
}

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
			out = append(out, share{unit: t.s.node(units[i])})
		}
		out[k].runs = append(out[k].runs, int64(i), int64(j))
		out[k].rows += j - i
		i = j
	}
	for k := range out {
		out[k].cols = selectRuns(t.write.Columns, out[k].runs)
		out[k].keepOnce(t.write.Columns, t.same)
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
			if sh.unit.waits() {
				continue // was sent along
			}
			dst, _ := sh.unit.Bytes(sh.staged.Blocks()[k])
			runs := sh.runsOf(k)
			for r := 0; r < len(runs); r += 2 {
				dst = dst[copy(dst, data[offsets[runs[r]]:offsets[runs[r+1]]]):]
			}
		}
	}
}

// payloadOf packs what a share has of an inline payload.
func (t *txn) payloadOf(sh *share) []byte {
	if len(t.shares) == 1 && t.same == nil {
		return t.inline
	}
	out := []byte{}
	for _, o := range t.operandsInline(sh) {
		out = append(out, o.Bytes...)
	}
	return out
}

// mayUse reports that rows of the write may come to a unit, or are there.
func (t *txn) mayUse(n node) bool {
	switch {
	case n.Lost() != nil:
		return false
	case !t.s.cordoned.Load() || slices.Contains(t.units, n.ID()):
		return true
	}
	t.s.mu.RLock()
	defer t.s.mu.RUnlock()
	return t.s.mu.cat.Duty(n.ID()) == catalog.Active
}

// couldFit reports whether the write would fit into empty units, so that waiting makes sense.
func (t *txn) couldFit() bool {
	total, largest := int64(0), int64(0)
	for _, n := range t.s.nodes.Load().order {
		if !t.mayUse(n) {
			continue
		}
		st := n.Stats()
		if st.MemoryLimit == 0 || st.DiskLimit == math.MaxInt64 {
			return true
		}
		total += st.MemoryLimit + st.DiskLimit
		largest = max(largest, st.MemoryLimit, st.DiskLimit)
	}
	size := t.storedSizes()
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
func (c *call) whenRoom(ctx context.Context, full error, try func() error) error {
	c.s.metrics.waitingPuts.Add(1)
	defer c.s.metrics.waitingPuts.Add(-1)
	return unit.WhenRoom(ctx, &c.s.room, c.s.opts.PutWait, full, try)
}

func ctxError(ctx context.Context, doing string) error { return unit.Ended(ctx, doing) }
