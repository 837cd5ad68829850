package tiered

import (
	"cmp"
	"iter"
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// moveStep is about how many bytes move at a time, so that waiting writers get room soon.
const moveStep = 8 << 20

// run moves cells until the store closes.
func (s *Store) run() {
	defer close(s.stopped)
	for {
		select {
		case <-s.stop:
			return
		case <-s.wake:
		}
		s.spill()
		s.promote()
		if s.tier.Wasteful() {
			_, _ = s.tier.Compact() // what could not be copied is copied the next time
		}
	}
}

func (s *Store) stopping() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// spill moves cells to disk while there is pressure.
func (s *Store) spill() {
	if s.opts.MemoryLimit == 0 {
		return
	}
	var failed error
	tried := false
	defer func() {
		if tried && s.Durable() {
			_ = s.tier.Sync() // what has left memory is as durable as what was put on disk
		}
	}()
	for !s.stopping() {
		excess := s.excess()
		if excess <= 0 {
			break
		}
		moved := int64(0)
		tried = true
		for _, step := range steps(s.order(excess)) {
			if s.stopping() {
				return
			}
			n, err := s.Move(step, table.ToDisk, 0)
			if tqerr.CodeOf(err) == tqerr.ResourceExhausted {
				n, err = s.spillSingly(step)
			}
			moved += n
			if failed = err; err != nil {
				break
			}
		}
		if failed != nil || moved == 0 { // the rest is staged or leased: a later free wakes the mover
			break
		}
	}
	if !tried {
		return // an earlier reason is still the reason
	}
	s.mu.Lock()
	before := s.mu.failed
	s.mu.failed = failed
	s.mu.Unlock()
	if before == nil && failed != nil {
		s.Tell() // who waits for room learns why there is none
	}
}

// spillSingly moves cell by cell, for a disk that has room for some.
func (s *Store) spillSingly(step []table.Cells) (moved int64, err error) {
	for _, c := range step {
		for i := range c.Samples {
			one := table.Cells{Partition: c.Partition, Field: c.Field, Samples: c.Samples[i : i+1]}
			n, err := s.Move([]table.Cells{one}, table.ToDisk, 0)
			if moved += n; err != nil {
				return moved, err
			}
		}
	}
	return moved, nil
}

// excess is how many bytes have to leave memory now.
func (s *Store) excess() int64 {
	st := s.Stats()
	used, want := st.MemoryUsed+st.Staging, s.want.Swap(0)
	keep := s.opts.MemoryLimit - want
	if used > s.share(s.opts.HighWatermark) || (want > 0 && used > keep) {
		keep = min(keep, s.share(s.opts.LowWatermark))
		return used - keep
	}
	return 0
}

// order picks cells of so many bytes, those that are needed least first.
func (s *Store) order(bytes int64) (out []table.Listed) {
	list := slices.DeleteFunc(s.List(false, 0), func(l table.Listed) bool { return l.Bytes == 0 })
	list = s.byUse(list)
	for i := range list {
		l := &list[i]
		if rows := int64(len(l.Samples)); l.Bytes > bytes {
			l.Samples = l.Samples[:min(rows, (bytes*rows+l.Bytes-1)/l.Bytes)]
			return list[:i+1]
		}
		bytes -= l.Bytes
	}
	return list
}

// ranked is cells with what they are needed for.
type ranked struct {
	table.Listed
	use store.Use
}

// byUse sorts cells by what they are needed for and by when they were touched last. Runs of samples with different uses are
// cut.
func (s *Store) byUse(list []table.Listed) []table.Listed {
	all := make([]ranked, 0, len(list))
	for part := range sliced(list) {
		all = appendRanked(all, part, s.usesOf(part))
	}
	slices.SortStableFunc(all, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.use, b.use), cmp.Compare(a.Touched, b.Touched))
	})
	out := make([]table.Listed, len(all))
	for i := range all {
		out[i] = all[i].Listed
	}
	return out
}

// adviceRows is about how many samples the Advisor is asked about at a time.
const adviceRows = 1 << 16

// sliced cuts a list where the partition changes, or many samples have come together.
func sliced(list []table.Listed) iter.Seq[[]table.Listed] {
	return func(yield func([]table.Listed) bool) {
		for from := 0; from < len(list); {
			to, rows := from, 0
			for to < len(list) && list[to].Partition == list[from].Partition && (rows < adviceRows || to == from) {
				rows += len(list[to].Samples)
				to++
			}
			if !yield(list[from:to]) {
				return
			}
			from = to
		}
	}
}

// usesOf asks what the samples of cells of one partition are needed for.
func (s *Store) usesOf(part []table.Listed) []store.Use {
	var samples []schema.Sample
	for i := range part {
		samples = append(samples, part[i].Samples...)
	}
	uses := slices.Repeat([]store.Use{store.Wanted}, len(samples))
	if advise := s.advisor.Load(); advise != nil {
		(*advise)(part[0].Partition, samples, uses)
	}
	return uses
}

// appendRanked appends cells with the uses of their samples. A row that several samples share is as needed as the most needed of
// them.
func appendRanked(all []ranked, part []table.Listed, uses []store.Use) []ranked {
	for _, l := range part {
		own := uses[:len(l.Samples)]
		uses = uses[len(l.Samples):]
		if l.Shared {
			all = append(all, ranked{l, slices.Max(own)})
			continue
		}
		for from := 0; from < len(own); {
			to := from + 1
			for to < len(own) && own[to] == own[from] {
				to++
			}
			run := l
			run.Samples = l.Samples[from:to]
			run.Bytes = l.Bytes * int64(to-from) / int64(len(own))
			all = append(all, ranked{run, own[from]})
			from = to
		}
	}
	return all
}

// steps cuts a list into parts of about moveStep bytes, and runs of many rows where they are much larger.
func steps(list []table.Listed) (out [][]table.Cells) {
	var step []table.Cells
	size := int64(0)
	for _, l := range list {
		for _, part := range cut(l) {
			step, size = append(step, part.Cells), size+part.Bytes
			if size >= moveStep {
				out, step, size = append(out, step), nil, 0
			}
		}
	}
	if step != nil {
		out = append(out, step)
	}
	return out
}

// cut splits a run of large rows.
func cut(l table.Listed) []table.Listed {
	rows := int64(len(l.Samples))
	each := max(1, rows*moveStep/max(l.Bytes, 1))
	if each >= rows || l.Shared {
		return []table.Listed{l}
	}
	var out []table.Listed
	for from := int64(0); from < rows; from += each {
		part := l
		part.Samples = l.Samples[from:min(rows, from+each)]
		part.Bytes = l.Bytes * int64(len(part.Samples)) / rows
		out = append(out, part)
	}
	return out
}

// promote moves cells that were read twice back to memory, as far as they fit below the low watermark.
func (s *Store) promote() {
	s.mu.Lock()
	hot := s.mu.hot
	s.mu.hot = nil
	s.mu.Unlock()
	for _, cells := range hot {
		if s.stopping() {
			return
		}
		_, err := s.Move([]table.Cells{cells}, table.ToMemory, s.share(s.opts.LowWatermark))
		if err != nil && tqerr.CodeOf(err) != tqerr.ResourceExhausted {
			return // a reader of those cells gets the error
		}
	}
}
