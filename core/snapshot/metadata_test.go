package snapshot

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func stateOf(samples map[string]int) *catalog.State {
	s := &catalog.State{}
	for name, n := range samples {
		s.Partitions = append(s.Partitions, catalog.PartitionState{Name: name, Samples: make([]schema.Sample, n)})
	}
	return s
}

func TestMetadataIsThatOfItsState(t *testing.T) {
	dir := t.TempDir()
	user := `{"a \"NaN": [NaN, -Infinity, Infinity], "b": "\\", "c": "Infinity"}`
	saved := stateOf(map[string]int{"p/\"1": 3, "<ü>": 0})
	require.NoError(t, WriteMetadata(vfs.OS{}, dir, user, saved))
	m, err := ReadMetadata(vfs.OS{}, dir)
	require.NoError(t, err)
	require.NoError(t, m.Describes(saved))
	for what, other := range map[string]map[string]int{
		`partition "p/\"1": 3 samples, but 2 in controller_state.tq`: {"p/\"1": 2, "<ü>": 0},
		`partition "<ü>" is not in controller_state.tq`:              {"p/\"1": 3},
		`partition "more" of controller_state.tq is not in it`:       {"p/\"1": 3, "<ü>": 0, "more": 0},
	} {
		err := m.Describes(stateOf(other))
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
		require.ErrorContains(t, err, MetadataName)
		require.ErrorContains(t, err, what)
	}
}

func TestReadMetadata(t *testing.T) {
	for name, c := range map[string]struct {
		text, want string
		code       tqerr.Code
	}{
		"empty":              {"", "want a JSON object", tqerr.Corruption},
		"cut off":            {`{"storage_saved": true`, "unexpected end", tqerr.Corruption},
		"a list":             {`[1]`, "want a JSON object", tqerr.Corruption},
		"more behind":        {`{} {}`, "after top-level value", tqerr.Corruption},
		"newer":              {`{"format_version": 2}`, "format_version 2, this release reads up to 1", tqerr.VersionMismatch},
		"version 0":          {`{"format_version": 0}`, "format_version 0", tqerr.Corruption},
		"version of text":    {`{"format_version": "x"}`, "invalid number", tqerr.Corruption},
		"version 1.5":        {`{"format_version": 1.5}`, "format_version 1.5", tqerr.Corruption},
		"no values":          {`{"storage_saved": false}`, "storage_saved is false", tqerr.Corruption},
		"flag of text":       {`{"storage_saved": "yes"}`, "storage_saved", tqerr.Corruption},
		"user list":          {`{"user_metadata": [1]}`, "user_metadata is no JSON object", tqerr.Corruption},
		"partitions of text": {`{"partitions": {"p": "x"}}`, "partitions", tqerr.Corruption},
		"nothing":            {" {}\n", "", tqerr.OK},
		"of the user alone":  {`{"user_metadata": {"loss": NaN}, "note": 1}`, "", tqerr.OK},
		"version 1":          {`{"storage_saved": true, "user_metadata": {}, "format_version": 1}`, "", tqerr.OK},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, MetadataName), []byte(c.text), 0o600))
			m, err := ReadMetadata(vfs.OS{}, dir)
			require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
			if err != nil {
				require.ErrorContains(t, err, filepath.Join(dir, MetadataName))
				require.ErrorContains(t, err, c.want)
				return
			}
			require.NoError(t, m.Describes(stateOf(map[string]int{"any": 1})))
		})
	}
	_, err := ReadMetadata(vfs.OS{}, t.TempDir())
	require.Equal(t, tqerr.FileNotFound, tqerr.CodeOf(err))
}
