package controller

import (
	"context"
	"sync"
	"sync/atomic"

	"transferqueue/core/guard"
)

// together calls do for 0 to n-1, at most limit at a time, and returns the first error. It ends the context of the others
// that run, and none begins after it.
func together(ctx context.Context, n, limit int, do func(ctx context.Context, i int) error) error {
	if n < 2 || limit < 2 {
		for i := range n {
			if err := do(ctx, i); err != nil {
				return err
			}
		}
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var first atomic.Pointer[error]
	var all sync.WaitGroup
	places := make(chan struct{}, min(n, limit))
	for i := range n {
		places <- struct{}{}
		if first.Load() != nil {
			break
		}
		all.Add(1)
		guard.Go("controller units", func() {
			defer all.Done()
			defer func() { <-places }()
			err := func() (err error) {
				defer guard.Recover(&err)
				return do(ctx, i)
			}()
			if err != nil {
				first.CompareAndSwap(nil, &err)
				cancel()
			}
		})
	}
	all.Wait()
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}
