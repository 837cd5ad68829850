//go:build go1.25

package controller_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/journal"
	"transferqueue/core/transport"
)

// unmapped is a connection on which something happens before the first piece of unit memory is mapped.
type unmapped struct {
	transport.Conn
	once   sync.Once
	before func()
}

func (c *unmapped) Segment(ctx context.Context, unit, segment uint32) (int, int64, error) {
	c.once.Do(c.before)
	return c.Conn.Segment(ctx, unit, segment)
}

// A put in two steps whose controller dies between its grant and the filling of what it has granted is made again, also when it
// had to wait for room, so that its bytes lie aside and the caller's memory is another value's by now.
func TestAPutIsMadeAgainThatWasNotFilled(t *testing.T) {
	for name, waits := range map[string]bool{"granted at once": false, "granted late": true} {
		t.Run(name, func(t *testing.T) {
			o := setup{remote: true, limit: roomLimit, putWait: time.Minute, journal: journal.Relaxed}
			within(t, o, func(t *testing.T, s *system) {
				deaths := 0
				u := s.user(following, func(o *client.Options) {
					o.Conn = &unmapped{Conn: o.Conn, before: func() {
						deaths++
						s.restart()
					}}
				})
				other := s.user(following)
				full := 0
				for ; waits && s.stats().MemoryUsed+wideBytes <= roomLimit; full++ {
					other.put(s.rows(wide, []string{keysOf(64)[full]}, 7))
				}
				b := s.rows(wide, []string{"a"}, 1)
				p := u.beginPut(b)
				if waits {
					synctest.Wait()
					require.False(t, p.done())
					s.mem.Reset()
					s.same(wide, 99) // in the memory of the caller
					other.clear(keysOf(full)...)
				}
				_, err := putResult(p.wait())
				require.NoError(t, err)
				require.Equal(t, 1, deaths)
				require.Equal(t, []int64{1}, s.user().values("a"))
				require.EqualValues(t, 1, s.stats().Cells)
				time.Sleep(2 * time.Minute)
				require.Zero(t, s.stats().Staged, "what was granted first")
			})
		})
	}
}
