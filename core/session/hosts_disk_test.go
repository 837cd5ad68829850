//go:build zmq

package session_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

const wideBytes = wide * 8

// withDisk is the configuration of a unit whose rows of wide elements go to disk: at once, or when memory has no room.
func withDisk(t *testing.T, cfg *session.Config, memory, threshold int64) *session.Config {
	dir := t.TempDir()
	return in(cfg, func(c *session.Config) {
		c.MemoryLimit = memory
		c.Disk = session.Disk{Enabled: true, Path: dir, Threshold: threshold, HighWatermark: 0.9, LowWatermark: 0.4}
	})
}

func countsOf(t *testing.T, s *session.Session, unit string) wire.UnitInfo {
	t.Helper()
	var reply wire.UnitsReply
	require.NoError(t, ask(s, wire.OpUnits, nil, &reply))
	for _, u := range reply.Units {
		if u.ID == unit {
			return u
		}
	}
	require.Fail(t, "no unit "+unit)
	return wire.UnitInfo{}
}

func save(t *testing.T, s *session.Session, dir string) {
	t.Helper()
	var at wire.SaveReply
	require.NoError(t, ask(s, wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "begin", Path: dir, Save: 1, Metadata: "{}"}, &at))
	for _, r := range []wire.SaveRequest{{Step: "state", Path: at.State}, {Step: "values", Path: at.Values}, {Step: "commit", Save: 1}} {
		require.NoError(t, ask(s, wire.OpSaveCheckpoint, &r, nil))
	}
}

func load(t *testing.T, s *session.Session, dir string) {
	t.Helper()
	require.NoError(t, ask(s, wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "all", Path: dir}, nil))
}

// Units on two other hosts, one with all its values on disk and one that has room in memory for a few; clients on each of the
// three. Rows that are the same cross the network once; checkpoints hold everything, and are loaded by such units and by others.
func TestTiersOnOtherHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	startedB := spawnOn(t, withDisk(t, cfg, 0, 1000), "unit-b", "b")
	startedC := spawnOn(t, withDisk(t, cfg, 6*wideBytes, 1<<40), "unit-c", "c")
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units, c.PutWaitMS = -1, 20_000 }))
	require.NoError(t, joinAway(here, startedB(), startedC()))
	hosts := []string{"b", "c", "a"}
	writers := map[string]*writer{"a": {here, foreigntest.New(t, 64<<20)}}
	for _, host := range hosts[:2] {
		on(t, host)
		writers[host] = &writer{open(t, reaching(cfg, here.Info.Address)), foreigntest.New(t, 64<<20)}
	}
	var keys []string
	var want []int64
	for n, host := range hosts {
		w, before := writers[host], countsOf(t, here, "unit-b")
		for i := range int64(10) {
			keys, want = append(keys, fmt.Sprint(host, i)), append(want, int64(100*n)+i)
			require.NoError(t, w.put(putBody{Keys: keys[len(keys)-1:]}, wide, want[len(want)-1]), host)
		}
		same := putBody{Dedup: wire.Strings{"x"}}
		for i := range 6 {
			same.Keys = append(same.Keys, fmt.Sprint(host, "-same-", i))
		}
		require.NoError(t, w.put(same, wide, 1, 2, 1, 2, 2, 1))
		keys, want = append(keys, same.Keys...), append(want, 1, 2, 1, 2, 2, 1)
		if after := countsOf(t, here, "unit-b"); host == "b" {
			require.EqualValues(t, 12*wideBytes, after.WrittenBytes-before.WrittenBytes, "two of six rows are stored")
			require.EqualValues(t, 16*wideBytes, after.DiskLogical-before.DiskLogical)
		}
	}
	check := func(readers ...*writer) {
		t.Helper()
		for _, r := range readers {
			got, err := r.values(keys...)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	}
	check(writers["a"], writers["b"], writers["c"])
	require.Positive(t, countsOf(t, here, "unit-c").SpilledCells)
	dir := filepath.Join(t.TempDir(), "c")
	save(t, here, dir)
	load(t, here, dir) // in the place of what is there
	check(writers["c"])
	require.NoError(t, writers["a"].clear(keys...))
	load(t, here, dir)
	check(writers["a"], writers["b"])

	on(t, "a")
	near := open(t, in(cfg, func(c *session.Config) { c.Mode, c.Listen, c.Namespace = "own", "", "memory" }))
	load(t, near, dir)
	check(&writer{near, nil})
	save(t, near, dir+"-near")
	load(t, here, dir+"-near")
	check(writers["a"], writers["c"])
	for _, host := range hosts[:2] {
		require.NoError(t, writers[host].s.Close(time.Second))
	}
}

// What a unit on another host has on disk can be read, of several fields and rows in any order, when neither its memory nor its
// disk has room for loading it.
func TestAFullUnitOnAnotherHostIsRead(t *testing.T) {
	checkRemote(t)
	cfg := withDisk(t, listening(config(t)), 3*wideBytes, 1<<40)
	cfg.Disk.Limit = 4 * wideBytes
	started := spawnOn(t, cfg, "unit-b", "b")
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units, c.PutWaitMS = -1, 300 }))
	require.NoError(t, joinAway(here, started()))
	w := &writer{here, foreigntest.New(t, 64<<20)}
	var keys []string
	var want []int64
	for i := int64(0); ; i++ {
		key := fmt.Sprint("k", i)
		if err := w.put(putBody{Keys: wire.Strings{key}}, wide, i); err != nil {
			require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), "%v", err)
			break
		}
		keys, want = append([]string{key}, keys...), append([]int64{i}, want...)
	}
	require.Len(t, keys, 7)
	got, err := w.values(keys...)
	require.NoError(t, err)
	require.Equal(t, want, got)
	for i, key := range keys {
		got, err := w.values(key)
		require.NoError(t, err)
		require.Equal(t, want[i:i+1], got)
	}
}

// A value that is damaged on the disk of a unit on another host ends a save, which names it; what was saved before stays.
func TestASaveNamesADamagedValueOfAnotherHost(t *testing.T) {
	checkRemote(t)
	cfg := withDisk(t, listening(config(t)), 0, 1000)
	started := spawnOn(t, cfg, "unit-b", "b")
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	require.NoError(t, joinAway(here, started()))
	w := &writer{here, foreigntest.New(t, 64<<20)}
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"good"}}, narrow, 1))
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"bad"}}, wide, 0x0123456789abcdef))
	dir := filepath.Join(t.TempDir(), "c")
	save(t, here, dir)
	require.Positive(t, damage(t, cfg.Disk.Path, 0x0123456789abcdef))
	var at wire.SaveReply
	require.NoError(t, ask(here, wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "begin", Path: dir, Save: 2, Metadata: "{}"}, &at))
	err := ask(here, wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "values", Path: at.Values}, nil)
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, `partition "p": key "bad": field "x": the value on disk is damaged`)
	require.NoError(t, ask(here, wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "abort", Save: 2}, nil))
	require.NoError(t, w.clear("good", "bad"))
	load(t, here, dir)
	got, err := w.values("good", "bad")
	require.NoError(t, err)
	require.Equal(t, []int64{1, 0x0123456789abcdef}, got)
}

// damage changes a byte in every file below a folder that holds an element, and counts them.
func damage(t *testing.T, folder string, element uint64) (files int) {
	pattern := binary.NativeEndian.AppendUint64(nil, element)
	require.NoError(t, filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		at := bytes.Index(data, pattern)
		if err != nil || at < 0 {
			return err
		}
		files++
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteAt([]byte{pattern[0] ^ 1}, int64(at))
		return errors.Join(err, f.Close())
	}))
	return files
}

// A unit on another host asks the controller what moves to disk first: what its task has consumed, though it was read last.
func TestAdviceCrossesHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	payload := freePort(t)
	start := spawnWith(t, withDisk(t, cfg, 10*wideBytes, 1<<40), "unit-b", "b", payload)
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units, c.PutWaitMS = -1, 20_000 }))
	unit := start()
	p := &proxy{}
	p.calm.Store(true)
	startProxy(t, p, payload, portOf(t, unit.Info.Address))
	require.NoError(t, joinAway(here, unit.behindProxy()))
	w := &writer{here, foreigntest.New(t, 64<<20)}
	var keys []string
	more := func(n int) {
		for range n {
			keys = append(keys, fmt.Sprint("k", len(keys)))
			require.NoError(t, w.put(putBody{Keys: keys[len(keys)-1:]}, wide, int64(len(keys))))
		}
	}
	more(8)
	require.NoError(t, ask(here, wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: wire.Strings{"x"}, BatchSize: 4, Task: "t"}, nil))
	_, err := w.values(keys[:4]...)
	require.NoError(t, err)
	p.cutAll() // the question that waits at the unit is there again on the next connection
	p.down.Store(false)
	more(2)
	require.Eventually(t, func() bool { return countsOf(t, here, "unit-b").SpilledCells >= 4 }, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, w.clear(keys[:4]...))
	left := countsOf(t, here, "unit-b")
	require.EqualValues(t, left.SpilledCells-4, left.DiskCells, "the four that were consumed were among those that moved")
	require.NoError(t, w.clear(keys[4:]...))
	requireClean(t, here) // before the proxy ends
}
