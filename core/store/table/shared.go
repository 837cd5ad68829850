package table

import (
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// A row that several samples of a write share is an extent of its own, whose cells are its holders: it is freed with the last
// of them, and moves with all of them. Holders are of one column, since a write shares the rows of each column by itself.

// bindSharedLocked makes the rows of a column the cells of the samples that share them, and frees what was staging. parts are
// those of its rows that lie on disk.
func (tx *staged) bindSharedLocked(i int, parts []diskPart, samples []schema.Sample) (freed int64) {
	s, column := tx.s, &tx.columns[i]
	c := s.columnLocked(tx.partition, column.Field)
	holders := make([][]schema.Sample, column.Rows)
	for k, row := range column.Share {
		holders[row] = append(holders[row], samples[k])
	}
	bind := func(from rowRun, holders []schema.Sample) {
		id := s.singleLocked(from)
		s.shareLocked(id, holders)
		for k := range holders {
			freed += s.bindLocked(c, id, 0, holders[k:k+1])
		}
	}
	at := 0
	for k := range parts {
		p := &parts[k]
		for ; at < p.from; at++ {
			bind(rowRun{tx.extents[i], uint32(at), 1}, holders[at])
		}
		for ; at < p.to; at++ {
			bind(rowRun{p.extent, uint32(at - p.from), 1}, holders[at])
			s.mu.counters.WrittenCells += int64(len(holders[at]))
		}
		s.mu.counters.WrittenBytes += p.bytes.Size
		freed += tx.endStagingOfLocked(p)
	}
	for ; at < column.Rows; at++ {
		bind(rowRun{tx.extents[i], uint32(at), 1}, holders[at])
	}
	return freed
}

// singleLocked makes a staged row an extent by itself, which takes its bytes over.
func (s *Table) singleLocked(r rowRun) (id uint32) {
	e := s.mu.extents.At(r.extent)
	column, block, t := s.columnOfRunLocked(r), s.blockLocked(r), e.tier
	var sums []uint32
	if t == onDisk {
		sums = s.sumsLocked(r)
	}
	id = s.newExtentLocked(&column, block, t)
	if t == onDisk {
		s.setSumsLocked(id, sums)
	}
	e = s.mu.extents.At(r.extent)
	if e.live--; e.live == 0 {
		s.dropExtentLocked(r.extent)
	}
	return id
}

// shareLocked makes the only row of an extent live, for these holders.
func (s *Table) shareLocked(id uint32, holders []schema.Sample) {
	if len(holders) > 1 {
		s.mu.extents.At(id).holders = uint32(len(holders))
		s.mu.holders[id] = holders
	}
	s.liveLocked(id)
}

// sharedRuns joins the runs of a lease that are one shared row: it is read from disk once.
type sharedRuns map[uint32]int

// join finds the disk run of an extent that is in the lease already, and makes it fill another run too.
func (o *loading) join(extent uint32, run *store.Run) bool {
	at, known := o.shared[extent]
	if known {
		o.runs[at].also = append(o.runs[at].also, run)
	}
	return known
}

// note remembers the disk run that comes next.
func (o *loading) note(extent uint32) {
	if o.shared == nil {
		o.shared = sharedRuns{}
	}
	o.shared[extent] = len(o.runs)
}
