package arena

import "fmt"

// Check verifies that free ranges are disjoint and complete. It is for tests.
func (a *Arena) Check() error {
	a.io.Lock() // so that nothing is being punched
	defer a.io.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	free := a.mu.warm.total + a.mu.cold.total
	if int64(free)+a.mu.used != a.mu.total {
		return fmt.Errorf("arena: %d bytes free and %d used of %d", free, a.mu.used, a.mu.total)
	}
	if err := a.mu.warm.check(); err != nil {
		return fmt.Errorf("arena: warm ranges: %w", err)
	}
	if err := a.mu.cold.check(); err != nil {
		return fmt.Errorf("arena: cold ranges: %w", err)
	}
	var err error
	a.mu.cold.each(func(s span) {
		if s.start&pageMask != 0 || s.size&pageMask != 0 {
			err = fmt.Errorf("arena: cold range %+v is not whole pages", blockOf(s))
		}
		if a.mu.warm.overlaps(s) {
			err = fmt.Errorf("arena: cold range %+v is warm too", blockOf(s))
		}
	})
	return err
}

// check verifies order, disjointness and the sums of inner nodes.
func (r *ranges) check() error {
	var last span
	count, total := 0, uint64(0)
	var err error
	r.each(func(s span) {
		if s.size == 0 || (count > 0 && s.start < last.end()) {
			err = fmt.Errorf("span %d+%d follows %d+%d", s.start, s.size, last.start, last.size)
		}
		last = s
		count, total = count+1, total+s.size
	})
	if err == nil && (count != r.count || total != r.total) {
		err = fmt.Errorf("%d spans of %d bytes, want %d of %d", count, total, r.count, r.total)
	}
	if err == nil && r.root != 0 {
		err = r.checkBelow(r.root)
	}
	return err
}

func (r *ranges) checkBelow(id uint32) error {
	n := r.nodes.At(id)
	if !n.inner {
		return nil
	}
	for i := range n.n {
		kid := r.nodes.At(n.kid[i])
		if kid.n == 0 || kid.start[0] != n.start[i] || kid.largest() != n.size[i] {
			return fmt.Errorf("node %d does not describe its child %d", id, i)
		}
		if err := r.checkBelow(n.kid[i]); err != nil {
			return err
		}
	}
	return nil
}
