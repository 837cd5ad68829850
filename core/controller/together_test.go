//go:build go1.25

package controller

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

func TestTogether(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct{ n, limit, together int }{
		"none":              {0, 4, 0},
		"one":               {1, 4, 1},
		"one after another": {6, 1, 1},
		"some at a time":    {6, 4, 4},
		"all at once":       {3, 8, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var running, begun atomic.Int64
				leave := make(chan error)
				result := make(chan error, 1)
				do := func(ctx context.Context, _ int) error {
					begun.Add(1)
					running.Add(1)
					defer running.Add(-1)
					select {
					case err := <-leave:
						return err
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				start := func() { result <- together(t.Context(), c.n, c.limit, do) }

				go start()
				for ended := range c.n {
					synctest.Wait()
					require.EqualValues(t, min(c.together, c.n-ended), running.Load())
					leave <- nil
				}
				require.NoError(t, <-result)
				require.EqualValues(t, c.n, begun.Load())
				if c.n == 0 {
					return
				}

				begun.Store(0)
				go start()
				synctest.Wait()
				leave <- broken
				require.Equal(t, broken, <-result, "the first error, not those that it brings about")
				require.EqualValues(t, c.together, begun.Load(), "none begins after an error")
				require.Zero(t, running.Load())
			})
		})
	}
}
