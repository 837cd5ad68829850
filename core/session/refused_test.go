package session_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// contents are the files below a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		out[path] = string(data)
		return err
	}))
	return out
}

// An owner whose journal is that of a session with other units is refused. It says why and nothing else, changes nothing, and
// leaves nothing behind that would keep the right one from starting in the same process.
func TestARefusedStartChangesNothing(t *testing.T) {
	for _, durability := range []string{"relaxed", "strict"} {
		t.Run(durability, func(t *testing.T) {
			leaktest.Check(t)
			cfg := in(config(t), func(c *session.Config) {
				c.Mode, c.Keep = "own", true
				c.Journal = session.Journal{Durability: durability, Path: t.TempDir()}
			})
			s, err := session.Open(context.Background(), cfg)
			require.NoError(t, err)
			require.NoError(t, ask(s, wire.OpCreatePartition, &wire.PartitionRequest{Partition: "p"}, nil))
			require.NoError(t, s.Close(time.Second))
			before := contents(t, cfg.Journal.Path)
			require.NotEmpty(t, before)
			for _, units := range []int{1, 3, -1} {
				_, err := session.Open(context.Background(), in(cfg, func(c *session.Config) { c.Units = units }))
				require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err), err)
				require.ErrorContains(t, err, "in the controller's process; start as many units there as before, or name another folder")
				require.NotContains(t, err.Error(), "closed")
				require.Equal(t, before, contents(t, cfg.Journal.Path))
			}
			s, err = session.Open(context.Background(), cfg)
			require.NoError(t, err)
			require.True(t, s.Info.Restored)
			var names wire.NamesReply
			require.NoError(t, ask(s, wire.OpPartitions, nil, &names))
			require.Equal(t, wire.Strings{"p"}, names.Names)
			require.NoError(t, s.Close(time.Second))
		})
	}
}
