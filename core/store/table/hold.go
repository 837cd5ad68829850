package table

import (
	"math/rand/v2"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// A write that has several parts, of which this table has one, is decided outside. Hold notes what was prepared under a number,
// so that a part that had not been committed yet when the process died can be committed by the next one.

// heldPart is rows on disk of a write that an earlier process has held.
type heldPart struct {
	partition, field string
	extent           uint32
	rows             []schema.Sample // of the write, by index; more than the extent has share its only one
}

// Hold implements store.Holder. When it returns the note survives the end of the process.
func (tx *staged) Hold() error {
	s := tx.s
	s.mu.Lock()
	if tx.done || tx.hold != 0 || !tx.prepared {
		s.mu.Unlock()
		return nil
	}
	tx.hold = rand.Uint64() | 1
	for i := range tx.parts {
		tx.holdPartLocked(&tx.parts[i])
	}
	s.unlockAndTell(0)
	if err := s.opts.Disk.Keep(); err != nil {
		return err
	}
	return s.opts.Disk.Secure(nil, len(tx.columns)*tx.rows) // what was reserved for the commit may be taken by the note
}

func (tx *staged) holdPartLocked(p *diskPart) {
	s, c := tx.s, &tx.columns[p.column]
	note := func(run rowRun, rows []schema.Sample) {
		column := s.columnOfRunLocked(run)
		column.Field = c.Field
		s.opts.Disk.Hold(tx.hold, tx.partition, &column, rows, s.blockLocked(run), s.sumsLocked(run))
	}
	if c.Share == nil {
		rows := make([]schema.Sample, p.to-p.from)
		for i := range rows {
			rows[i].Index = int64(p.from + i)
		}
		note(rowRun{p.extent, 0, uint32(len(rows))}, rows)
		return
	}
	for k, row := range c.Share {
		if at := int(row); at >= p.from && at < p.to {
			note(rowRun{p.extent, uint32(at - p.from), 1}, []schema.Sample{{Index: int64(k)}})
		}
	}
}

// releaseLocked ends a hold, with what was noted before or by the abort.
func (tx *staged) releaseLocked() {
	if tx.hold != 0 {
		tx.s.opts.Disk.Release(tx.hold)
	}
}

// RestoreHeld makes rows on disk the part of a write that an earlier process has held. rows are the indexes of its rows; more than
// one row of the column share it. The disk is not told.
func (s *Table) RestoreHeld(txn uint64, partition string, column *schema.Column, rows []schema.Sample, b store.Block, sums []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.newExtentLocked(column, b, onDisk)
	s.setSumsLocked(id, sums)
	s.mu.used[onDisk] += b.Size
	s.mu.held[txn] = append(s.mu.held[txn], heldPart{partition, column.Field, id, rows})
}

// Held reports whether an earlier process has held something under a number that was neither committed nor dropped since.
func (s *Table) Held(txn uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.held[txn] != nil
}

// CommitHeld makes visible what an earlier process has held under a number, as CommitChange would have done. One that is not
// held is committed already.
func (s *Table) CommitHeld(txn uint64, samples []schema.Sample, change uint64) error {
	s.mu.Lock()
	parts := s.mu.held[txn]
	for i := range parts {
		for _, row := range parts[i].rows {
			if row.Index >= int64(len(samples)) {
				s.mu.Unlock()
				return tqerr.New(tqerr.Corruption, "unit disk: row %d of a write of %d rows is held", row.Index, len(samples))
			}
		}
	}
	if parts == nil {
		s.mu.Unlock()
		return nil
	}
	if change != 0 {
		s.opts.Disk.Mark(change)
	}
	freed := int64(0)
	for i := range parts {
		freed += s.bindHeldLocked(&parts[i], samples)
	}
	s.opts.Disk.Release(txn)
	delete(s.mu.held, txn)
	s.unlockAndTell(freed)
	return nil
}

func (s *Table) bindHeldLocked(p *heldPart, samples []schema.Sample) (freed int64) {
	c := s.columnLocked(p.partition, p.field)
	bound := make([]schema.Sample, len(p.rows))
	for i, row := range p.rows {
		bound[i] = samples[row.Index]
	}
	if int(s.mu.extents.At(p.extent).rows) == len(bound) {
		s.liveLocked(p.extent)
		return s.bindLocked(c, p.extent, 0, bound)
	}
	s.shareLocked(p.extent, bound)
	for i := range bound {
		freed += s.bindLocked(c, p.extent, 0, bound[i:i+1])
	}
	return freed
}

// DropHeld frees what an earlier process has held and nobody has committed.
func (s *Table) DropHeld() {
	s.mu.Lock()
	freed := int64(0)
	for txn, parts := range s.mu.held {
		for i := range parts {
			freed += s.freeRowsLocked(rowRun{parts[i].extent, 0, s.mu.extents.At(parts[i].extent).rows})
		}
		s.opts.Disk.Release(txn)
	}
	clear(s.mu.held)
	s.unlockAndTell(freed)
}
