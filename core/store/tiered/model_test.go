package tiered

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
)

const modelIndexes = 30

// client does random things in a partition of its own and knows what every cell must hold.
type client struct {
	s         *Store
	rnd       *rand.Rand
	partition string
	free      chan struct{} // something was freed
	cells     map[int64]uint64
	gen       map[int64]uint32
	seed      uint64
	refused   int
}

func bytesOf(seed uint64) []byte {
	out := make([]byte, []int{0, 50, 900, 2000, 3000, 9000, 40_000}[seed%7])
	rnd := rand.New(rand.NewPCG(seed, 7))
	for i := range out {
		out[i] = byte(rnd.Uint32())
	}
	return out
}

func (c *client) sample(index int64) schema.Sample {
	return schema.Sample{Index: index, Generation: c.gen[index]}
}

func (c *client) step() error {
	switch c.rnd.IntN(8) {
	case 0, 1, 2:
		return c.put()
	case 3:
		c.delete(c.rnd.Int64N(modelIndexes))
		return nil
	default:
		return c.read()
	}
}

// put writes some rows, most of different sizes, so that the column lies in both tiers. It waits for room.
func (c *client) put() error {
	from := c.rnd.Int64N(modelIndexes)
	n := 1 + c.rnd.Int64N(min(4, modelIndexes-from))
	column := schema.Column{Field: "x", Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: int(n), Form: schema.Varying, Shape: []int64{0}}
	var rows [][]byte
	seeds := map[int64]uint64{}
	var list []schema.Sample
	for i := from; i < from+n; i++ {
		c.seed++
		seeds[i] = c.seed
		rows, list = append(rows, bytesOf(c.seed)), append(list, c.sample(i))
		column.Lengths = append(column.Lengths, int64(len(rows[len(rows)-1])))
	}
	if c.rnd.IntN(4) == 0 { // all have the value of the first, and share it
		for i := from; i < from+n; i++ {
			seeds[i] = seeds[from]
		}
		column.Rows, column.Lengths, column.Share, rows = 1, column.Lengths[:1], make([]uint32, n), rows[:1]
	}
	tx, err := c.stage(column)
	if err != nil {
		return err
	}
	to := c.s.Bytes(tx.Blocks()[0])
	for _, row := range rows {
		to = to[copy(to, row):]
	}
	if err := store.Prepare(context.Background(), tx); err != nil {
		return err
	}
	if c.rnd.IntN(8) == 0 {
		tx.Abort()
		return nil
	}
	tx.Commit(list)
	for i, seed := range seeds {
		c.cells[i] = seed
	}
	return nil
}

func (c *client) stage(column schema.Column) (store.Staged, error) {
	for {
		tx, err := c.s.Stage(c.partition, []schema.Column{column})
		if tqerr.CodeOf(err) != tqerr.ResourceExhausted {
			return tx, err
		}
		c.refused++
		select {
		case <-c.free:
		case <-time.After(time.Minute):
			return nil, fmt.Errorf("no room became free: %w", err)
		}
	}
}

func (c *client) delete(index int64) {
	c.s.Delete(c.partition, nil, []schema.Sample{c.sample(index)})
	delete(c.cells, index)
	c.gen[index]++
}

func (c *client) read() error {
	var list []schema.Sample
	var want []byte
	for i := range int64(modelIndexes) {
		if seed, ok := c.cells[i]; ok && c.rnd.IntN(3) == 0 {
			list, want = append(list, c.sample(i)), append(want, bytesOf(seed)...)
		}
	}
	l, err := c.s.Read(c.partition, []string{"x"}, list)
	if err != nil {
		return err
	}
	defer l.Release()
	var got []byte
	for _, run := range l.Columns()[0].Runs {
		got = append(got, c.s.Bytes(run.Block)...)
	}
	if !slices.Equal(got, want) {
		return errors.New("a read returned other bytes than were written")
	}
	return nil
}

// TestModel lets eight clients work at once on a store whose limits are so small that cells move all the time.
func TestModel(t *testing.T) {
	for name, o := range map[string]Options{
		"little memory":          {MemoryLimit: 150_000, Threshold: 1 << 40},
		"memory and a threshold": {MemoryLimit: 120_000, Threshold: 3000},
		"durable":                {MemoryLimit: 120_000, Threshold: 9000, Disk: disktier.Options{Durability: disktier.Relaxed}},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			o.Disk.SegmentBytes = 256 << 10
			s := open(t, o)
			clients := make([]*client, 8)
			for i := range clients {
				c := &client{
					s: s, rnd: rand.New(rand.NewPCG(seed, uint64(i))), partition: fmt.Sprint("p", i), free: make(chan struct{}, 1),
					cells: map[int64]uint64{}, gen: map[int64]uint32{}, seed: uint64(i) << 32,
				}
				s.OnFree(func() {
					select {
					case c.free <- struct{}{}:
					default:
					}
				})
				clients[i] = c
			}
			requireModel(t, s, clients)
			require.NoError(t, s.Close())
		})
	}
}

func requireModel(t *testing.T, s *Store, clients []*client) {
	failed := make([]error, len(clients))
	over := make(chan int64, 1)
	done := make(chan struct{})
	go func() { // the limit holds at every instant: looked at as often as leaves the clients a processor
		tick := time.NewTicker(20 * time.Microsecond)
		defer tick.Stop()
		worst := int64(0)
		for {
			st := s.Stats()
			worst = max(worst, st.MemoryUsed+st.Staging-st.MemoryLimit)
			select {
			case <-done:
				over <- worst
				return
			case <-tick.C:
			}
		}
	}()
	var wait sync.WaitGroup
	for i, c := range clients {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for range 300 {
				if failed[i] = c.step(); failed[i] != nil {
					return
				}
			}
		}()
	}
	wait.Wait()
	close(done)
	require.NoError(t, errors.Join(failed...))
	require.LessOrEqual(t, <-over, int64(0))
	require.NoError(t, s.Check())
	n := s.Counters()
	require.Positive(t, n.SpilledBytes, "the limits were too large to test anything")
	for _, c := range clients {
		for i := range int64(modelIndexes) {
			c.delete(i)
		}
	}
	st := s.Stats()
	st.MemoryLimit, st.DiskLimit = 0, 0
	require.Equal(t, store.Stats{}, st, "nothing is left, to the byte")
}
