package remote_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/store/memtier"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

var streamOps = []wire.Op{wire.OpUnitStage, wire.OpUnitCommit, wire.OpUnitAbort, wire.OpUnitRead, wire.OpUnitRelease, wire.OpUnitDelete,
	wire.OpUnitTransform, wire.OpUnitStats, wire.OpUnitPrepare, wire.OpUnitInventory, wire.OpUnitDiscard}

// FuzzServe gives a unit requests of arbitrary bytes behind a staged and a stored write: it answers each, keeps its books
// right, and holds nothing when the controller is gone.
func FuzzServe(f *testing.F) {
	seed := func(which uint8, body any, payload int) {
		raw, err := wire.Marshal(body)
		require.NoError(f, err)
		f.Add(which, raw, make([]byte, payload))
	}
	seed(0, &wire.UnitStageRequest{Txn: 9, Partition: "p", Columns: wireColumns(2), Filled: true}, 32)
	seed(1, &wire.UnitCommitRequest{Txn: 1, Samples: wireSamples(2)}, 0)
	seed(2, &wire.TxnRequest{Txn: 1}, 0)
	seed(3, &wire.UnitReadRequest{Lease: 1, Partition: "p", Fields: wire.Strings{"x"}, Samples: wireSamples(3), Inline: 1000, Keep: true}, 0)
	seed(4, &wire.ReleaseRequest{Leases: wire.Ints{1}}, 0)
	seed(5, &wire.UnitDeleteRequest{Partition: "p", Samples: wireSamples(1)}, 0)
	seed(6, &wire.UnitTransformRequest{Txn: 9, Partition: "p", Samples: wireSamples(2), Columns: wireColumns(2), Operand: 1, Update: true, Merge: "add"}, 0)
	seed(7, &wire.UnitOpenRequest{}, 0)
	f.Fuzz(func(t *testing.T, which uint8, body, payload []byte) {
		s := serve(t, networks["inproc"], 1<<20)
		peer := transport.Peer{ID: 1}
		sequence := uint64(0)
		ctx, cancel := context.WithCancel(t.Context())
		ask := func(op wire.Op, body, payload []byte) *wire.Reply {
			sequence++
			replies := make(chan *wire.Reply, 1)
			req := &wire.Request{Op: op, Sequence: sequence, Body: body, Payload: payload}
			s.server.Serve(ctx, peer, req, func(r *wire.Reply) { replies <- r })
			select {
			case r := <-replies:
				return r
			default:
			}
			if op == wire.OpUnitPrepare {
				return <-replies // of a goroutine of its own
			}
			if op != wire.OpUnitTransform {
				t.Fatalf("%s was not answered at once", op)
			}
			cancel() // it may wait for a Python thread
			return <-replies
		}
		must := func(op wire.Op, body any, payload int) {
			raw, err := wire.Marshal(body)
			require.NoError(t, err)
			require.Equal(t, tqerr.OK, ask(op, raw, make([]byte, payload)).Code)
		}
		must(wire.OpUnitOpen, &wire.UnitOpenRequest{Session: 1}, 0)
		must(wire.OpUnitStage, &wire.UnitStageRequest{Txn: 2, Partition: "p", Columns: wireColumns(3), Filled: true}, 48)
		must(wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 2, Samples: wireSamples(3)}, 0)
		must(wire.OpUnitStage, &wire.UnitStageRequest{Txn: 1, Partition: "p", Columns: wireColumns(2)}, 0)
		ask(streamOps[int(which)%len(streamOps)], body, payload)
		require.NoError(t, guard.Poisoned())
		cancel()
		s.server.Gone(peer)
		st := s.server.Unit().Stats()
		require.Zero(t, st.Staged)
		require.Zero(t, st.Leases)
		require.NoError(t, s.server.Unit().Store.(*memtier.Store).Check())
	})
}
