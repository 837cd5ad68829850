package table

import (
	"errors"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

var errChecksum = errors.New("its checksum differs")

// loading is what a lease has to read from disk, and where it puts it. Runs of the lease name a block on disk before, and
// one in memory after.
type loading struct {
	runs      []diskRun
	shared    sharedRuns
	partition string
	fields    []string
	samples   []schema.Sample
	loaded    bool
	blocks    []store.Block // staging
	memory    int64
	outside   int64
}

// diskRun is a run of a lease that lies on disk.
type diskRun struct {
	field int // of those of the lease
	row   int // of the lease's rows, of its first
	run   *store.Run
	also  []*store.Run // that are the same shared row
	from  store.Block
	rows  schema.Column
	sums  []uint32
	hot   bool // it has been read before

	offsets []int64 // of rows, for Piece; nil before
}

// loadLaterLocked notes a run on disk. What it needs of the extent is copied, since it is used without the lock.
func (s *Table) loadLaterLocked(l *lease, run *store.Run, r rowRun, field, row int) {
	if l.load == nil {
		l.load = &loading{}
	}
	if s.mu.extents.At(r.extent).holders > 0 {
		if l.load.join(r.extent, run) {
			return
		}
		l.load.note(r.extent)
	}
	l.load.runs = append(l.load.runs, diskRun{
		field: field, row: row, run: run, from: run.Block, rows: s.columnOfRunLocked(r), sums: s.sumsLocked(r),
		hot: s.mu.extents.At(r.extent).reads > 1,
	})
}

// name says which cells the runs are, for errors.
func (o *loading) name(partition string, fields []string, samples []schema.Sample) {
	o.partition, o.fields, o.samples = partition, fields, samples
}

// Loads implements store.Loader.
func (l *lease) Loads() bool { return l.load != nil && !l.load.loaded }

// Load implements store.Loader.
func (l *lease) Load() error {
	o := l.load
	if o == nil || o.loaded {
		return nil
	}
	s := l.s
	if err := s.stageRead(o); err != nil {
		return err
	}
	for i := range o.runs {
		if err := s.loadRun(o, &o.runs[i], s.Bytes(o.blocks[i])); err != nil {
			return err
		}
	}
	for i := range o.runs {
		o.runs[i].run.Block, o.runs[i].run.OnDisk = o.blocks[i], false
		for _, run := range o.runs[i].also {
			run.Block, run.OnDisk = o.blocks[i], false
		}
	}
	l.streams = nil
	o.loaded = true
	if s.opts.OnHot != nil {
		s.tellHot(o)
	}
	return nil
}

// tellHot names the cells that are worth a place in memory: not those that belong on disk for their size.
func (s *Table) tellHot(o *loading) {
	var hot []Cells
	for i := range o.runs {
		if r := &o.runs[i]; r.hot && r.from.Size < s.opts.Threshold*int64(r.rows.Rows) {
			hot = append(hot, Cells{o.partition, o.fields[r.field], o.samples[r.row : r.row+r.rows.Rows]})
		}
	}
	if hot != nil {
		s.opts.OnHot(hot)
	}
}

// stageRead allocates staging for all runs: in memory when that has room, else in scratch space.
func (s *Table) stageRead(o *loading) error {
	need := int64(0)
	for i := range o.runs {
		need += o.runs[i].from.Size
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	alloc, total := s.allocLocked, &o.memory
	if limit := s.opts.MemoryLimit; limit > 0 && need > limit-s.memoryInUseLocked() {
		if s.opts.Scratch == nil {
			return s.noMemoryLocked(need)
		}
		alloc, total = s.opts.Scratch.Alloc, &o.outside
	}
	for i := range o.runs {
		b, err := alloc(o.runs[i].from.Size)
		if err != nil {
			for _, done := range o.blocks {
				s.freeBlockLocked(done)
			}
			o.blocks = nil
			return err
		}
		o.blocks = append(o.blocks, b)
	}
	*total = need
	s.mu.staging += o.memory
	s.mu.outside += o.outside
	return nil
}

// endLocked gives staging back and returns the bytes of memory that are free by that.
func (o *loading) endLocked(s *Table) int64 {
	if o == nil {
		return 0
	}
	for _, b := range o.blocks {
		s.freeBlockLocked(b)
	}
	o.blocks = nil
	s.mu.staging -= o.memory
	s.mu.outside -= o.outside
	return o.memory
}

// loadRun reads a run and compares it with its checksums.
func (s *Table) loadRun(o *loading, r *diskRun, to []byte) error {
	bad, err := s.readSummed(r.from, &r.rows, to, r.sums)
	if err != nil {
		return s.rowByRow(o, r, to, err)
	}
	if bad >= 0 {
		return o.damaged(r, bad, errChecksum)
	}
	return nil
}

// rowByRow finds the row of a run that made reading it fail. When none does, the failure has passed.
func (s *Table) rowByRow(o *loading, r *diskRun, to []byte, err error) error {
	offsets := r.rows.Offsets()
	for k := range r.rows.Rows {
		b := r.from
		b.Offset, b.Size = b.Offset+offsets[k], offsets[k+1]-offsets[k]
		part := to[offsets[k]:offsets[k+1]]
		if again := s.opts.Disk.Read(b, part); again != nil {
			return o.damaged(r, k, err)
		}
		if crc32c.Checksum(part) != r.sums[k] {
			return o.damaged(r, k, errChecksum)
		}
	}
	return nil
}

func (o *loading) damaged(r *diskRun, row int, cause error) error {
	return &store.DamagedError{Partition: o.partition, Field: o.fields[r.field], Sample: o.samples[r.row+row], Cause: cause}
}
