//go:build go1.25

package controller_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/journal"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// A process that dies at any write to a file while a value on disk is replaced. Whoever wrote it is answered by the next one: the
// value is his then, or lost because it was in memory only; it is not the one before.
func TestAValueOnDiskIsNotTakenForTheOneThatReplacedIt(t *testing.T) {
	writes := map[string]struct {
		lost bool // what it wrote was in memory only
		make func(s *system) batch
		want int64
	}{
		"put to memory":    {true, func(s *system) batch { return s.rows(narrow, []string{"a"}, 9) }, 9},
		"put to disk":      {false, func(s *system) batch { return s.rows(wide, []string{"a"}, 9) }, 9},
		"update to memory": {true, func(s *system) batch { return s.add(narrow, []string{"m"}, 9) }, 10},
	}
	for name, write := range writes {
		for _, durability := range []journal.Durability{journal.Relaxed, journal.Strict} {
			t.Run(name+"/"+map[journal.Durability]string{journal.Relaxed: "relaxed", journal.Strict: "strict"}[durability], func(t *testing.T) {
				o := setup{units: 1, durable: true, journal: durability, disk: &unit.Disk{Threshold: 1000}}
				for at, more := 1, true; more; at++ {
					within(t, o, func(t *testing.T, s *system) {
						more = s.replaceAndDie(t, write.make(s), write.want, write.lost, at)
					})
				}
			})
		}
	}
}

// replaceAndDie lets the process die at a write to a file that a put of one key makes; false: it makes fewer.
func (s *system) replaceAndDie(t *testing.T, b batch, want int64, mayLose bool, at int) (died bool) {
	first := s.user(func(o *client.Options) {
		o.Redial, o.Remembered = func(context.Context) (transport.Conn, error) { panic("replaced by user") }, true
	})
	first.put(s.rows(wide, []string{"a"}, 1))
	first.put(s.rows(narrow, []string{"m"}, 1))
	require.NoError(t, s.units[0].Store.(interface{ Flush() error }).Flush())
	s.mortal.doom(false, uint64(at))
	s.mortal.dieAfter(at)
	p := first.beginPut(b)
	select {
	case <-s.mortal.died:
		died = true
	case r := <-p.result:
		require.NoError(t, r.Err)
		p.result <- r
	}
	s.restart()
	_, err := putResult(p.wait())
	require.NoError(t, err, "write %d", at)
	u, key := s.user(), b.Keys[0]
	var lost wire.LostReply
	u.ask(wire.OpLost, &wire.LostRequest{}, &lost)
	if len(lost.Cells) == 0 {
		require.Equal(t, []int64{want}, u.values(key), "write %d", at)
	} else {
		require.Equal(t, wire.Strings{key}, lost.Cells[0].Keys, "write %d", at)
		require.True(t, mayLose, "write %d", at)
		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}}, client.Flags(0))
		require.Error(t, err)
	}
	u.put(s.rows(narrow, []string{"a", "m"}, 5, 6))
	require.Equal(t, []int64{5, 6}, u.values("a", "m"))
	time.Sleep(2 * time.Minute) // nobody is awaited any more
	return died
}
