package snapshot

import (
	"transferqueue/core/internal/vfs"
	"transferqueue/core/wire"
)

// RowIndex says which rows a dump has, in the order in which they were asked for.
type RowIndex struct {
	Partition string
	Keys      []string
	Tags      [][]byte
	Indexes   []int64    // in the session that dumped them
	Sets      [][]string // lists of fields
	SetOf     []int64    // per row, which of Sets it has
}

type (
	rowIndexRecord struct {
		Partition string
		Sets      []wire.Strings
	}
	rowKeysRecord struct {
		Keys    wire.Strings
		Tags    wire.List
		Indexes wire.Ints
		SetOf   wire.Ints
	}
)

// Records of a row index.
const (
	recordRowIndex = iota + 20
	recordRowKeys
)

// WriteRows writes and syncs a row index.
func WriteRows(fs vfs.FS, path string, cut Cut, x *RowIndex) error {
	_, _, err := writeFile(fs, path, RowsFile, func(w *writer) error {
		err := w.record(recordHead, &headRecord{Cut: cut[:]})
		index := rowIndexRecord{Partition: x.Partition}
		for _, set := range x.Sets {
			index.Sets = append(index.Sets, set)
		}
		if err == nil {
			err = w.record(recordRowIndex, &index)
		}
		for _, c := range cuts(len(x.Keys), func(i int) int { return len(x.Keys[i]) + len(x.Tags[i]) }) {
			if err == nil {
				err = w.record(recordRowKeys, &rowKeysRecord{
					x.Keys[c[0]:c[1]], x.Tags[c[0]:c[1]], x.Indexes[c[0]:c[1]], x.SetOf[c[0]:c[1]],
				})
			}
		}
		return err
	})
	return err
}

// ReadRows reads a row index and checks it.
func ReadRows(fs vfs.FS, path string) (*RowIndex, Cut, error) {
	var cut Cut
	x := &RowIndex{}
	_, _, err := readFile(fs, path, RowsFile, func(r *reader, kind byte, body []byte) error {
		switch kind {
		case recordHead:
			return r.cut(body, &cut)
		case recordRowIndex:
			var index rowIndexRecord
			err := r.message(body, &index)
			x.Partition = index.Partition
			for _, set := range index.Sets {
				x.Sets = append(x.Sets, set)
			}
			return err
		case recordRowKeys:
			return x.keys(r, body)
		}
		return r.bad("record %d of unknown type %d", r.records, kind)
	})
	return x, cut, err
}

func (x *RowIndex) keys(r *reader, body []byte) error {
	var k rowKeysRecord
	if err := r.message(body, &k); err != nil {
		return err
	}
	if n := len(k.Keys); len(k.Tags) != n || len(k.Indexes) != n || len(k.SetOf) != n {
		return r.bad("record %d: lists of different length", r.records)
	}
	for _, set := range k.SetOf {
		if set < 0 || set >= int64(len(x.Sets)) {
			return r.bad("record %d: list of fields %d of %d", r.records, set, len(x.Sets))
		}
	}
	x.Keys, x.Tags = append(x.Keys, k.Keys...), append(x.Tags, k.Tags...)
	x.Indexes, x.SetOf = append(x.Indexes, k.Indexes...), append(x.SetOf, k.SetOf...)
	return nil
}
