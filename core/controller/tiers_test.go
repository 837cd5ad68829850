//go:build go1.25

package controller_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// infos lists the units.
func (u *user) infos() []wire.UnitInfo {
	u.t.Helper()
	var reply wire.UnitsReply
	u.ask(wire.OpUnits, nil, &reply)
	return reply.Units
}

// onDisk tells which keys have their value on disk: only those make a read stage something.
func (s *system) diskCells() (n int64) {
	for _, u := range s.units {
		n += u.Counters().DiskCells
	}
	return n
}

// Puts beyond memory wait until the unit has moved others to disk, and are told of it at once, wherever the unit is.
func TestPutsBeyondMemoryWaitForTheSpill(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Minute, disk: &unit.Disk{}}, func(t *testing.T, s *system) {
		u := s.user()
		begun := time.Now()
		for i := range int64(12) {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, i))
			st := s.units[0].Stats()
			require.LessOrEqual(t, st.MemoryUsed+st.Staging, int64(roomLimit))
		}
		require.Less(t, time.Since(begun), time.Second, "nobody waits for the end of a time")
		for i := range int64(12) {
			require.Equal(t, []int64{i}, u.values(fmt.Sprint("k", i)))
		}
		synctest.Wait()
		info := u.infos()[0]
		require.Positive(t, info.SpilledCells)
		require.Equal(t, info.DiskCells*wideBytes, info.DiskUsed)
		require.Equal(t, info.MemoryCells*wideBytes, info.MemoryUsed)
		require.EqualValues(t, 12, info.DiskCells+info.MemoryCells)
	})
}

// Many writers at once get room one after another.
func TestManyWritersWaitForTheSpill(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Hour, disk: &unit.Disk{}}, func(t *testing.T, s *system) {
		var all []*pending
		for i := range int64(16) {
			all = append(all, s.user().beginPut(s.rows(wide, []string{fmt.Sprint("k", i)}, i)))
		}
		for _, p := range all {
			require.NoError(t, p.wait().Err)
		}
		u := s.user()
		for i := range int64(16) {
			require.Equal(t, []int64{i}, u.values(fmt.Sprint("k", i)))
		}
	})
}

// A clear that frees disk wakes a put that waits for disk.
func TestAPutWaitsForTheDisk(t *testing.T) {
	disk := &unit.Disk{Threshold: 1, Limit: 3 * wideBytes}
	with(t, setup{limit: roomLimit, putWait: time.Hour, disk: disk}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, keysOf(3), 1, 2, 3))
		p := s.user().beginPut(s.rows(wide, []string{"new"}, 4))
		time.Sleep(time.Minute)
		require.False(t, p.done())
		u.clear("k1")
		require.NoError(t, p.wait().Err)
		require.Equal(t, []int64{1, 3, 4}, u.values("k0", "k2", "new"))
	})
}

func (u *user) consume(task string, n int) []int64 {
	u.t.Helper()
	var reply wire.MetaReply
	u.ask(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: wire.Strings{"x"}, BatchSize: n, Task: task}, &reply)
	return reply.Indexes
}

// What every task has consumed moves first, then what lacks a field, whatever was touched last; the unit asks the controller.
func TestWhatIsNeededLeastSpillsFirst(t *testing.T) {
	const limit = 12 * wideBytes
	disk := &unit.Disk{HighWatermark: 0.8, LowWatermark: 0.55}
	with(t, setup{limit: limit, putWait: time.Minute, disk: disk}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"consumed0", "consumed1"}, 1, 1))
		require.Len(t, u.consume("train", 2), 2)
		u.put(s.rows(wide, []string{"a", "b", "c", "d", "e", "f"}, 2, 2, 2, 2, 2, 2))
		u.put(s.rows(wide, []string{"unready"}, 3))
		u.values("consumed0", "consumed1", "unready") // touched last
		more := s.rows(narrow, []string{"consumed0", "consumed1", "a", "b", "c", "d", "e", "f"}, 1, 1, 1, 1, 1, 1, 1, 1)
		more.Fields = wire.Strings{"y"}
		u.put(more)
		require.Zero(t, s.diskCells())
		u.put(s.rows(wide, []string{"last"}, 4))
		synctest.Wait()
		require.EqualValues(t, 4*wideBytes, s.stats().DiskUsed/wideBytes*wideBytes, "and a few that are small")
		u.clear("consumed0", "consumed1", "unready", "last") // "last" lacks a field too
		synctest.Wait()
		require.Zero(t, s.diskCells(), "these were on disk, and no others")
	})
}

// A write that is cancelled while its values go to disk stops, and leaves nothing.
func TestACancelledPutStopsWritingToDisk(t *testing.T) {
	for name, make := range map[string]func(s *system, width int, keys []string, values ...int64) batch{
		"put": (*system).rows, "update": (*system).add,
	} {
		t.Run(name, func(t *testing.T) {
			stall := &stalling{Disk: vfs.OSDisk{}}
			disk := (unit.Disk{Threshold: 1}).OnDisk(stall)
			with(t, setup{disk: disk}, func(t *testing.T, s *system) {
				u := s.user()
				const long = 1 << 20 // elements: many steps of a write
				u.put(s.rows(long, []string{"a"}, 1))
				before := s.stats()
				stall.begin()
				p := u.beginPut(make(s, long, []string{"a"}, 2))
				<-stall.reached
				p.cancel()
				synctest.Wait()
				stall.end()
				require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(p.wait().Err))
				synctest.Wait()
				require.Less(t, stall.written(), 4, "the rest was not written")
				require.Equal(t, before, s.stats())
				require.Equal(t, []int64{1}, u.values("a"))
			})
		})
	}
}

// stalling is a disk whose writes wait, one after another, between begin and end.
type stalling struct {
	vfs.Disk
	mu      sync.Mutex
	gate    chan struct{} // nil: nobody waits
	reached chan struct{}
	writes  int
}

func (d *stalling) begin() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gate, d.reached, d.writes = make(chan struct{}), make(chan struct{}, 1), 0
}

func (d *stalling) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.gate)
	d.gate = nil
}

func (d *stalling) written() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.writes
}

func (d *stalling) Create(name string) (vfs.DiskFile, error) {
	f, err := d.Disk.Create(name)
	return stallingFile{f, d}, err
}

type stallingFile struct {
	vfs.DiskFile
	d *stalling
}

func (f stallingFile) WriteAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	gate := f.d.gate
	f.d.writes++
	f.d.mu.Unlock()
	if gate != nil {
		select {
		case f.d.reached <- struct{}{}:
		default:
		}
		<-gate
	}
	return f.DiskFile.WriteAt(p, off)
}

// alike is a put whose rows have the same bytes, to be stored once.
func (s *system) alike(width int, keys []string, values ...int64) batch {
	b := s.rows(width, keys, values...)
	b.Dedup = wire.Strings{"x"}
	return b
}

// Equal rows are stored once on each unit that has some of them, also when other clients have decided meanwhile where they go.
func TestEqualRowsAreStoredOnceOnEachUnit(t *testing.T) {
	for name, disk := range map[string]*unit.Disk{"memory": nil, "disk": {Threshold: 1}} {
		for _, width := range []int{narrow, wide} {
			t.Run(fmt.Sprint(name, width), func(t *testing.T) {
				with(t, setup{units: 2, disk: disk}, func(t *testing.T, s *system) {
					u := s.user()
					for i := range int64(6) { // over both units
						u.put(s.rows(width, []string{fmt.Sprint("k", i)}, 0))
					}
					require.NotZero(t, s.units[1].Stats().Cells)
					require.NotZero(t, s.units[0].Stats().Cells)
					u.put(s.alike(width, keysOf(6), 7, 8, 7, 7, 8, 7))
					require.Equal(t, []int64{7, 8, 7, 7, 8, 7}, u.values(keysOf(6)...))
					synctest.Wait()
					st := s.stats()
					require.LessOrEqual(t, st.MemoryUsed+st.DiskUsed, int64(4*8*width))
					require.EqualValues(t, 6, st.Cells)
				})
			})
		}
	}
}

// Two clients create the same keys at once: one write has to move to where the other has placed them.
func TestEqualRowsThatHaveToMove(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		for round := range int64(20) {
			keys := []string{fmt.Sprint("a", round), fmt.Sprint("b", round), fmt.Sprint("c", round)}
			var all []*pending
			for i := range int64(4) {
				all = append(all, s.user().beginPut(s.alike(wide, keys, i, i, i+10)))
			}
			for _, p := range all {
				require.NoError(t, p.wait().Err)
			}
			got := s.users[0].values(keys...)
			require.Equal(t, got[0], got[1])
			require.Equal(t, got[0]+10, got[2])
			s.users[0].clear(keys...)
			s.mem.Reset()
		}
	})
}

func TestRowsThatCannotBeSharedAreRefused(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		column := func() wire.Column { return wire.Column(columnOf(t, s.same(narrow, 1, 1, 2))) }
		ragged := wire.Column(columnOf(t, s.mem.Ragged([]int64{1}, []int64{1, 2}, []int64{1})))
		keys := wire.Strings{"a", "b", "c"}
		for name, req := range map[string]*wire.PutRequest{
			"no such column":    {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Column: 1, Rows: wire.Ints{0, 0, 2}}}},
			"a column twice":    {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Rows: wire.Ints{0, 0, 2}}, {Rows: wire.Ints{0, 0, 2}}}},
			"too few rows":      {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Rows: wire.Ints{0, 0}}}},
			"a later row":       {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Rows: wire.Ints{0, 2, 2}}}},
			"a row of another":  {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Rows: wire.Ints{0, 0, 1}}}},
			"a negative row":    {Columns: []wire.Column{column()}, Shared: []wire.Sharing{{Rows: wire.Ints{0, -1, 2}}}},
			"rows of two sizes": {Columns: []wire.Column{ragged}, Shared: []wire.Sharing{{Rows: wire.Ints{0, 0, 0}}}},
			"an update":         {Columns: []wire.Column{column()}, Update: true, Merge: "add", Shared: []wire.Sharing{{Rows: wire.Ints{0, 0, 2}}}},
			"no parser":         {Columns: []wire.Column{column()}, Dedup: wire.Strings{"x"}},
			"no such field":     {Columns: []wire.Column{column()}, Callable: []byte{1}, Dedup: wire.Strings{"y"}},
			"shares in a column": {Columns: []wire.Column{func() wire.Column {
				c := column()
				c.Share = []uint32{0, 1, 2, 0}
				return c
			}()}},
		} {
			req.Partition, req.Keys = "p", keys
			err := u.try(wire.OpPut, req, nil)
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%s: %v", name, err)
		}
		require.Empty(t, u.keys())
	})
}

// columnOf is the description of a column in memory.
func columnOf(t *testing.T, raw foreign.Raw) schema.Column {
	rows := 3
	in, err := foreign.New("x", rows, &raw)
	require.NoError(t, err)
	return in.Column
}
