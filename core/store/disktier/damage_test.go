package disktier

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// closed is the folder of a store that was closed with two values of 5000 bytes and one of 100,000.
func closed(t *testing.T, durability Durability) string {
	dir := filepath.Join(t.TempDir(), "tier")
	s, err := OpenStore(Options{Dir: dir, Durability: durability}, openArena(t), 0)
	require.NoError(t, err)
	put(t, s, 0, 2, 5000)
	put(t, s, 2, 1, 100_000)
	require.NoError(t, s.Close())
	return dir
}

func reopen(t *testing.T, dir string) (*Store, error) {
	return OpenStore(Options{Dir: dir, Durability: Relaxed}, openArena(t), 0)
}

// change rewrites a file.
func change(t *testing.T, path string, how func(data []byte) []byte) {
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, how(data), 0o600))
}

func flip(at int) func([]byte) []byte {
	return func(data []byte) []byte { data[at] ^= 0x10; return data }
}

// everything is the content of a folder.
func everything(t *testing.T, dir string) map[string]string {
	out := map[string]string{}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
		out[e.Name()] = string(data)
	}
	return out
}

// TestRefusedFolders opens folders that were damaged or are not of a disk tier. Nothing in them changes.
func TestRefusedFolders(t *testing.T) {
	version := func(data []byte) []byte {
		h, err := decodeHeader(data)
		require.NoError(t, err)
		b := h.encode()
		order.PutUint16(b[10:], formatVersion+1)
		order.PutUint32(b[60:], crcOf(b[:60]))
		return append(b, data[headerBytes:]...)
	}
	foreign := func(data []byte) []byte {
		h, err := decodeHeader(data)
		require.NoError(t, err)
		h.store[3]++
		return append(h.encode(), data[headerBytes:]...)
	}
	for name, test := range map[string]struct {
		file string
		how  func([]byte) []byte
		code tqerr.Code
		text string
	}{
		"index of a newer version":    {"index-00000001", version, tqerr.VersionMismatch, "version 2, this program knows 1"},
		"values of a newer version":   {"values-00000001", version, tqerr.VersionMismatch, "version 2, this program knows 1"},
		"values of another store":     {"values-00000001", foreign, tqerr.Corruption, "belongs to another store"},
		"header of the index":         {"index-00000001", flip(12), tqerr.Corruption, "its header is damaged"},
		"header of the values":        {"values-00000001", flip(12), tqerr.Corruption, "its header is damaged"},
		"first frame of the index":    {"index-00000001", flip(headerBytes + 9), tqerr.Corruption, "its first frame is damaged"},
		"second frame of the index":   {"index-00000001", flip(headerBytes + frameBytes + 40), tqerr.Corruption, "frame 2 is damaged, at byte"},
		"empty index":                 {"index-00000001", func([]byte) []byte { return nil }, tqerr.Corruption, "is empty"},
		"index cut in its header":     {"index-00000001", func(b []byte) []byte { return b[:30] }, tqerr.Corruption, "its header is damaged"},
		"values that are empty":       {"values-00000001", func([]byte) []byte { return nil }, tqerr.Corruption, `field "x" of sample 0 in partition "p" should be there`},
		"values that are not of us":   {"values-00000001", func([]byte) []byte { return []byte("important notes") }, tqerr.Corruption, "not a file of a disk tier"},
		"index that is somebody's":    {"index-00000001", func([]byte) []byte { return []byte("important notes") }, tqerr.Corruption, "not a file of a disk tier"},
		"index that has another name": {"index-00000007", func([]byte) []byte { return (header{kind: indexKind, number: 6}).encode() }, tqerr.Corruption, "number 6"},
		"a file that nobody knows":    {"notes.txt", func([]byte) []byte { return []byte("x") }, tqerr.AlreadyExists, `"notes.txt"`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := closed(t, Relaxed)
			path := filepath.Join(dir, test.file)
			if _, err := os.Stat(path); err != nil {
				require.NoError(t, os.WriteFile(path, nil, 0o600))
			}
			change(t, path, test.how)
			before := everything(t, dir)
			for _, durability := range []Durability{Relaxed, None} {
				_, err := OpenStore(Options{Dir: dir, Durability: durability}, openArena(t), 0)
				if durability == Relaxed {
					require.Equal(t, test.code, tqerr.CodeOf(err), "%v", err)
					require.ErrorContains(t, err, test.text)
				}
				require.Error(t, err)
				require.Equal(t, before, everything(t, dir), "a refused folder is left as it was")
			}
		})
	}
}

// A bit that has changed in the last frame of an index, behind which nothing says that it was whole, is damage all the same when all
// of the frame is there: it names the file and the place, and nothing is changed. A frame whose end is missing is torn.
func TestADamagedTailIsToldFromATornOne(t *testing.T) {
	for _, durability := range []Durability{Relaxed, Strict} {
		dir := filepath.Join(t.TempDir(), "tier")
		o := Options{Dir: dir, Durability: durability, HeadroomBytes: 4 << 10}
		s, err := OpenStore(o, openArena(t), 0)
		require.NoError(t, err)
		put(t, s, 1, 1, 5000)
		put(t, s, 2, 1, 5000)
		require.NoError(t, s.Close())
		files := everything(t, dir)
		whole := []byte(files["index-00000001"])
		begin, end, slipped := bytes.LastIndex(whole, frameMagic), len(bytes.TrimRight(whole, "\x00")), 0
		open := func(index []byte) (*Store, error) {
			require.NoError(t, os.RemoveAll(dir))
			require.NoError(t, os.Mkdir(dir, 0o700))
			for name, data := range files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600))
			}
			require.NoError(t, os.WriteFile(filepath.Join(dir, "index-00000001"), index, 0o600))
			return OpenStore(o, openArena(t), 0)
		}
		without := func(s *Store) {
			require.False(t, s.Has("p", []string{"x"}, samples(2, 1)))
			requireValue(t, s, 1, 5000)
			require.NoError(t, s.Close())
		}
		for at := begin; at < end; at++ {
			torn, bad := bytes.Clone(whole), bytes.Clone(whole)
			clear(torn[at:])
			s, err := open(torn)
			require.NoError(t, err, "cut at %d", at)
			without(s)
			bad[at] ^= 1 << (at % 8)
			if s, err = open(bad); err == nil {
				without(s)
				slipped++
				continue
			}
			require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
			require.ErrorContains(t, err, fmt.Sprintf("index-00000001: frame 3 is damaged, at byte %d", begin))
			require.Equal(t, string(bad), everything(t, dir)["index-00000001"])
		}
		require.LessOrEqual(t, slipped, 1+3, "it ends in a zero, or is longer than what is there")
	}
}

func TestValuesWithoutAnIndexAreRefused(t *testing.T) {
	dir := closed(t, Relaxed)
	require.NoError(t, os.Remove(filepath.Join(dir, "index-00000001")))
	_, err := reopen(t, dir)
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
	require.FileExists(t, filepath.Join(dir, "values-00000001"))
}

func TestAFolderInUseIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tier")
	s, err := OpenStore(Options{Dir: dir}, openArena(t), 0)
	require.NoError(t, err)
	_, err = OpenStore(Options{Dir: dir}, openArena(t), 0)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "is in use")
	require.NoError(t, s.Close())
}

// TestDamagedValues damages one value of three. It is never read in part, and the others are read.
func TestDamagedValues(t *testing.T) {
	large := func(data []byte) int { return len(data) - 100_000 }
	for name, test := range map[string]struct {
		how    func([]byte) []byte
		index  int64
		others []int64
	}{
		"first byte of the first": {func(b []byte) []byte { return flip(valuesStart)(b) }, 0, []int64{1, 2}},
		"last byte of the second": {func(b []byte) []byte { return flip(valuesStart + 9999)(b) }, 1, []int64{0, 2}},
		"a byte of the large one": {func(b []byte) []byte { return flip(large(b) + 50_000)(b) }, 2, []int64{0, 1}},
		"cut inside the large":    {func(b []byte) []byte { return b[:large(b)+99_999] }, 2, []int64{0, 1}},
		"cut before the large":    {func(b []byte) []byte { return b[:large(b)] }, 2, []int64{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := closed(t, Relaxed)
			change(t, filepath.Join(dir, "values-00000001"), test.how)
			s, err := reopen(t, dir)
			require.NoError(t, err)
			sizes := []int64{5000, 5000, 100_000}
			for _, list := range [][]int64{{test.index}, {0, 1, 2}} {
				var samples = samples(0, 3)[:0]
				for _, index := range list {
					samples = append(samples, samplesOf(index))
				}
				_, err := s.Read("p", []string{"x"}, samples)
				var damaged *store.DamagedError
				require.True(t, errors.As(err, &damaged), "%v", err)
				require.Equal(t, "x", damaged.Field)
				require.Equal(t, test.index, damaged.Sample.Index)
			}
			for _, index := range test.others {
				requireValue(t, s, index, sizes[index])
			}
			require.Zero(t, s.Stats().Leases)
			_, err = s.Tier().Compact()
			require.NoError(t, err, "what is damaged stays where it is")
			s.Delete("p", nil, samples(0, 3))
			require.Zero(t, s.Stats().DiskUsed)
			require.NoError(t, s.Close())
		})
	}
}

func TestAMissingFileLosesOnlyItsOwnValues(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tier")
	s, err := OpenStore(Options{Dir: dir, Durability: Relaxed, SegmentBytes: 8 << 10}, openArena(t), 0)
	require.NoError(t, err)
	put(t, s, 0, 1, 9000)
	put(t, s, 1, 1, 9000)
	require.NoError(t, s.Close())
	require.NoError(t, os.Remove(filepath.Join(dir, "values-00000001")))
	s, err = reopen(t, dir)
	require.NoError(t, err)
	_, err = s.Read("p", []string{"x"}, samples(0, 1))
	require.ErrorContains(t, err, `field "x": sample 0: the value on disk is damaged`)
	requireValue(t, s, 1, 9000)
	s.Delete("p", nil, samples(0, 2))
	require.NoError(t, s.Close())
}
