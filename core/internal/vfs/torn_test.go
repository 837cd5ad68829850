package vfs_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
)

func TestMayBeTorn(t *testing.T) {
	whole := bytes.Repeat([]byte{7}, 2000)
	const at = 300 // sectors begin at 212, 724, 1236 and 1748 of it
	without := func(from, to int) []byte {
		out := bytes.Clone(whole)
		clear(out[from:to])
		return out
	}
	for name, found := range map[string][]byte{
		"nothing": {}, "its end": without(1990, 2000), "its last byte": without(1999, 2000), "all but a byte": without(1, 2000),
		"a sector": without(724, 1236), "the first": without(0, 212), "the last": without(1748, 2000), "more than one": without(212, 1748),
	} {
		require.True(t, vfs.MayBeTorn(found, at), name)
	}
	for name, found := range map[string][]byte{
		"is there": whole, "a sector but for a byte": without(725, 1236), "as much elsewhere": without(500, 1012), "its beginning": without(0, 211),
	} {
		require.False(t, vfs.MayBeTorn(found, at), name)
	}
}
