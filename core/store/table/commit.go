package table

import (
	"context"
	"fmt"

	"transferqueue/core/schema"
)

// endStagingOfLocked gives back the memory of rows that are bound on disk. It is room only where there is a limit. That of a
// change in a journal has to wait until the disk knows of the change: when the process dies before, the change has not happened,
// and the writer reads his bytes back from there.
func (tx *staged) endStagingOfLocked(p *diskPart) int64 {
	if tx.shed {
		return 0
	}
	run := rowRun{tx.extents[p.column], uint32(p.from), uint32(p.to - p.from)}
	if tx.journaled {
		tx.ending = append(tx.ending, run)
		return 0
	}
	n := tx.s.freeRowsLocked(run)
	if tx.s.opts.MemoryLimit == 0 {
		return 0
	}
	return n
}

// endStaging gives back what endStagingOfLocked has left.
func (tx *staged) endStaging() {
	if len(tx.ending) == 0 {
		return
	}
	s, freed := tx.s, int64(0)
	s.mu.Lock()
	for _, run := range tx.ending {
		freed += s.freeRowsLocked(run)
	}
	tx.ending = nil
	if s.opts.MemoryLimit == 0 {
		freed = 0
	}
	s.unlockAndTell(freed)
}

// restLiveLocked is liveLocked for what the memory extent of a column has still.
func (tx *staged) restLiveLocked(column int) {
	s, id := tx.s, tx.extents[column]
	if !tx.shed {
		s.liveLocked(id)
		return
	}
	e := s.mu.extents.At(id)
	e.staged = false
	tx.eachInMemory(column, func(from, to int) {
		run := rowRun{id, uint32(from), uint32(to - from)}
		s.countLocked(e.tier, int64(run.n), s.blockLocked(run).Size)
	})
}

// eachInMemory yields the rows of a column that do not go to disk.
func (tx *staged) eachInMemory(column int, yield func(from, to int)) {
	at := 0
	for i := range tx.parts {
		if p := &tx.parts[i]; p.column == column {
			if at < p.from {
				yield(at, p.from)
			}
			at = p.to
		}
	}
	if rows := tx.columns[column].Rows; at < rows {
		yield(at, rows)
	}
}

// Abort implements store.Staged.
func (tx *staged) Abort() {
	s := tx.s
	s.mu.Lock()
	freed := int64(0)
	if !tx.done {
		tx.done = true
		s.mu.staged--
		tx.releaseLocked()
		freed = tx.endStagingLocked()
		for i, id := range tx.extents {
			if id != 0 && !tx.shed {
				freed += s.freeRowsLocked(rowRun{id, 0, s.mu.extents.At(id).rows})
			} else if id != 0 {
				tx.eachInMemory(i, func(from, to int) {
					freed += s.freeRowsLocked(rowRun{id, uint32(from), uint32(to - from)})
				})
			}
		}
		for i := range tx.parts {
			if id := tx.parts[i].extent; id != 0 {
				freed += s.freeRowsLocked(rowRun{id, 0, s.mu.extents.At(id).rows})
			}
		}
	}
	s.unlockAndTell(freed)
}

// endStagingLocked makes the extents of a write count as what they are, so that freeing their rows balances, and gives back
// what was reserved on disk for rows that have no extent there. It returns those bytes.
func (tx *staged) endStagingLocked() int64 {
	s := tx.s
	s.mu.staging -= tx.memory
	s.mu.outside -= tx.outside
	s.mu.used[inMemory] += tx.memory
	s.mu.used[inScratch] += tx.outside
	s.mu.used[onDisk] -= tx.disk
	return tx.disk
}

// Commit implements store.Staged. A row whose cell belongs to a newer generation is freed instead of bound: its sample is
// gone already. Rows that go to disk are written first when Prepare was not called; those that cannot be stay in memory.
func (tx *staged) Commit(samples []schema.Sample) { tx.CommitChange(samples, 0) }

// Txn implements store.Numbered.
func (tx *staged) Txn() uint64 {
	tx.s.mu.Lock()
	defer tx.s.mu.Unlock()
	return tx.hold
}

// OnDisk implements store.Numbered.
func (tx *staged) OnDisk() bool { return len(tx.parts) > 0 }

// CommitChange implements store.Numbered.
func (tx *staged) CommitChange(samples []schema.Sample, change uint64) {
	s := tx.s
	if len(tx.extents) > 0 && len(samples) != tx.rows {
		if s.open(tx) {
			panic(fmt.Sprintf("table: commit of %d samples for %d rows", len(samples), tx.rows))
		}
		return
	}
	fallback := int64(0)
	if s.open(tx) && tx.Prepare(context.Background()) != nil {
		for i := range tx.parts {
			fallback += int64(tx.parts[i].to - tx.parts[i].from)
		}
		tx.parts = nil
	}
	s.mu.Lock()
	if tx.done {
		s.mu.Unlock()
		return
	}
	tx.done = true
	if s.opts.Disk != nil && change != 0 {
		s.opts.Disk.Mark(change)
		tx.journaled = true
	}
	tx.releaseLocked()
	s.mu.staged--
	s.mu.clock++
	s.mu.counters.FallbackCells += fallback
	freed := tx.endStagingLocked()
	parts := tx.parts
	for i := range tx.extents {
		n := 0
		for n < len(parts) && parts[n].column == i {
			n++
		}
		freed += tx.bindColumnLocked(i, parts[:n], samples)
		parts = parts[n:]
	}
	s.unlockAndTell(freed)
	tx.endStaging()
}

// bindColumnLocked makes the rows of a column the cells of samples, and frees what was staging. parts are those of its rows that
// lie on disk.
func (tx *staged) bindColumnLocked(i int, parts []diskPart, samples []schema.Sample) (freed int64) {
	s, column, id := tx.s, &tx.columns[i], tx.extents[i]
	switch {
	case column.Rows == 0:
		return 0
	case column.Share != nil:
		return tx.bindSharedLocked(i, parts, samples)
	case id != 0:
		tx.restLiveLocked(i)
	}
	c := s.columnLocked(tx.partition, column.Field)
	at := 0
	for k := range parts {
		p := &parts[k]
		if at < p.from {
			freed += s.bindLocked(c, id, at, samples[at:p.from])
		}
		s.liveLocked(p.extent)
		freed += s.bindLocked(c, p.extent, 0, samples[p.from:p.to])
		freed += tx.endStagingOfLocked(p)
		s.mu.counters.WrittenCells += int64(p.to - p.from)
		s.mu.counters.WrittenBytes += p.bytes.Size
		at = p.to
	}
	if at < tx.rows {
		freed += s.bindLocked(c, id, at, samples[at:])
	}
	return freed
}

// open reports whether a write has neither been committed nor aborted.
func (s *Table) open(tx *staged) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !tx.done
}
