package controller

import (
	"context"
	"errors"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/snapshot"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
)

// cut is one moment of the session: what the catalog said, and leases on every cell, which pin what was stored then while
// writers go on.
type cut struct {
	id      snapshot.Cut
	state   *catalog.State
	sampler []byte
	groups  []leasedGroup
}

type leasedGroup struct {
	catalog.Group
	unit    node
	reading unit.Reading // on its way; nil: no fields
	cells   *unit.Cells  // nil: no fields
	// inMemory is where the next bytes of each column lie among all those of the lease that are in memory.
	inMemory []int64
	offsets  [][]int64 // of the rows of each column, where they are needed often
}

func (k *cut) release() {
	for _, g := range k.groups {
		if g.cells != nil {
			g.cells.Release()
		}
	}
	k.groups = nil
}

// takeCut takes the cut of everything. Writers wait for it, readers do not.
func (s *Server) takeCut(ctx context.Context) (*cut, error) {
	s.saves.cutting.Lock()
	defer s.saves.cutting.Unlock()
	k := &cut{id: snapshot.NewCut()}
	err := s.CutWithSampler(ctx, func(_ string, state []byte) error {
		k.state, k.sampler = s.mu.cat.Export(), state
		return k.readLocked(s, s.mu.cat.Groups())
	})
	if err != nil {
		return k, err
	}
	return k, k.lease(ctx, s)
}

// readLocked puts the reads of the cells of groups in line. lease must follow.
func (k *cut) readLocked(s *Server, groups []catalog.Group) error {
	k.groups = make([]leasedGroup, len(groups))
	for i, g := range groups {
		k.groups[i] = leasedGroup{Group: g, unit: s.node(g.Unit)}
		if err := k.groups[i].unit.Lost(); err != nil && len(g.Fields) > 0 {
			k.groups = nil
			return err
		}
	}
	for i := range k.groups {
		if g := &k.groups[i]; len(g.Fields) > 0 {
			g.reading = g.unit.Read(&unit.Query{Partition: g.Partition, Fields: g.Fields, Samples: g.Samples, Inline: -1, Later: true})
		}
	}
	return nil
}

// lease waits until all cells are leased, all or none.
func (k *cut) lease(ctx context.Context, s *Server) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i := range k.groups {
		g := &k.groups[i]
		if g.reading == nil {
			continue
		}
		cells, failed := g.reading.Wait(ctx)
		if g.cells = cells; failed != nil {
			cancel() // the others are only given up
			if err == nil {
				err = s.named(g.Partition, missing(g.Partition, failed))
			}
		}
	}
	if err != nil {
		k.release()
	}
	return err
}

// batchBytes bounds the rows that are written, and later staged, together; a row that is larger is alone.
const batchBytes = 64 << 20

// pieceBytes is what is written, or read to be checked, between two looks at the clock.
const pieceBytes = 4 << 20

// filesAtOnce is how many files are written or read at a time.
const filesAtOnce = 4

// writeCells writes all leased cells to a folder, a file per unit, several at a time.
func (s *Server) writeCells(ctx context.Context, k *cut, v *snapshot.Values) error {
	s.mapped.RLock()
	defer s.mapped.RUnlock()
	byUnit := map[node][]leasedGroup{}
	var order []node
	for _, g := range k.groups {
		if byUnit[g.unit] == nil {
			order = append(order, g.unit)
		}
		byUnit[g.unit] = append(byUnit[g.unit], g)
	}
	err := together(ctx, len(order), filesAtOnce, func(ctx context.Context, i int) error {
		return v.WritePart(func(p *snapshot.Part) error {
			for _, g := range byUnit[order[i]] {
				if err := g.write(ctx, p); err != nil {
					return s.named(g.Partition, err)
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return v.Finish()
}

// write writes the rows of a group in batches. A row that several samples of a batch share is written once.
func (g *leasedGroup) write(ctx context.Context, p *snapshot.Part) error {
	cursors := g.begin()
	first := make(same, len(cursors))
	for k := range cursors {
		first[k] = firstShared(g.cells.Columns[k].Runs)
	}
	for from := 0; from < len(g.Samples); {
		to := g.batchEnd(cursors, first, from)
		rows := &snapshot.Rows{Partition: g.Partition, Samples: g.Samples[from:to]}
		stored := make([][]int64, len(cursors))
		for k := range cursors {
			column := g.cells.Columns[k].Column.Slice(from, to)
			if pairs, share := schema.StoredOnce(first[k], []int64{int64(from), int64(to)}); share != nil {
				column = selectRuns([]schema.Column{g.cells.Columns[k].Column}, pairs)[0]
				column.Share, stored[k] = share, pairs
			}
			rows.Columns = append(rows.Columns, column)
		}
		err := p.Rows(rows, func(put func([]byte) error) (err error) {
			for k := range cursors {
				if err == nil {
					err = g.writeColumn(ctx, k, &cursors[k], to-from, stored[k], put)
				}
			}
			return err
		})
		if err != nil {
			return ctxOr(ctx, err)
		}
		from = to
	}
	return nil
}

// begin returns cursors at the first rows of all columns, for writeColumn.
func (g *leasedGroup) begin() []runCursor {
	if g.cells == nil {
		return nil
	}
	leased, next := g.cells.Columns, int64(0)
	cursors := make([]runCursor, len(leased))
	g.inMemory = make([]int64, len(leased))
	for k := range leased {
		cursors[k], g.inMemory[k] = newRunCursor(&leased[k]), next
		for _, run := range leased[k].Runs {
			if !run.OnDisk {
				next += run.Block.Size
			}
		}
	}
	return cursors
}

// writeColumn writes the next rows of a column, of shared ones only those of stored, pairs [from, to), when that is not nil. What
// lies on disk is read piece by piece, neighbours together.
func (g *leasedGroup) writeColumn(ctx context.Context, column int, c *runCursor, rows int, stored []int64, put func([]byte) error) (err error) {
	at := c.offsets[c.row]
	onDisk := at // up to here, from at on
	flush := func() {
		if err == nil && onDisk > at {
			err = g.copyFromDisk(ctx, column, at, onDisk, put)
		}
		at = onDisk
	}
	c.take(rows, func(run store.Run) {
		for len(stored) > 0 && stored[1] <= int64(c.row) {
			stored = stored[2:]
		}
		skip := stored != nil && run.Rows == 1 && (len(stored) == 0 || stored[0] > int64(c.row))
		if run.OnDisk && !skip {
			onDisk += run.Block.Size
			return
		}
		flush()
		if run.OnDisk {
			at += run.Block.Size
			onDisk = at
			return
		}
		if err == nil && !skip {
			err = readLeased(ctx, g.unit, g.cells.Leases[0], run, g.inMemory[column], put)
		}
		g.inMemory[column] += run.Block.Size
		at += run.Block.Size
		onDisk = at
	})
	flush()
	return err
}

// copyFromDisk writes bytes [from, to) of a column that lie on disk.
func (g *leasedGroup) copyFromDisk(ctx context.Context, column int, from, to int64, put func([]byte) error) error {
	buffer, sum := make([]byte, min(pieceBytes, to-from)), uint32(0)
	for from < to {
		piece := buffer[:min(pieceBytes, to-from)]
		var err error
		if sum, err = g.unit.Piece(ctx, g.cells.Leases[0], column, from, sum, piece); err == nil {
			err = put(piece)
		}
		if err != nil {
			return err
		}
		from += int64(len(piece))
	}
	return nil
}

// inPieces gives bytes piece by piece, until the context ends.
func inPieces(ctx context.Context, bytes []byte, give func([]byte) error) error {
	for piece := range slices.Chunk(bytes, pieceBytes) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := give(piece); err != nil {
			return err
		}
	}
	return nil
}

// ctxOr prefers the reason why work was ended over the error that it ended with.
func ctxOr(ctx context.Context, err error) error {
	var known *tqerr.Error
	if err == nil || ctx.Err() == nil || errors.As(err, &known) && known.Code == tqerr.CodeOf(ctx.Err()) {
		return err
	}
	return ctxError(ctx, "reading and writing files")
}

// batchEnd returns the row before which a batch ends.
func (g *leasedGroup) batchEnd(cursors []runCursor, first same, from int) int {
	sum := int64(0)
	known := make([]map[int64]bool, len(cursors))
	for row := from; row < len(g.Samples); row++ {
		for k := range cursors {
			if first[k] != nil {
				if known[k] == nil {
					known[k] = map[int64]bool{}
				}
				if known[k][first[k][row]] {
					continue
				}
				known[k][first[k][row]] = true
			}
			sum += cursors[k].offsets[row+1] - cursors[k].offsets[row]
		}
		if sum > batchBytes && row > from {
			return row
		}
	}
	return len(g.Samples)
}
