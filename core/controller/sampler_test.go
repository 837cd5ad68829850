//go:build go1.25

package controller_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// moody is a sampler that fails or panics for some tasks.
type moody struct{ sampler.Sequential }

func (m moody) Sample(ready sampler.Ready, r sampler.Request) (sampler.Pick, error) {
	switch r.Task {
	case "fails":
		return sampler.Pick{}, errors.New("rank 9 of 4")
	case "panics":
		panic("forced")
	}
	return m.Sequential.Sample(ready, r)
}

// A sampler that fails ends the fetch that asked it, and no other request: contract F12.
func TestAFailingSamplerHurtsOnlyItsFetch(t *testing.T) {
	with(t, setup{sampler: moody{}}, func(t *testing.T, s *system) {
		u := s.user()
		failing, good := u.fetch("fails", 2, 0), u.fetch("good", 2, 0)
		synctest.Wait()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		_, err := failing.try()
		require.ErrorContains(t, err, "rank 9 of 4")
		require.Equal(t, wire.Ints{0, 1}, good.indexes(t))
		_, err = u.fetch("fails", 2, 0).try()
		require.ErrorContains(t, err, "rank 9 of 4")
		require.Equal(t, []byte{0, 0}, u.consumed("fails"))
	})
}

// A panic gives an Internal reply to the request that met it, and to all that follow; nobody waits for ever.
func TestAPanicGivesInternalReplies(t *testing.T) {
	for name, begin := range map[string]func(s *system, u *user) *pending{
		"in a request": func(_ *system, u *user) *pending { return u.fetch("panics", 1, 0).pending },
		"in a request that wakes another": func(s *system, u *user) *pending {
			s.user().fetch("panics", 2, 0)
			synctest.Wait()
			return u.beginPut(s.rows(narrow, []string{"b"}, 1))
		},
		"in a request that has waited": func(s *system, u *user) *pending {
			update := u.slow("a")
			s.user().fetch("panics", 2, 0)
			put := s.user().beginPut(s.rows(narrow, []string{"a", "b"}, 5, 6))
			synctest.Wait()
			columns, err := sums(update.job, s.mem)
			require.NoError(s.t, err)
			s.giveBack(update.job, columns, 1)
			return put
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, setup{sampler: moody{}}, func(t *testing.T, s *system) {
				defer guard.ResetForTest()
				s.closed = true
				u := s.user()
				u.put(s.rows(narrow, []string{"a"}, 1))
				require.Equal(t, tqerr.Internal, tqerr.CodeOf(begin(s, u).wait().Err))
				require.Error(t, guard.Poisoned())
				require.Equal(t, tqerr.Internal, tqerr.CodeOf(u.try(wire.OpPartitions, nil, nil)))
			})
		})
	}
}
