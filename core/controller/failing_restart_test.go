//go:build go1.25

package controller_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

const pairs = 3

// pairWork writes pairs of keys, one on each of two durable units, always both at once. 0 is that there is none.
type pairWork struct {
	t     *testing.T
	s     *system
	u     *user
	call  int
	might map[int][]int64 // what a pair may be: one value when its last write was acknowledged
}

func (w *pairWork) keys(pair int) []string {
	return []string{fmt.Sprint("a", pair), fmt.Sprint("b", pair)}
}

// wrote notes the outcome of a write that makes a pair a value.
func (w *pairWork) wrote(pair int, value int64, err error) {
	if err == nil {
		w.might[pair] = []int64{value}
		return
	}
	code := tqerr.CodeOf(err)
	require.Contains(w.t, []tqerr.Code{tqerr.IO, tqerr.ResourceExhausted, tqerr.Internal}, code, "call %d: %v", w.call, err)
	w.might[pair] = append(w.might[pair], value)
}

func (w *pairWork) put(pair int, value int64) {
	_, err := w.u.tryPut(w.s.rows(narrow, w.keys(pair), value, value))
	w.wrote(pair, value, err)
}

// run overwrites, updates and clears pairs. One that is in doubt is overwritten.
func (w *pairWork) run() {
	for n := range int64(10) {
		pair := int(n) % pairs
		known := w.might[pair]
		switch {
		case n%5 == 3 && len(known) == 1 && known[0] != 0:
			_, err := w.u.tryPut(w.s.add(narrow, w.keys(pair), 1000, 1000))
			w.wrote(pair, known[0]+1000, err)
		case n%5 == 4:
			w.wrote(pair, 0, w.u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: w.keys(pair)}, nil))
		default:
			w.put(pair, n+1)
		}
	}
}

// check compares what can be read with what may be there, and settles on it.
func (w *pairWork) check(when string) {
	for pair, might := range w.might {
		got := int64(0)
		values, err := w.find(pair)
		require.NoError(w.t, err, "call %d %s: pair %d", w.call, when, pair)
		if values != nil {
			require.Equal(w.t, values[0], values[1], "call %d %s: pair %d is torn", w.call, when, pair)
			got = values[0]
		}
		require.Contains(w.t, might, got, "call %d %s: pair %d", w.call, when, pair)
		w.might[pair] = []int64{got}
	}
}

// find reads a pair; nil: it is not there.
func (w *pairWork) find(pair int) ([]int64, error) {
	listed := w.u.keys()
	keys := w.keys(pair)
	has := slices.Contains(listed, keys[0])
	if has != slices.Contains(listed, keys[1]) {
		return nil, errors.New("it is there by half")
	}
	if !has {
		return nil, nil
	}
	got, err := w.u.tryGet(&wire.GetRequest{Partition: "p", Keys: keys, Strict: true}, 0)
	if err != nil {
		return nil, err
	}
	return []int64{got.ints["x"][0][0], got.ints["x"][1][0]}, nil
}

// Whatever call fails of the disk on which the journal and the durable units of a controller lie, every write over them has
// happened or has not, in the process that goes on and in the next one, and what was acknowledged has.
func TestEveryCallOfTheJournalAndItsUnitsFails(t *testing.T) {
	for name, durability := range map[string]journal.Durability{"relaxed": journal.Relaxed, "strict": journal.Strict} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			for at, more := 0, true; more; at += stride() {
				calls = at
				failing := &vfs.FailingDisk{At: -1, Err: []error{unix.EIO, unix.ENOSPC}[at%2]}
				o := setup{units: 2, durable: true, journal: durability, failing: failing}
				within(t, o, func(t *testing.T, s *system) {
					w := &pairWork{t: t, s: s, u: s.user(following), call: at, might: map[int][]int64{}}
					for pair := range pairs {
						for _, key := range w.keys(pair) { // on one unit and on the other
							w.u.put(s.rows(narrow, []string{key}, 500))
						}
						w.might[pair] = []int64{500}
					}
					require.NotZero(t, s.units[0].Stats().Cells)
					require.NotZero(t, s.units[1].Stats().Cells)
					failing.FailNext(at)
					w.run()
					more = failing.Failed()
					failing.Heal()
					_ = w.u.try(wire.OpList, &wire.ListRequest{}, nil) // a journal that is broken is replaced when somebody asks
					time.Sleep(2 * time.Second)
					w.check("in the process that goes on")
					s.setup.failing = nil
					s.restart()
					w.check("after a restart")
					w.put(0, 7)
					s.restart()
					w.check("after another one")
					time.Sleep(2 * time.Minute)
				})
			}
			require.Greater(t, calls, 50)
			t.Log(calls, "calls")
		})
	}
}
