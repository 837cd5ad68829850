package controller

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/snapshot"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// stagedRows is rows of a file on their way into units: where they go, and the memory for them.
type stagedRows struct {
	partition string
	indexes   []int64
	shares    []share
}

func (r *stagedRows) abort() {
	for _, sh := range r.shares {
		if sh.staged != nil {
			sh.staged.Abort()
		}
	}
}

// stageShares reserves memory for all shares or none. What is staged does not move to disk to make room, so what finds none goes
// there directly.
func stageShares(ctx context.Context, partition string, shares []share) error {
	for i := range shares {
		sh := &shares[i]
		if len(sh.cols) == 0 {
			continue
		}
		var err error
		sh.staged, err = sh.unit.Stage(ctx, partition, sh.cols, nil)
		if tqerr.CodeOf(err) == tqerr.ResourceExhausted && sh.unit.Stats().DiskLimit > 0 {
			sh.staged, err = sh.unit.StageOnDisk(ctx, partition, sh.cols)
		}
		if err != nil {
			for k := range i {
				if shares[k].staged != nil {
					shares[k].staged.Abort()
				}
			}
			return err
		}
	}
	return nil
}

// placeOf is where the bytes of columns go that are read from a file. When they are there, they are sent to units on other hosts,
// and those that go to disk are written, and leave memory.
func placeOf(ctx context.Context, shares []share, columns []schema.Column, same same) (snapshot.Place, error) {
	f, err := toFillAll(shares, columns, same)
	return snapshot.Place{Pieces: f.places, Filled: func() error {
		for _, c := range f.copies {
			copy(c.to, c.from)
		}
		for i, sh := range shares {
			if sh.staged == nil {
				continue
			}
			if err := f.flushes[i](ctx); err != nil {
				return err
			}
			if err := store.PrepareAndShed(ctx, sh.staged); err != nil {
				return err
			}
		}
		return nil
	}}, err
}

// filling is where the bytes of columns go: column by column in the order of the rows, those that several samples share once.
type filling struct {
	places  [][]byte
	copies  []copied // of shared rows that lie on several units
	flushes []func(context.Context) error
}

type copied struct{ to, from []byte }

func toFillAll(shares []share, columns []schema.Column, same same) (f filling, err error) {
	if len(columns) == 0 {
		return filling{flushes: make([]func(context.Context) error, len(shares))}, nil
	}
	blocks := make([][][]byte, len(shares))
	for i := range shares {
		found, flush, err := shares[i].toFill()
		if err != nil {
			return f, err
		}
		blocks[i], f.flushes = found, append(f.flushes, flush)
	}
	order := pieces(shares)
	for k := range columns {
		offsets := make([][]int64, len(shares))
		for i := range shares {
			offsets[i] = shares[i].cols[k].Offsets()
		}
		if same != nil && same[k] != nil {
			f.shareRows(order, shares, k, same[k], func(share, row int) []byte {
				return blocks[share][k][offsets[share][row]:offsets[share][row+1]]
			})
			continue
		}
		for _, p := range order {
			o := offsets[p.share]
			f.places = append(f.places, blocks[p.share][k][o[p.at]:o[p.at+p.rows]])
		}
	}
	return f, nil
}

// shareRows adds the rows of a column of which the first of those that are the same is in the file. at is where a row of a share
// lies.
func (f *filling) shareRows(order []piece, shares []share, column int, first []int64, at func(share, row int) []byte) {
	type place struct{ share, row int }
	known := map[place]bool{}
	read := map[int64][]byte{}
	for _, p := range order {
		for i := range p.rows {
			row := p.from + int64(i)
			to := place{p.share, rowIn(&shares[p.share].cols[column], p.at+i)}
			if known[to] {
				continue
			}
			known[to] = true
			if first[row] == row {
				read[row] = at(to.share, to.row)
				f.places = append(f.places, read[row])
			} else {
				f.copies = append(f.copies, copied{at(to.share, to.row), read[first[row]]})
			}
		}
	}
}
