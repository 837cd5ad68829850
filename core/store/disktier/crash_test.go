package disktier

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// crasher does random things to a store and knows what each sample may hold after the process or the power has gone. A write
// gives the fields x and y of its samples values of one seed; 0 means no value. Both come, or none.
type crasher struct {
	t    testing.TB
	s    *Store
	rnd  *rand.Rand
	now  map[int64]pair   // what is visible
	may  map[int64][]pair // what a crash may leave: all since the last Sync that succeeded
	seed uint64
	gen  map[int64]uint32
	// unacknowledged is set when what happens from now on may be lost or not.
	unacknowledged bool
}

// pair is the seeds of x and y.
type pair [2]uint64

var pairFields = []string{"x", "y"}

const crashIndexes = 12

func newCrasher(t testing.TB, s *Store, seed uint64) *crasher {
	return &crasher{t: t, s: s, rnd: rand.New(rand.NewPCG(seed, 1)), now: map[int64]pair{}, may: map[int64][]pair{}, gen: map[int64]uint32{}}
}

// sizeOf is the size of a value: small, page-sized or large enough to be punched.
func sizeOf(seed uint64) int64 { return []int64{0, 37, 900, 4096, 5000, 70_000}[seed%6] }

func (c *crasher) set(index int64, p pair) {
	if len(c.may[index]) == 0 {
		c.may[index] = []pair{c.now[index]}
	}
	c.now[index] = p
	c.may[index] = append(c.may[index], p)
}

// sync is what an acknowledgement waits for.
func (c *crasher) sync() error {
	err := c.s.Tier().Sync()
	if err == nil && !c.unacknowledged {
		clear(c.may)
	}
	return err
}

func (c *crasher) some() []schema.Sample {
	from := c.rnd.Int64N(crashIndexes)
	out := make([]schema.Sample, 1+c.rnd.Int64N(min(4, crashIndexes-from)))
	for i := range out {
		out[i] = schema.Sample{Index: from + int64(i), Generation: c.gen[from+int64(i)]}
	}
	return out
}

func (c *crasher) step() error {
	switch c.rnd.IntN(10) {
	case 0, 1, 2, 3, 4:
		return c.put()
	case 5, 6:
		return c.remove()
	case 7:
		return c.readAll(c.s, false)
	case 8:
		_, err := c.s.Tier().Compact()
		return err
	default:
		return c.sync()
	}
}

func (c *crasher) put() error {
	list := c.some()
	c.seed++
	size := sizeOf(c.seed)
	x, y := bytesColumn("x", len(list), size), bytesColumn("y", len(list), size)
	if c.seed%3 == 0 { // all rows of x are alike, and may be one
		x.Rows, x.Share = 1, make([]uint32, len(list))
	}
	tx, err := c.s.Stage("p", []schema.Column{x, y})
	if err != nil {
		return err
	}
	for k, b := range tx.Blocks() {
		to := c.s.Bytes(b)
		for i := range []int{x.Rows, y.Rows}[k] {
			copy(to[int64(i)*size:], text(c.seed))
		}
	}
	err = store.Prepare(context.Background(), tx)
	if err == nil && c.rnd.IntN(3) == 0 {
		err = store.Hold(tx)
	}
	if err != nil || c.rnd.IntN(6) == 0 {
		tx.Abort()
		return err
	}
	tx.Commit(list)
	for _, s := range list {
		c.set(s.Index, pair{c.seed, c.seed})
	}
	return c.sync()
}

func (c *crasher) remove() error {
	list, onlyY := c.some(), c.rnd.IntN(2)
	c.s.Delete("p", pairFields[onlyY:], list)
	for _, s := range list {
		if onlyY == 1 {
			c.set(s.Index, pair{c.now[s.Index][0], 0})
		} else {
			c.set(s.Index, pair{})
			c.gen[s.Index]++
		}
	}
	return c.sync()
}

// readAll compares every sample with what it must hold, or after a crash with what it may.
func (c *crasher) readAll(s *Store, crashed bool) error {
	for index := range int64(crashIndexes) {
		among := []pair{c.now[index]}
		if crashed && len(c.may[index]) > 0 {
			among = c.may[index]
		}
		var got [2]string
		for i, field := range pairFields {
			var err error
			if got[i], err = c.find(s, field, index, crashed); err != nil {
				return err
			}
		}
		require.True(c.t, slices.ContainsFunc(among, func(p pair) bool { return got == [2]string{text(p[0]), text(p[1])} }),
			"sample %d has none of the values %v", index, among)
	}
	return nil
}

const noValue = "no value"

// texts has the values by seed, because all stores of all tests here have the same.
var texts sync.Map

func text(seed uint64) string {
	if seed == 0 {
		return noValue
	}
	known, ok := texts.Load(seed)
	if !ok {
		known, _ = texts.LoadOrStore(seed, string(value(seed, sizeOf(seed))))
	}
	return known.(string)
}

// find reads a cell under the generation of now, and after a crash under earlier ones too.
func (c *crasher) find(s *Store, field string, index int64, crashed bool) (string, error) {
	for g := int64(c.gen[index]); g >= 0; g-- {
		l, err := s.Read("p", []string{field}, []schema.Sample{{Index: index, Generation: uint32(g)}})
		var missing *store.MissingError
		switch {
		case err == nil:
			defer l.Release()
			return string(bytesOf(s, l)), nil
		case !errors.As(err, &missing):
			return "", err
		case !crashed:
			return noValue, nil
		}
	}
	return noValue, nil
}

// requireConsistent checks a store that was opened after a crash: its cells, and that the folder holds nothing else.
func (c *crasher) requireConsistent(s *Store, disk *vfs.Mem) {
	require.NoError(c.t, s.Check())
	require.NoError(c.t, c.readAll(s, true))
	u := s.Tier().Usage()
	require.Equal(c.t, s.Stats().DiskUsed, u.Live, "bytes on disk that no cell names")
	s.DropHeld() // of a write whose end was not durable
	for index := range int64(crashIndexes) {
		for g := range c.gen[index] + 1 {
			s.Delete("p", nil, []schema.Sample{{Index: index, Generation: g}})
		}
	}
	require.NoError(c.t, s.Tier().Sync())
	require.Zero(c.t, s.Stats().Cells)
	require.Zero(c.t, s.Tier().Usage().Live)
	require.NoError(c.t, s.Close())
	require.Less(c.t, disk.Used(), int64(3*testHeadroom+64<<10), "reserve and index of an empty store")
}

const testHeadroom = 100 << 10

func testOptions(durability Durability, fs vfs.Disk) Options {
	o := Options{Dir: "d/tier", Durability: durability, SegmentBytes: 128 << 10, HeadroomBytes: testHeadroom, grow: 8 << 10, ahead: 16 << 10}
	return o.OnDisk(fs)
}

// memory is an arena without checks, for stores that are given up.
func memory(t testing.TB) *arena.Arena {
	a, err := arena.New(arena.Options{SegmentBytes: 1 << 30})
	require.NoError(t, err)
	t.Cleanup(func() { _ = a.Close() })
	return a
}

func TestKilled(t *testing.T) {
	for range 10 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			disk, a := vfs.NewMem(0), memory(t)
			s, err := OpenStore(testOptions(Relaxed, disk), a, 0)
			require.NoError(t, err)
			c := newCrasher(t, s, seed)
			for i := range 300 {
				require.NoError(t, c.step())
				if i%20 == 0 {
					left := disk.Killed()
					again, err := OpenStore(testOptions(Relaxed, left), a, 0)
					require.NoError(t, err)
					c.requireConsistent(again, left)
				}
			}
			require.NoError(t, s.Close())
		})
	}
}

func TestPowerLoss(t *testing.T) {
	for range 10 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			disk, a := vfs.NewMem(0), memory(t)
			s, err := OpenStore(testOptions(Strict, disk), a, 0)
			require.NoError(t, err)
			c := newCrasher(t, s, seed)
			for i := range 300 {
				require.NoError(t, c.step())
				if i%10 != 0 {
					continue
				}
				for _, rnd := range []*rand.Rand{nil, c.rnd, c.rnd} {
					left := disk.Crash(rnd)
					again, err := OpenStore(testOptions(Strict, left), a, 0)
					require.NoError(t, err)
					c.requireConsistent(again, left)
				}
			}
			require.NoError(t, s.Close())
		})
	}
}

// TestEveryCallFails lets the i-th file call fail for every i. What was acknowledged is there afterwards, in the process that
// goes on and in the next one.
func TestEveryCallFails(t *testing.T) {
	for _, durability := range []Durability{None, Relaxed, Strict} {
		for _, cause := range []error{unix.EIO, unix.ENOSPC} {
			for _, forever := range []bool{false, true} {
				t.Run(fmt.Sprint(durability, " ", cause, " ", forever), func(t *testing.T) {
					a := memory(t)
					for i, failed := 0, true; failed; i++ {
						failed = failAt(t, a, durability, i, cause, forever)
					}
				})
			}
		}
	}
}

func failAt(t *testing.T, a *arena.Arena, durability Durability, i int, cause error, forever bool) bool {
	disk := vfs.NewMem(0)
	failing := &vfs.FailingDisk{Disk: disk, At: i, Err: cause, Forever: forever}
	s, err := OpenStore(testOptions(durability, failing), a, 0)
	if err != nil {
		require.True(t, failing.Failed())
		require.ErrorIs(t, err, cause)
		again, err := OpenStore(testOptions(durability, disk.Killed()), a, 0)
		require.NoError(t, err, "call %d: a failed start leaves a folder that can be used", i)
		require.NoError(t, again.Close())
		return true
	}
	c := newCrasher(t, s, 3)
	for range 40 {
		if err := c.step(); err != nil {
			require.True(t, failing.Failed(), "call %d: %v", i, err)
		}
	}
	hit := failing.Failed()
	failing.Heal()
	require.NoError(t, s.Check())
	require.NoError(t, c.readAll(s, false), "call %d: the process goes on", i)
	left := disk.Killed()
	if durability == Strict {
		left = disk.Crash(c.rnd)
	}
	if durability != None {
		again, err := OpenStore(testOptions(durability, left), a, 0)
		require.NoError(t, err, "call %d", i)
		c.requireConsistent(again, left)
	}
	require.NoError(t, c.sync(), "call %d: the index has recovered", i)
	_ = s.Close()
	return hit
}
