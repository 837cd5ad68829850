package controller

import (
	"context"
	"sync"

	"transferqueue/core/guard"
)

// together calls do for 0 to n-1 and returns the first error, which ends the context of the others: at the same time when the
// calls wait for units in other processes, else one after another until the first error.
func together(ctx context.Context, n int, wait bool, do func(ctx context.Context, i int) error) error {
	if n < 2 || !wait {
		for i := range n {
			if err := do(ctx, i); err != nil {
				return err
			}
		}
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var first error
	var once sync.Once
	var all sync.WaitGroup
	all.Add(n)
	for i := range n {
		guard.Go("controller units", func() {
			defer all.Done()
			err := func() (err error) {
				defer guard.Recover(&err)
				return do(ctx, i)
			}()
			if err != nil {
				once.Do(func() { first = err })
				cancel()
			}
		})
	}
	all.Wait()
	return first
}
