package controller

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/snapshot"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// dumpInfo is the file of a dump that is for people.
const dumpInfo = "dump_info.json"

func (c *call) dumpRows() (any, error) {
	var r wire.DumpRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if err := checkAbsolute(r.Path); err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		index, k, err := c.s.cutKeys(ctx, r.Partition, r.Keys)
		if err != nil {
			return nil, err
		}
		defer k.release()
		staging, err := snapshot.Begin(c.s.opts.FS, filepath.Clean(r.Path), false)
		if err != nil {
			return nil, err
		}
		reply, err := c.s.dump(ctx, staging, index, k)
		return reply, ctxOr(ctx, errors.Join(err, staging.Close()))
	})
}

// cutKeys takes the cut of some samples.
func (s *Server) cutKeys(ctx context.Context, partition string, keys []string) (*snapshot.RowIndex, *cut, error) {
	index, k, err := s.readKeys(partition, keys)
	if err == nil {
		err = k.lease(ctx, s)
	}
	return index, k, err
}

func (s *Server) readKeys(partition string, keys []string) (*snapshot.RowIndex, *cut, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	groups, absent := s.mu.cat.GroupsOf(partition, keys)
	if len(absent) > 0 {
		return nil, nil, tqerr.New(tqerr.NotFound, "partition %q: keys were not found: %s", partition, someNames(absent))
	}
	index := &snapshot.RowIndex{Partition: partition, Keys: keys}
	setOf := map[int64]int64{}
	for _, g := range groups {
		for _, x := range g.Samples {
			setOf[x.Index] = int64(len(index.Sets))
		}
		index.Sets = append(index.Sets, g.Fields)
	}
	found := s.mu.cat.Lookup(partition, keys)
	index.Tags = found.Tags
	for _, x := range found.Samples {
		index.Indexes, index.SetOf = append(index.Indexes, x.Index), append(index.SetOf, setOf[x.Index])
	}
	k := &cut{id: snapshot.NewCut()}
	return index, k, k.readLocked(s, groups)
}

// someNames quotes the first of many names.
func someNames(names []string) string {
	const few = 20
	var out []string
	for _, name := range names[:min(few, len(names))] {
		out = append(out, strconv.Quote(name))
	}
	text := strings.Join(out, ", ")
	if len(names) > few {
		text += " and " + strconv.Itoa(len(names)-few) + " more"
	}
	return text
}

func (s *Server) dump(ctx context.Context, staging *snapshot.Staging, index *snapshot.RowIndex, k *cut) (*wire.DumpReply, error) {
	fs := s.opts.FS
	values, err := snapshot.NewValues(fs, filepath.Join(staging.Dir, snapshot.StorageName), k.id)
	if err != nil {
		return nil, err
	}
	if err := s.writeCells(ctx, k, values); err != nil {
		return nil, err
	}
	if err := snapshot.WriteRows(fs, filepath.Join(staging.Dir, snapshot.RowsName), k.id, index); err != nil {
		return nil, err
	}
	reply := &wire.DumpReply{Bytes: k.bytes()}
	for _, set := range index.SetOf {
		if len(index.Sets[set]) > 0 {
			reply.Rows++
		}
	}
	reply.Files = values.Parts()
	info, err := json.Marshal(map[string]any{
		"format_version": 1, "partition_id": index.Partition, "keys": len(index.Keys), "rows_with_data": reply.Rows, "bytes": reply.Bytes,
	})
	if err == nil {
		err = snapshot.WriteText(fs, filepath.Join(staging.Dir, dumpInfo), string(info)+"\n")
	}
	if err != nil {
		return nil, err
	}
	return reply, staging.Commit()
}

// bytes is the payload of all leased cells.
func (k *cut) bytes() (sum int64) {
	for _, g := range k.groups {
		if g.cells == nil {
			continue
		}
		columns := g.cells.Columns
		for i := range columns {
			sum += columns[i].Column.Bytes()
		}
	}
	return sum
}

func (c *call) loadRows() (any, error) {
	var r wire.LoadRowsRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if err := checkAbsolute(r.Path); err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		reply, err := c.rows(ctx, &r)
		if err = ctxOr(ctx, err); r.Index {
			err = tqerr.WithOp("read_row_index", err)
		}
		return reply, err
	})
}

func (c *call) rows(ctx context.Context, r *wire.LoadRowsRequest) (*wire.LoadRowsReply, error) {
	fs := c.s.opts.FS
	if _, err := fs.Stat(r.Path); err != nil {
		return nil, vfs.Wrap(err)
	}
	index, cut, err := snapshot.ReadRows(fs, filepath.Join(r.Path, snapshot.RowsName))
	if err != nil {
		return nil, err
	}
	reply := &wire.LoadRowsReply{Partition: index.Partition, Keys: index.Keys, Tags: index.Tags, Indexes: index.Indexes, SetOf: index.SetOf}
	for _, set := range index.Sets {
		reply.Sets = append(reply.Sets, set)
	}
	if r.Index {
		return reply, nil
	}
	for {
		l := &rowLoading{s: c.s, from: c.machine(), ctx: ctx, index: index, coming: map[uint32]int64{}}
		err := l.read(filepath.Join(r.Path, snapshot.StorageName), cut)
		var tags [][]byte
		if err == nil {
			tags, err = l.apply(ctx)
		}
		if err == nil {
			reply.Tags = tags
			return reply, nil
		}
		l.abort()
		if tqerr.CodeOf(err) != tqerr.Conflict { // else a key has come to live elsewhere meanwhile
			return nil, err
		}
	}
}

// rowLoading is a dump on its way into the session.
type rowLoading struct {
	s     *Server
	from  string // machine of who loads
	ctx   context.Context
	index *snapshot.RowIndex
	rowOf map[int64]int // row of the index by the index of the sample that was dumped

	mu     sync.Mutex
	txns   []*txn
	seen   int
	coming map[uint32]int64 // new samples by unit
}

func (l *rowLoading) abort() {
	for _, t := range l.txns {
		t.abort()
	}
}

// applyLocked changes the catalog and commits all rows, and notes their tags by key. Called with mu held.
func (l *rowLoading) applyLocked(tags map[string][]byte) error {
	s := l.s
	writes, units := make([]*catalog.Write, len(l.txns)), make([][]uint32, len(l.txns))
	for i, t := range l.txns {
		writes[i], units[i] = &t.write, t.units
	}
	if err := s.mu.cat.CheckAll(writes, units); err != nil {
		return err
	}
	for _, t := range l.txns {
		if err := t.reachable(); err != nil {
			return err
		}
	}
	change, err := s.notePutsLocked(replyNothing, l.txns...)
	if err != nil {
		return err
	}
	for _, t := range l.txns {
		result, err := t.commitLocked(change)
		if err != nil {
			return tqerr.Wrap(tqerr.Internal, err, "a write that was checked failed")
		}
		for i, key := range t.write.Keys {
			if result.Tags != nil {
				tags[key] = result.Tags[i]
			}
		}
	}
	return nil
}

// shares are those of all writes.
func (l *rowLoading) shares() (all []share) {
	for _, t := range l.txns {
		all = append(all, t.shares...)
	}
	return all
}

// read stages all rows as writes by key.
func (l *rowLoading) read(dir string, cut snapshot.Cut) error {
	l.rowOf = make(map[int64]int, len(l.index.Keys))
	for row, i := range l.index.Indexes {
		l.rowOf[i] = row
	}
	stored, err := snapshot.OpenValues(l.s.opts.FS, dir)
	if err == nil {
		err = stored.SavedWith(cut)
	}
	if err == nil {
		err = l.s.readValues(l.ctx, stored, l.stage)
	}
	if err != nil {
		return err
	}
	if len(l.rowOf) > 0 || l.seen != len(l.index.Keys) {
		return tqerr.New(tqerr.Corruption, "%s has %d rows, want %d", dir, l.seen, len(l.index.Keys))
	}
	return nil
}

func (l *rowLoading) stage(rows *snapshot.Rows) (place snapshot.Place, err error) {
	if err := l.ctx.Err(); err != nil {
		return place, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	columns, same := eachItsOwn(rows.Columns)
	w := catalog.Write{Partition: l.index.Partition, Columns: columns}
	for _, x := range rows.Samples {
		row, known := l.rowOf[x.Index]
		if !known {
			return place, tqerr.New(tqerr.Corruption, "values of sample %d, which the dump does not name, or names twice", x.Index)
		}
		delete(l.rowOf, x.Index)
		w.Keys, w.Tags = append(w.Keys, l.index.Keys[row]), append(w.Tags, l.index.Tags[row])
	}
	l.seen += len(w.Keys)
	t := &txn{s: l.s, req: &wire.PutRequest{}, write: w, rows: len(w.Keys), same: same}
	units, err := l.place(t)
	if err != nil {
		return place, err
	}
	t.units = units
	t.shares = t.split(units)
	if err := stageShares(l.ctx, w.Partition, t.shares); err != nil {
		return place, err
	}
	l.txns = append(l.txns, t)
	return placeOf(l.ctx, t.shares, columns, same)
}

// place decides where rows go, minding those that were placed before and are not in the catalog yet.
func (l *rowLoading) place(t *txn) ([]uint32, error) {
	rooms := l.s.rooms()
	l.s.mu.RLock()
	units, err := l.s.mu.cat.Check(&t.write)
	fresh := slices.Clone(units)
	if err == nil {
		err = l.s.mu.cat.PlaceBeside(units, l.from, t.storedSizes(), rooms, l.coming)
	}
	l.s.mu.RUnlock()
	for i, unit := range fresh {
		if err == nil && unit == catalog.NoUnit {
			l.coming[units[i]]++
		}
	}
	return units, err
}

// apply makes all rows visible at once and returns their tags in the order of the index.
func (l *rowLoading) apply(ctx context.Context) ([][]byte, error) {
	s, tags := l.s, map[string][]byte{}
	cells := func() *writeSet {
		w := catalog.Write{Partition: l.index.Partition, Keys: l.index.Keys}
		return newWriteSet(w.Partition, nil, s.mu.cat.Existing(&w), false)
	}
	write := &instant{cells: cells, do: func() (any, error) { return nil, l.applyLocked(tags) }}
	if err := s.hold(l.shares()); err != nil {
		return nil, err
	}
	set, _, err := s.attempt(write)
	if set != nil {
		_, err = s.inTurn(ctx, set, write)
	}
	for _, t := range l.txns {
		if err == nil {
			err = confirm(t.shares)
		}
	}
	out := make([][]byte, len(l.index.Keys))
	for i, key := range l.index.Keys {
		out[i] = tags[key]
	}
	return out, err
}
