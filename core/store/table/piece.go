package table

import (
	"slices"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// stream is where the bytes of a column of a lease lie, for Piece.
type stream struct {
	ends []int64 // of the runs, in bytes of the column
	disk []int   // of each run, which of loading.runs it is; -1: it lies in memory
}

// streamOf makes the stream of a column once.
func (l *lease) streamOf(k int) *stream {
	if l.streams == nil {
		l.streams = make([]*stream, len(l.columns))
	}
	if l.streams[k] != nil {
		return l.streams[k]
	}
	at := map[*store.Run]int{}
	if l.load != nil {
		for i := range l.load.runs {
			at[l.load.runs[i].run] = i
			for _, run := range l.load.runs[i].also {
				at[run] = i
			}
		}
	}
	out, end := &stream{}, int64(0)
	runs := l.columns[k].Runs
	for i := range runs {
		end += runs[i].Block.Size
		disk := -1
		if d, is := at[&runs[i]]; is && runs[i].OnDisk {
			disk = d
		}
		out.ends, out.disk = append(out.ends, end), append(out.disk, disk)
	}
	l.streams[k] = out
	return out
}

// Piece implements store.Streamer.
func (l *lease) Piece(k int, offset int64, sum uint32, to []byte) (uint32, error) {
	if k < 0 || k >= len(l.columns) {
		return 0, tqerr.New(tqerr.InvalidArgument, "column %d of a lease of %d", k, len(l.columns))
	}
	o := l.streamOf(k)
	if n := len(o.ends); len(to) > 0 && (n == 0 || offset < 0 || offset > o.ends[n-1]-int64(len(to))) {
		return 0, tqerr.New(tqerr.InvalidArgument, "%d bytes at %d of a column that has fewer", len(to), offset)
	}
	i, exact := slices.BinarySearch(o.ends, offset)
	if exact {
		i++
	}
	for len(to) > 0 {
		n, err := l.fromRun(k, i, offset, &sum, to)
		if err != nil {
			return 0, err
		}
		offset, to = offset+int64(n), to[n:]
		for i++; i < len(o.ends) && o.ends[i] <= offset; i++ {
		}
	}
	return sum, nil
}

// fromRun reads what of a piece lies in a run, and in those behind it that are its neighbours on disk.
func (l *lease) fromRun(k, i int, offset int64, sum *uint32, to []byte) (int, error) {
	o, runs := l.streams[k], l.columns[k].Runs
	begin := o.ends[i] - runs[i].Block.Size
	n := min(int64(len(to)), o.ends[i]-offset)
	b := runs[i].Block
	b.Offset, b.Size = b.Offset+offset-begin, n
	if o.disk[i] < 0 {
		*sum = 0
		return copy(to[:n], l.s.Bytes(b)), nil
	}
	last := i
	for last+1 < len(runs) && n < int64(len(to)) && o.disk[last+1] >= 0 {
		next := runs[last+1].Block
		if next.Segment != b.Segment || next.Offset != b.Offset+b.Size {
			break
		}
		last++
		more := min(next.Size, int64(len(to))-n)
		n, b.Size = n+more, b.Size+more
	}
	failed := l.s.opts.Disk.Read(b, to[:n])
	for at := int64(0); i <= last; i++ {
		part := min(n-at, o.ends[i]-offset-at)
		if err := l.verify(&l.load.runs[o.disk[i]], offset+at-(o.ends[i]-runs[i].Block.Size), sum, to[at:at+part], failed); err != nil {
			return 0, err
		}
		at += part
	}
	return int(n), nil
}

// verify goes over bytes of a disk run from an offset in it on, and compares the sums of the rows that end there. failed is why
// they could not be read.
func (l *lease) verify(r *diskRun, offset int64, sum *uint32, data []byte, failed error) error {
	if r.offsets == nil {
		r.offsets = r.rows.Offsets()
	}
	row, exact := slices.BinarySearch(r.offsets, offset)
	if !exact {
		row--
	}
	for row < r.rows.Rows && r.offsets[row+1] == offset {
		row++ // rows without bytes
	}
	if failed != nil {
		return l.load.damaged(r, min(row, r.rows.Rows-1), failed)
	}
	for len(data) > 0 {
		n := min(int64(len(data)), r.offsets[row+1]-offset)
		*sum = crc32c.Update(*sum, data[:n])
		offset, data = offset+n, data[n:]
		if offset == r.offsets[row+1] {
			if *sum != r.sums[row] {
				return l.load.damaged(r, row, errChecksum)
			}
			*sum = 0
			row++
		}
		for row < r.rows.Rows && r.offsets[row+1] == offset {
			row++
		}
	}
	return nil
}
