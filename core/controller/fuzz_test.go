//go:build go1.25

package controller_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/controller"
	"transferqueue/core/guard"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/jobs"
	"transferqueue/core/sampler"
	"transferqueue/core/store/memtier"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// fuzzed are the requests whose bodies are fuzzed: all but those that name files and sockets.
var fuzzed = []wire.Op{
	wire.OpPut, wire.OpCommit, wire.OpAbort, wire.OpGet, wire.OpRelease, wire.OpClear, wire.OpClearPartition, wire.OpList, wire.OpWait,
	wire.OpWatchOpen, wire.OpWatchNext, wire.OpWatchClose, wire.OpMeta, wire.OpRetrieveMeta, wire.OpRetrieveKeys, wire.OpSetTags,
	wire.OpConsumption, wire.OpResetConsumption, wire.OpProduction, wire.OpPartitions, wire.OpUnits, wire.OpStatus, wire.OpSnapshot,
	wire.OpRegisterSampler, wire.OpMetrics, wire.OpCreatePartition, wire.OpStoreConfig, wire.OpStream, wire.OpProgress,
}

// FuzzServe gives a controller requests of arbitrary bytes beside a stored and a staged put: each has one reply, the books stay
// right, and nothing is held when the client is gone.
func FuzzServe(f *testing.F) {
	number := map[wire.Op]uint8{}
	for i, op := range fuzzed {
		number[op] = uint8(i)
		f.Add(uint8(i), []byte{0x90}, []byte{})
	}
	for op, body := range bodies() {
		raw, err := wire.Marshal(body)
		require.NoError(f, err)
		f.Add(number[op], raw, make([]byte, 16))
	}
	f.Fuzz(func(t *testing.T, which uint8, body, payload []byte) {
		pool := bufpool.New()
		queue := jobs.New(pool)
		u, err := unit.New(unit.Options{Name: "unit-0", MemoryLimit: 1 << 20, Jobs: queue})
		require.NoError(t, err)
		s := controller.New(controller.Options{Units: []controller.Unit{u}, Sampler: sampler.Sequential{}, Python: queue, Jobs: queue.Waiting})
		peer := transport.Peer{ID: 7, Local: true}
		ctx, cancel := context.WithCancel(t.Context())
		sequence := uint64(0)
		ask := func(op wire.Op, body, payload []byte, patience time.Duration) *wire.Reply {
			sequence++
			replies := make(chan *wire.Reply, 4)
			s.Serve(ctx, peer, &wire.Request{Op: op, Sequence: wire.Sequence(1, sequence), Body: body, Payload: payload}, func(r *wire.Reply) { replies <- r })
			timer := time.NewTimer(patience)
			defer timer.Stop()
			select {
			case r := <-replies:
				require.Empty(t, replies)
				return r
			case <-timer.C: // it waits for what does not come
			}
			cancel()
			return <-replies
		}
		for _, stored := range []bool{true, false} {
			req := bodies()[wire.OpPut].(*wire.PutRequest)
			req.Inline = stored
			raw, err := wire.Marshal(req)
			require.NoError(t, err)
			reply := ask(wire.OpPut, raw, make([]byte, 16), time.Minute)
			require.Equal(t, tqerr.OK, reply.Code, "%v", reply.Err())
		}
		require.NotNil(t, ask(fuzzed[int(which)%len(fuzzed)], body, payload, 20*time.Millisecond))
		require.NoError(t, guard.Poisoned())
		cancel()
		s.Gone(peer)
		require.NoError(t, s.Verify())
		st := u.Stats()
		require.Zero(t, st.Staged+st.Leases)
		require.NoError(t, u.Store.(*memtier.Store).Check())
		queue.Close()
		s.Close()
		require.NoError(t, u.Close())
		pool.Close()
	})
}
