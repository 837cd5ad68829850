//go:build go1.25

package controller_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

const (
	crashThreshold = 1 << 10
	crashLimit     = 12 << 10
)

// crashed is a session over durable units whose disks can be found as a crash leaves them.
type crashed struct {
	*system
	u     *user
	rng   *rand.Rand
	how   disktier.Durability
	disks []*vfs.Mem
	model map[cellName]outcomes
	next  int64
	keys  []string

	coming atomic.Pointer[crash]
	dice   *rand.Rand // of the disk
}

type cellName struct{ key, field string }

// outcome is what a cell may hold; width 0: nothing.
type outcome struct {
	value int64
	width int
}

// outcomes are all that may be there: more than one after a write of which nobody knows whether it has happened.
type outcomes []outcome

var absent = outcome{}

// inMemory reports that a value may be lost with a process: what is larger is on disk.
func (o outcome) inMemory() bool { return o.width > 0 && 8*o.width < crashThreshold }

// Random work on durable units, one of which crashes in the middle of a call of its file system, again and again. Relaxed: it
// is killed. Strict: what it has not synced is gone, or a random part of it. What was on disk and acknowledged is there when it
// comes back, what was in memory is lost by key, and nothing else is seen.
func TestUnitsCrashAndComeBack(t *testing.T) {
	for name, how := range map[string]disktier.Durability{"relaxed, killed": disktier.Relaxed, "strict, power loss": disktier.Strict} {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Log("seed", seed)
			for round := range uint64(6) {
				c := &crashed{rng: rand.New(rand.NewPCG(seed, round)), dice: rand.New(rand.NewPCG(round, seed)), how: how}
				dir := t.TempDir()
				within(t, setup{units: 2, remote: true, limit: crashLimit, diskFor: func(i int) *unit.Disk {
					c.disks = append(c.disks, vfs.NewMem(0))
					return c.disk(dir, i)
				}}, func(t *testing.T, s *system) { c.run(s) })
			}
		})
	}
}

func (c *crashed) disk(dir string, i int) *unit.Disk {
	return unit.Disk{
		Path: dir, Durability: c.how, Namespace: "test", Name: fmt.Sprintf("unit-%d", i), Threshold: crashThreshold,
		HighWatermark: 0.6, LowWatermark: 0.4, Headroom: headroom,
	}.OnDisk(&vfs.FailingDisk{Disk: c.disks[i], At: -1, Before: func(int) { c.beforeCall(i) }})
}

// crash is one that is to come: a unit crashes in a call of its file system.
type crash struct {
	unit  int
	calls atomic.Int64 // until then
	left  *vfs.Mem     // what is on the disk afterwards; set when it has happened
}

// beforeCall is told of every call of a unit's file system.
func (c *crashed) beforeCall(i int) {
	if now := c.coming.Load(); now != nil && now.unit == i && now.calls.Add(-1) == 0 {
		c.happens(now)
	}
}

func (c *crashed) happens(now *crash) {
	c.hosts[now.unit].stopped.Store(true)
	if c.how == disktier.Strict {
		now.left = c.disks[now.unit].Crash(c.dice)
	} else {
		now.left = c.disks[now.unit].Killed()
	}
}

func (c *crashed) run(s *system) {
	c.system, c.u = s, s.user()
	c.model = map[cellName]outcomes{}
	for i := range 8 {
		key := fmt.Sprint("k", i)
		c.keys = append(c.keys, key)
		c.model[cellName{key, "x"}], c.model[cellName{key, "y"}] = outcomes{absent}, outcomes{absent}
	}
	for range 5 {
		c.live(c.rng.IntN(2), c.rng.IntN(150))
		c.verify()
	}
}

// live works until a unit crashes, and lets it come back.
func (c *crashed) live(i, calls int) {
	now := &crash{unit: i}
	now.calls.Store(int64(calls + 1))
	c.coming.Store(now)
	h := c.hosts[i]
	for range 40 {
		c.step()
		if h.stopped.Load() {
			break
		}
	}
	c.coming.Store(nil)
	if !h.stopped.Load() {
		c.happens(now)
	}
	synctest.Wait()
	require.NoError(c.t, h.net.Close())
	synctest.Wait()
	require.NoError(c.t, h.server.Close())

	c.disks[i] = now.left
	h.disk = c.disk(h.disk.Path, i)
	var err error
	h.server, err = remote.NewServer(remote.Options{Name: h.name, MemoryLimit: crashLimit, Disk: h.disk, Jobs: c.jobs})
	require.NoError(c.t, err)
	h.net = memnet.New(uint64(i), h.server)
	h.stopped.Store(false)
	c.units[i] = h.server.Unit()
	c.joinHosts()
}

var widths = []int{4, 64, 64, 200, wide}

func (c *crashed) someKeys() []string {
	keys := slices.Clone(c.keys)
	c.rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	return keys[:1+c.rng.IntN(3)]
}

func (c *crashed) step() {
	keys := c.someKeys()
	fields := [][]string{{"x"}, {"y"}, {"x", "y"}}[c.rng.IntN(3)]
	switch c.rng.IntN(8) {
	case 0:
		c.settle(c.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys}), keys, []string{"x", "y"}, func(outcome) outcome { return absent })
	case 1:
		err := c.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys, Fields: fields})
		c.settle(err, keys, fields, func(outcome) outcome { return absent })
	case 2:
		c.update(keys, fields)
	case 3:
		c.read(keys[0], fields[0])
	default:
		c.put(keys, fields)
	}
}

func (c *crashed) try(op wire.Op, body any) error {
	c.mem.Reset()
	return c.u.begin(op, body, 0).released().Err
}

func (c *crashed) put(keys, fields []string) {
	c.mem.Reset()
	c.next++
	now := outcome{c.next, widths[c.rng.IntN(len(widths))]}
	_, err := c.u.tryPut(c.batch(keys, fields, now.width, now.value))
	c.settle(err, keys, fields, func(outcome) outcome { return now })
}

func (c *crashed) batch(keys, fields []string, width int, value int64) batch {
	b := batch{write: write{Partition: "p", Keys: keys, Fields: fields}}
	for range fields {
		b.columns = append(b.columns, c.same(width, fill(len(keys), value)...))
	}
	return b
}

// update adds to cells that are there and have one width.
func (c *crashed) update(keys, fields []string) {
	for _, key := range keys {
		for _, field := range fields {
			if c.model[cellName{key, field}][0].width != 64 {
				return
			}
		}
	}
	c.mem.Reset()
	_, err := c.u.tryPut(c.batch(keys, fields, 64, 1000).merge("add"))
	c.settle(err, keys, fields, func(old outcome) outcome { return outcome{old.value + 1000, old.width} })
}

// settle notes what became of a write.
func (c *crashed) settle(err error, keys, fields []string, now func(outcome) outcome) {
	if err != nil {
		require.Equal(c.t, tqerr.Unavailable, tqerr.CodeOf(err), err)
		require.True(c.t, c.hosts[0].stopped.Load() || c.hosts[1].stopped.Load(), err)
	}
	for _, key := range keys {
		for _, field := range fields {
			cell := cellName{key, field}
			before := c.model[cell]
			if err == nil {
				before = before[:0:0]
			}
			c.model[cell] = append(before[:len(before):len(before)], now(c.model[cell][0]))
		}
	}
}

// read compares a cell with the model and returns what is there. While a unit is down it may not answer.
func (c *crashed) read(key, field string) (got outcome, lost bool) {
	may := c.model[cellName{key, field}]
	r, err := c.u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}, Fields: []string{field}}, 0)
	switch tqerr.CodeOf(err) {
	case tqerr.OK:
	case tqerr.Unavailable:
		require.True(c.t, c.hosts[0].stopped.Load() || c.hosts[1].stopped.Load(), err)
		return may[0], false
	case tqerr.DataLost:
		require.ErrorContains(c.t, err, fmt.Sprintf("field %q of keys %q", field, key))
		require.True(c.t, slices.ContainsFunc(may, outcome.inMemory) || slices.Contains(may, absent), "%s of %s is lost, was one of %v", field, key, may)
		return absent, true
	default: // the key does not exist, or has no field
		require.Contains(c.t, []tqerr.Code{tqerr.NotFound, tqerr.InvalidArgument}, tqerr.CodeOf(err), err)
	}
	if err == nil && r.ints[field] != nil {
		row := r.ints[field][0]
		got = outcome{row[0], len(row)}
		checkAll(c.t, r.ints[field], row[0])
	}
	require.Contains(c.t, may, got, "%s of %s", field, key)
	return got, false
}

// verify reads everything, and compares the counts too.
func (c *crashed) verify() {
	synctest.Wait()
	c.check()
	cells, missing := int64(0), int64(0)
	for cell := range c.model {
		got, lost := c.read(cell.key, cell.field)
		if lost {
			missing++
		} else if got != absent {
			cells++
		}
		c.model[cell] = outcomes{got}
	}
	synctest.Wait()
	require.Equal(c.t, cells, c.stats().Cells, "the units have what can be read, and nothing else")
	require.Equal(c.t, missing, c.u.unit("unit-0").LostCells+c.u.unit("unit-1").LostCells)
}
