package table

// setSumsLocked keeps the checksums of a disk extent: one in its record, several beside it.
func (s *Table) setSumsLocked(id uint32, sums []uint32) {
	if len(sums) == 1 {
		s.mu.extents.At(id).sum = sums[0]
		return
	}
	s.mu.sums[id] = sums
}

// sumsLocked are the checksums of a run. The caller must not modify them.
func (s *Table) sumsLocked(r rowRun) []uint32 {
	if e := s.mu.extents.At(r.extent); e.rows == 1 {
		return []uint32{e.sum}
	}
	return s.mu.sums[r.extent][r.from : r.from+r.n]
}
