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
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
)

// unmapped is a connection on which the server dies before the first piece of unit memory is mapped.
type unmapped struct {
	transport.Conn
	once   sync.Once
	die    func()
	sooner bool // that fails before the connection ends
}

func (c *unmapped) Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error) {
	c.once.Do(func() {
		if !c.sooner {
			c.die()
			return
		}
		err = tqerr.New(tqerr.Unavailable, "reset")
		go func() {
			time.Sleep(10 * time.Millisecond)
			c.die()
		}()
	})
	if err != nil {
		return 0, 0, err
	}
	return c.Conn.Segment(ctx, unit, segment)
}

// A put in two steps whose controller dies between its grant and the filling of what it has granted is made again, also when it
// had to wait for room, so that its bytes lie aside and the caller's memory is another value's by now.
func TestAPutIsMadeAgainThatWasNotFilled(t *testing.T) {
	for name, is := range map[string]struct{ waits, sooner bool }{
		"granted at once": {}, "granted late": {waits: true}, "noticed by the mapping first": {sooner: true},
	} {
		t.Run(name, func(t *testing.T) {
			o := setup{remote: true, limit: roomLimit, putWait: time.Minute, journal: journal.Relaxed}
			within(t, o, func(t *testing.T, s *system) {
				deaths := 0
				u := s.user(following, func(o *client.Options) {
					o.Conn = &unmapped{Conn: o.Conn, sooner: is.sooner, die: func() {
						deaths++
						s.restart()
					}}
				})
				other := s.user(following)
				full := 0
				for ; is.waits && s.stats().MemoryUsed+wideBytes <= roomLimit; full++ {
					other.put(s.rows(wide, []string{keysOf(64)[full]}, 7))
				}
				b := s.rows(wide, []string{"a"}, 1)
				p := u.beginPut(b)
				if is.waits {
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
