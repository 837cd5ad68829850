//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

const roomLimit = 3 * wideBytes

// waitsForRoom starts puts, inline and staged, that do not fit beside what is stored.
var waitsForRoom = map[string]func(s *system) batch{
	"inline": func(s *system) batch {
		row := s.same(narrow, 1)
		b := s.rows(wide/2, []string{"new"}, 1)
		b.Fields, b.columns = append(b.Fields, "y"), append(b.columns, row)
		return b
	},
	"staged": func(s *system) batch { return s.rows(wide, []string{"new"}, 1) },
	"update": func(s *system) batch {
		b := s.rows(wide/2, []string{"a"}, 1)
		b.Update, b.Merge = true, "replace"
		return b
	},
}

func full(t *testing.T, s *system) *user {
	u := s.user()
	u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
	u.put(s.rows(wide-wide/4, []string{"c"}, 3))
	require.Less(t, roomLimit-s.stats().MemoryUsed, int64(wideBytes/2))
	return u
}

func TestAPutWaitsForRoom(t *testing.T) {
	for name, make := range waitsForRoom {
		t.Run(name, func(t *testing.T) {
			with(t, setup{limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
				u := full(t, s)
				p := s.user().beginPut(make(s))
				time.Sleep(time.Second)
				synctest.Wait()
				require.False(t, p.done())
				u.clear("b")
				require.NoError(t, p.wait().Err)
				require.LessOrEqual(t, s.stats().MemoryUsed, int64(roomLimit))
			})
		})
	}
}

// Memory that a reader leases is not free before the lease ends.
func TestAPutWaitsForTheLeaseOfAReader(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
		u := full(t, s)
		body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: []string{"b"}, Views: true})
		require.NoError(t, err)
		view := u.start(&client.Request{Op: wire.OpGet, Flags: client.Views, Body: body}).wait()
		u.clear("b")
		p := s.user().beginPut(s.rows(wide, []string{"new"}, 1))
		time.Sleep(time.Second)
		synctest.Wait()
		require.False(t, p.done())
		_, err = u.decoded(view)
		require.NoError(t, err)
		require.NoError(t, p.wait().Err)
	})
}

func TestAPutThatFindsNoRoomChangesNothing(t *testing.T) {
	ends := map[string]struct {
		timeout time.Duration
		cancel  bool
		code    tqerr.Code
		after   time.Duration
	}{
		"the wait of the unit is over": {0, false, tqerr.ResourceExhausted, time.Minute},
		"the time of the put is over":  {10 * time.Second, false, tqerr.ResourceExhausted, 10 * time.Second},
		"cancelled":                    {0, true, tqerr.Cancelled, time.Second},
	}
	for name, make := range waitsForRoom {
		for end, c := range ends {
			t.Run(name+"/"+end, func(t *testing.T) {
				with(t, setup{limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
					full(t, s)
					u := s.user()
					err := s.unchanged(t, func() error {
						begun := time.Now()
						b := make(s)
						b.timeout = c.timeout
						p := u.beginPut(b)
						if c.cancel {
							time.Sleep(time.Second)
							p.cancel()
						}
						r := p.wait()
						require.Equal(t, c.after, time.Since(begun).Round(time.Second))
						return r.Err
					})
					require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
					if c.code == tqerr.ResourceExhausted {
						require.ErrorContains(t, err, "used")
						require.ErrorContains(t, err, "of 221184")
						require.ErrorContains(t, err, "memory_limit_bytes")
					}
				})
			})
		}
	}
}

// What never fits fails at once.
func TestAPutBeyondTheLimitFailsAtOnce(t *testing.T) {
	for name, make := range map[string]func(s *system) batch{
		"all units together": func(s *system) batch { return s.rows(wide, keysOf(7), fill(7, 1)...) },
		"one row": func(s *system) batch {
			return batch{write: write{Partition: "p", Keys: []string{"a"}, Fields: []string{"x"}},
				columns: []foreign.Raw{s.same(4*wide, 1)}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 2, limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
				u := s.user()
				u.put(s.rows(narrow, []string{"other"}, 1))
				begun := time.Now()
				err := s.unchanged(t, func() error {
					_, err := u.tryPut(make(s))
					return err
				})
				require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
				require.Zero(t, time.Since(begun))
			})
		})
	}
}

// The number of samples has a limit too; reaching it fails at once and leaves nothing.
func TestTheLimitOfSamples(t *testing.T) {
	with(t, setup{units: 2, samples: 4}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		err := s.unchanged(t, func() error {
			_, err := u.tryPut(s.rows(narrow, []string{"x", "y"}, 1, 2))
			return err
		})
		require.Equal(t, tqerr.CapacityExceeded, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "Storage capacity exceeded")
		u.put(s.rows(narrow, []string{"x", "k0"}, 1, 2))
		u.clear("x")
		u.put(s.rows(narrow, []string{"y"}, 1))
	})
}

// A put that fits on one unit and not on the other waits quietly; giving back what it got must not wake it again.
func TestAPutOverUnitsWaitsForRoomQuietly(t *testing.T) {
	with(t, setup{units: 2, limit: roomLimit, putWait: time.Hour}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a"}, 1))
		u.put(batch{write: write{Partition: "p", Keys: []string{"b"}, Fields: []string{"x"}}, columns: []foreign.Raw{s.same(2*wide, 2)}})
		require.NotZero(t, s.units[1].Stats().Cells)

		var waiting []*pending
		for range 3 {
			waiting = append(waiting, s.user().beginPut(s.both(s.mem.Ragged(make([]int64, wide), make([]int64, 2*wide)))))
		}
		time.Sleep(time.Minute) // passes when everybody is at rest
		for _, p := range waiting {
			require.False(t, p.done())
		}
		require.Zero(t, s.stats().Staged)
		u.clear("b")
		time.Sleep(time.Minute) // two that were in each other's way try again a little later
		happened := 0
		for _, p := range waiting {
			p.cancel()
			if p.wait().Err == nil {
				happened++
			}
		}
		require.Equal(t, 1, happened, "there is room for one")
	})
}
