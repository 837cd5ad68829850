//go:build go1.25

package remote_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

const room = 10 * 16 // bytes: ten rows

// onDisk runs a test with a unit that has room for ten rows in memory, of which four stay when more come.
func onDisk(t *testing.T, test func(t *testing.T, server *remote.Server, net *memnet.Network)) {
	leaktest.Check(t)
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		queue := jobs.New(nil)
		server, err := remote.NewServer(remote.Options{Name: "u", MemoryLimit: room, Jobs: queue, Disk: &unit.Disk{
			Path: dir, Run: "r", Unit: "u", Threshold: 1 << 40, HighWatermark: 0.9, LowWatermark: 0.4,
		}})
		require.NoError(t, err)
		net := memnet.New(1, server)
		test(t, server, net)
		require.NoError(t, net.Close())
		synctest.Wait()
		require.NoError(t, server.Close())
		queue.Close()
	})
}

func putRows(t *testing.T, u *remote.Unit, from, n int) {
	tx, err := u.Stage(t.Context(), "p", columns(n), make([]byte, 16*n))
	require.NoError(t, err)
	tx.Commit(samplesTo(from + n)[from:])
	require.NoError(t, u.Sync(t.Context()))
}

// spilled tells which of ten samples lie on disk.
func spilled(t *testing.T, server *remote.Server) (out []int) {
	u := server.Unit()
	for i, s := range samplesTo(10) {
		l, err := u.Pin("p", []string{"x"}, []schema.Sample{s})
		require.NoError(t, err)
		if store.Loads(l) {
			out = append(out, i)
		}
		l.Release()
	}
	return out
}

func openFor(t *testing.T, net *memnet.Network) *remote.Unit {
	conn, err := net.Dial(1)
	require.NoError(t, err)
	u, err := remote.Open(t.Context(), conn, remote.Address{Name: "u", Session: 1})
	require.NoError(t, err)
	t.Cleanup(func() { _ = u.Close() })
	return u
}

func TestTheControllerSaysWhatMovesFirst(t *testing.T) {
	onDisk(t, func(t *testing.T, server *remote.Server, net *memnet.Network) {
		u := openFor(t, net)
		u.Advise(func(partition string, samples []schema.Sample, uses []store.Use) {
			require.Equal(t, "p", partition)
			for i, s := range samples {
				require.Equal(t, store.Wanted, uses[i])
				if s.Index%2 == 1 {
					uses[i] = store.Use(s.Index % 3) // 3 and 9 are consumed, 1 and 7 unready
				}
			}
		})
		putRows(t, u, 0, 5)
		putRows(t, u, 5, 5)
		synctest.Wait()
		require.Equal(t, []int{0, 1, 2, 3, 7, 9}, spilled(t, server))
		require.NoError(t, u.Sync(t.Context()))
		require.EqualValues(t, 6, u.Counters().SpilledCells)
	})
}

// A unit does not wait for ever for a controller that has asked to be asked and says nothing.
func TestAdviceThatDoesNotComeIsNotWaitedFor(t *testing.T) {
	onDisk(t, func(t *testing.T, server *remote.Server, net *memnet.Network) {
		conn, err := net.Dial(1)
		require.NoError(t, err)
		sequence := uint64(0)
		post := func(op wire.Op, body any, done func(*wire.Reply, error)) {
			raw, err := wire.Marshal(body)
			require.NoError(t, err)
			sequence++
			conn.Post(&wire.Request{Op: op, Sequence: sequence, Body: raw}, done)
		}
		asked := make(chan wire.UnitReply, 1)
		ignore := func(*wire.Reply, error) {}
		post(wire.OpUnitOpen, &wire.UnitOpenRequest{Session: 1}, ignore)
		post(wire.OpUnitAdvise, &wire.UnitAdviseRequest{}, func(reply *wire.Reply, err error) {
			var question wire.UnitReply
			if err == nil {
				err = wire.Unmarshal(reply.Body, &question)
			}
			if err != nil {
				t.Error(err)
			}
			asked <- question
		})
		begun := time.Now()
		post(wire.OpUnitStage, &wire.UnitStageRequest{Txn: 1, Partition: "p", Columns: wireColumns(10)}, ignore)
		post(wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 1, Samples: wireSamples(10)}, ignore)
		question := <-asked
		require.Len(t, question.Question.Samples.Indexes, 10)
		synctest.Wait()
		require.Empty(t, spilled(t, server))
		time.Sleep(2 * time.Second)
		require.Len(t, spilled(t, server), 6)
		require.Less(t, time.Since(begun), 3*time.Second)
		// The answer to a question of which the time is over is not that of the next one.
		post(wire.OpUnitAdvise, &wire.UnitAdviseRequest{Question: 1, Uses: []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}, ignore)
		synctest.Wait()
		require.NoError(t, conn.Close())
	})
}

func TestTheEndOfTheControllerEndsTheWaitForAdvice(t *testing.T) {
	onDisk(t, func(t *testing.T, server *remote.Server, net *memnet.Network) {
		u := openFor(t, net)
		gate := make(chan struct{})
		u.Advise(func(string, []schema.Sample, []store.Use) { <-gate })
		putRows(t, u, 0, 10)
		begun := time.Now()
		require.NoError(t, u.Close())
		synctest.Wait()
		require.Len(t, spilled(t, server), 6)
		require.Zero(t, time.Since(begun))
		close(gate)
	})
}
