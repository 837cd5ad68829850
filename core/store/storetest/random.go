package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// randomOperations lets several workers do random things, each in a partition of its own that it compares with a naive
// model, while they compete for memory.
func randomOperations(h *harness) {
	seed := rand.Uint64()
	h.Logf("seed %d", seed)
	const workers = 4
	failed := make([]error, workers)
	all := make([]*worker, workers)
	var wait sync.WaitGroup
	for i := range workers {
		all[i] = &worker{
			s: h.s, rnd: rand.New(rand.NewPCG(seed, uint64(i))), partition: fmt.Sprint("p", i),
			generation: map[int64]uint32{}, cells: map[string]map[int64]row{},
		}
		wait.Add(1)
		go func() {
			defer wait.Done()
			failed[i] = all[i].run(200)
		}()
	}
	wait.Wait()
	require.NoError(h, errors.Join(failed...), "seed %d", seed)
	h.check()
	for _, w := range all {
		h.written = append(h.written, written{w.partition, w.samples(w.indexes())})
	}
}

// worker is the model of one partition: what the cell of every field and index holds. The field "o" holds objects.
type worker struct {
	s          store.Store
	rnd        *rand.Rand
	partition  string
	generation map[int64]uint32
	cells      map[string]map[int64]row
	held       []held
	seed       uint64
}

type held struct {
	lease store.Lease
	want  [][]row
}

var fields = []string{"a", "b", "c", "o"}

func (w *worker) run(steps int) error {
	for step := range steps {
		var err error
		switch n := w.rnd.IntN(10); {
		case n < 4:
			err = w.write()
		case n < 6:
			err = w.read()
		case n < 8:
			w.delete()
		case n < 9:
			err = w.release()
		default:
			w.reuse()
		}
		if err != nil {
			return fmt.Errorf("worker %s step %d: %w", w.partition, step, err)
		}
	}
	for len(w.held) > 0 {
		if err := w.release(); err != nil {
			return err
		}
	}
	return nil
}

// indexes are all indexes the worker uses: two ranges, far apart.
func (w *worker) indexes() []int64 {
	out := make([]int64, 0, 80)
	for i := range int64(40) {
		out = append(out, i+240, i+1<<33)
	}
	return out
}

// choose picks distinct indexes, usually some in a row.
func (w *worker) choose() []int64 {
	all := w.indexes()
	if w.rnd.IntN(3) > 0 {
		slices.Sort(all)
		from := w.rnd.IntN(len(all))
		return all[from:min(len(all), from+1+w.rnd.IntN(30))]
	}
	w.rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:1+w.rnd.IntN(20)]
}

func (w *worker) samples(indexes []int64) []schema.Sample {
	out := make([]schema.Sample, len(indexes))
	for i, index := range indexes {
		out[i] = schema.Sample{Index: index, Generation: w.generation[index]}
	}
	return out
}

func (w *worker) column(field string, rows int) filled {
	w.seed++
	size := func() int64 { return w.rnd.Int64N(5) * w.rnd.Int64N(500) }
	many := make([]int64, rows)
	for i := range many {
		many[i] = size()
	}
	switch {
	case field == "o":
		return object(field, w.seed, many...)
	case w.rnd.IntN(2) == 0:
		return withBytes(schema.Column{Field: field, Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: rows,
			Form: schema.Uniform, Shape: []int64{size(), 2}}, w.seed)
	case w.rnd.IntN(2) == 0:
		return varying(field, w.seed, many...)
	}
	shapes := make([][]int64, rows)
	for i := range shapes {
		shapes[i] = make([]int64, w.rnd.IntN(3))
		for j := range shapes[i] {
			shapes[i][j] = w.rnd.Int64N(20)
		}
	}
	return free(field, w.seed, shapes...)
}

func (w *worker) write() error {
	indexes := w.choose()
	var columns []filled
	for _, field := range fields {
		if w.rnd.IntN(2) == 0 {
			columns = append(columns, w.column(field, len(indexes)))
		}
	}
	for i := range columns {
		if w.rnd.IntN(4) == 0 {
			columns[i] = w.shared(columns[i])
		}
	}
	stage := w.s.Stage
	if s, ok := w.s.(store.DiskStager); ok && w.rnd.IntN(6) == 0 {
		stage = s.StageOnDisk
	}
	tx, err := stage(w.partition, descriptors(columns))
	if tqerr.CodeOf(err) == tqerr.ResourceExhausted {
		return nil
	}
	if err != nil {
		return err
	}
	fill(w.s, tx, columns)
	if n := w.rnd.IntN(8); n < 2 { // what goes to disk is written now; its memory stays until Commit, or does not
		prepare := store.Prepare
		if n == 0 {
			prepare = store.PrepareAndShed
		}
		if err := prepare(context.Background(), tx); err != nil {
			tx.Abort()
			return err
		}
	}
	if w.rnd.IntN(5) == 0 {
		tx.Abort()
		return nil
	}
	tx.Commit(w.samples(indexes))
	for _, c := range columns {
		if w.cells[c.Field] == nil {
			w.cells[c.Field] = map[int64]row{}
		}
		for i, r := range c.expand().list() {
			w.cells[c.Field][indexes[i]] = r
		}
	}
	return nil
}

// shared lets all samples of a column share a few of its rows.
func (w *worker) shared(f filled) filled {
	n := 1 + w.rnd.IntN(f.Rows)
	share := make([]uint32, f.Rows)
	for i := range share {
		share[i] = uint32(w.rnd.IntN(n))
	}
	for row := range n { // each has a holder
		share[row] = uint32(row)
	}
	w.rnd.Shuffle(len(share), func(i, j int) { share[i], share[j] = share[j], share[i] })
	out := filled{Column: f.Slice(0, n), rows: f.rows[:n]}
	out.Share = share
	return out
}

// present picks indexes that have all of some fields, with repetitions, and says what a read must return.
func (w *worker) present() (names []string, indexes []int64, want [][]row) {
	names = slices.Clone(fields[w.rnd.IntN(len(fields)):])
	for _, index := range w.choose() {
		has := true
		for _, field := range names {
			_, ok := w.cells[field][index]
			has = has && ok
		}
		for n := w.rnd.IntN(6); has && n >= 0; n -= 5 {
			indexes = append(indexes, index)
		}
	}
	want = make([][]row, len(names))
	for i, field := range names {
		want[i] = []row{}
		for _, index := range indexes {
			want[i] = append(want[i], w.cells[field][index])
		}
	}
	return names, indexes, want
}

func (w *worker) read() error {
	names, indexes, want := w.present()
	l, err := w.s.Read(w.partition, names, w.samples(indexes))
	if err != nil {
		return fmt.Errorf("read of cells that are there: %w", err)
	}
	w.held = append(w.held, held{l, want})
	if err := w.stream(names, indexes, want); err != nil {
		return err
	}
	if len(w.held) > 6 {
		if err := w.release(); err != nil {
			return err
		}
	}
	return w.readMissing()
}

// stream reads the same in pieces, without loading it.
func (w *worker) stream(names []string, indexes []int64, want [][]row) error {
	p, pins := w.s.(store.Pinner)
	if !pins || w.rnd.IntN(3) > 0 {
		return nil
	}
	l, err := p.Pin(w.partition, names, w.samples(indexes))
	if err != nil {
		return fmt.Errorf("pin of cells that are there: %w", err)
	}
	defer l.Release()
	for k, column := range l.Columns() {
		all := make([]byte, column.Column.Bytes())
		sum := uint32(0)
		for at := 0; at < len(all); {
			piece := all[at:min(len(all), at+1+w.rnd.IntN(5000))]
			if sum, err = l.(store.Streamer).Piece(k, int64(at), sum, piece); err != nil {
				return err
			}
			at += len(piece)
		}
		offsets := column.Column.Offsets()
		for i, r := range want[k] {
			if r.bytes != string(all[offsets[i]:offsets[i+1]]) {
				return fmt.Errorf("field %s: row %d differs in pieces", names[k], i)
			}
		}
	}
	return nil
}

func (w *worker) readMissing() error {
	index, field := w.choose()[0], fields[w.rnd.IntN(len(fields))]
	_, ok := w.cells[field][index]
	if has := w.s.Has(w.partition, []string{field}, w.samples([]int64{index})); has != ok {
		return fmt.Errorf("field %s of %d: has says %v, want %v", field, index, has, ok)
	}
	return nil
}

// release ends a random lease after a look at what it has kept.
func (w *worker) release() error {
	if len(w.held) == 0 {
		return nil
	}
	i := w.rnd.IntN(len(w.held))
	h := w.held[i]
	w.held = slices.Delete(w.held, i, i+1)
	defer h.lease.Release()
	for j, l := range h.lease.Columns() {
		if got := rowsOf(w.s, l).list(); !reflect.DeepEqual(h.want[j], got) {
			return fmt.Errorf("field %s of a lease changed", l.Column.Field)
		}
	}
	return nil
}

func (w *worker) delete() {
	indexes := w.choose()
	names := fields[w.rnd.IntN(len(fields)):]
	if w.rnd.IntN(3) == 0 {
		w.s.Delete(w.partition, nil, w.samples(indexes))
		names = fields
	} else {
		w.s.Delete(w.partition, names, w.samples(indexes))
	}
	for _, field := range names {
		for _, index := range indexes {
			delete(w.cells[field], index)
		}
	}
}

// reuse gives an index to a new sample, whose cells are missing although the old ones are stored.
func (w *worker) reuse() {
	index := w.choose()[0]
	for _, field := range fields {
		delete(w.cells[field], index)
	}
	w.s.Delete(w.partition, nil, w.samples([]int64{index}))
	w.generation[index]++
}
