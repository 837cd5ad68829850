package tiered

import (
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// Flush moves all cells in memory to disk, but for those that are leased, so that nothing is lost when the process ends. On an
// error the others have moved.
func (s *Store) Flush() (err error) {
	for _, step := range steps(s.List(false, 0)) {
		_, failed := s.Move(step, table.ToDisk, 0)
		if tqerr.CodeOf(failed) == tqerr.ResourceExhausted {
			_, failed = s.spillSingly(step)
		}
		if err == nil {
			err = failed
		}
	}
	return err
}
