//go:build go1.25

package controller_test

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
)

// remembering has a state that it takes only when it begins with a capital letter.
type remembering struct {
	sampler.Sequential
	state string
}

func (r *remembering) Save() ([]byte, error) { return []byte(r.state), nil }

func (r *remembering) Load(state []byte) error {
	if len(state) == 0 || state[0] < 'A' || state[0] > 'Z' {
		return tqerr.New(tqerr.InvalidArgument, "no state of this sampler")
	}
	r.state = string(state)
	return nil
}

func TestTheStateOfTheSamplerIsSavedToo(t *testing.T) {
	own := &remembering{state: "Then"}
	with(t, setup{sampler: own}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.save(dir)
		own.state = "now"
		u.save(dir + "2")
		u.put(s.rows(narrow, []string{"a"}, 2))

		err := u.tryLoad(dir + "2")
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "the sampler of this session")
		require.Equal(t, []int64{2}, u.values("a"), "nothing has changed")
		require.Zero(t, s.stats().Staged)

		u.load(dir)
		require.Equal(t, "Then", own.state)
		require.Equal(t, []int64{1}, u.values("a"))
	})
}
