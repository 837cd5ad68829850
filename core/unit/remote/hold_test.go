package remote_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
)

// A controller that keeps a journal leaves what it has staged and leased to the next one, which says what becomes of it.
func TestWhatAControllerLeavesToTheNext(t *testing.T) {
	for name, n := range networks {
		t.Run(name, func(t *testing.T) {
			f := serve(t, n, 0)
			at := remote.Address{Name: "u", Session: 1, Keep: true, Hold: true}
			u := f.openAs(at)
			require.Zero(t, u.Changed())
			change := func(u *remote.Unit, number uint64) store.Staged {
				tx, err := u.Stage(t.Context(), "p", columns(1), make([]byte, 16))
				require.NoError(t, err)
				store.CommitChange(tx, samplesTo(1), number)
				return tx
			}
			change(u, 5)
			_, err := u.Read(&unit.Query{Partition: "p", Fields: []string{"x"}, Samples: samplesTo(1), Inline: -1}).Wait(t.Context())
			require.NoError(t, err)
			wanted, err := u.Stage(t.Context(), "p", columns(3), make([]byte, 48))
			require.NoError(t, err)
			_, err = u.Stage(t.Context(), "p", columns(2), nil)
			require.NoError(t, err)
			require.NoError(t, u.Close())

			u = f.openAs(at)
			require.EqualValues(t, 5, u.Changed())
			require.EqualValues(t, 2, u.Stats().Staged)
			require.EqualValues(t, 1, u.Stats().Leases)
			require.NoError(t, u.Recommit(t.Context(), store.TxnOf(wanted), samplesTo(3), 6))
			require.Equal(t, tqerr.NotFound, tqerr.CodeOf(u.Recommit(t.Context(), store.TxnOf(wanted), samplesTo(3), 7)))
			mine, err := u.Stage(t.Context(), "p", columns(1), nil)
			require.NoError(t, err)
			require.Greater(t, store.TxnOf(mine), store.TxnOf(wanted), "numbers are not used twice")
			require.NoError(t, u.Settle(t.Context(), false))
			require.EqualValues(t, 1, u.Stats().Staged, "its own")
			require.EqualValues(t, 1, u.Stats().Leases)
			require.NoError(t, u.Settle(t.Context(), true))
			require.Zero(t, u.Stats().Leases)
			require.EqualValues(t, 3, u.Stats().Cells)
			require.NoError(t, u.Close())

			u = f.openAs(at)
			require.EqualValues(t, 6, u.Changed(), "the last that was executed")
			change(u, 9)
			require.NoError(t, u.Close())
			other := f.openAs(remote.Address{Name: "u", Session: 2, Keep: true})
			require.Zero(t, other.Stats(), "another session gets nothing of it")
			require.Zero(t, other.Changed())
		})
	}
}
