//go:build go1.25

package controller_test

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// raw sends a request to the server itself and returns its replies, which must be one.
func (s *system) raw(req *wire.Request) *wire.Reply {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	peer := transport.Peer{ID: 7, Local: true}
	replies := make(chan *wire.Reply, 8)
	s.server.Serve(ctx, peer, req, func(r *wire.Reply) { replies <- r })
	reply := <-replies
	synctest.Wait()
	require.Empty(s.t, replies, "one reply to %s", req.Op)
	require.NoError(s.t, guard.Poisoned())
	s.server.Gone(peer)
	return reply
}

func column(rows int, shape ...int64) wire.Column {
	return wire.Column{Field: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape}
}

// bodies has a good request of every kind that has a body.
func bodies() map[wire.Op]any {
	p := "p"
	samples := wire.Samples{Indexes: wire.Ints{0}, Generations: wire.Ints{1}}
	return map[wire.Op]any{
		wire.OpPut: &wire.PutRequest{Partition: p, Keys: wire.Strings{"a"}, Columns: []wire.Column{column(1, 2)},
			Tags: wire.List{[]byte("\x81\xa1t\x01")}},
		wire.OpCommit: &wire.TxnRequest{Txn: 1}, wire.OpAbort: &wire.TxnRequest{Txn: 1},
		wire.OpGet:            &wire.GetRequest{Partition: p, Keys: wire.Strings{"a"}, Fields: wire.Strings{"x"}, Strict: true, Inline: 10},
		wire.OpRelease:        &wire.ReleaseRequest{Leases: wire.Ints{1, 2}},
		wire.OpClear:          &wire.ClearRequest{Partition: p, Samples: &samples, Fields: wire.Strings{"x"}},
		wire.OpClearPartition: &wire.PartitionRequest{Partition: p},
		wire.OpList:           &wire.ListRequest{Partition: &p, Keys: wire.Strings{"a"}, Tags: []byte("\x81\xa1t\x01")},
		wire.OpWait:           &wire.WaitRequest{Partition: p, Count: 1, Tags: []byte("\x80")},
		wire.OpWatchOpen:      &wire.PartitionRequest{Partition: p},
		wire.OpWatchNext:      &wire.WatchRequest{Watch: 1}, wire.OpWatchClose: &wire.WatchRequest{Watch: 1},
		wire.OpMeta:         &wire.MetaRequest{Partition: p, Mode: "fetch", Fields: wire.Strings{"x"}, BatchSize: 1, Task: "t"},
		wire.OpRetrieveMeta: &wire.RetrieveMetaRequest{Partition: p, Keys: wire.Strings{"a"}},
		wire.OpRetrieveKeys: &wire.IndexesRequest{Partition: p, Indexes: wire.Ints{0}},
		wire.OpSetTags:      &wire.SetTagsRequest{Partition: p, Samples: samples, Tags: wire.List{[]byte("\x80")}},
		wire.OpConsumption:  &wire.TaskRequest{Partition: p, Task: "t"}, wire.OpResetConsumption: &wire.TaskRequest{Partition: p},
		wire.OpProduction: &wire.ProductionRequest{Partition: p, Fields: wire.Strings{"x"}},
		wire.OpProgress:   &wire.TaskRequest{Partition: p, Task: "t"},
	}
}

func TestEveryTruncatedBodyIsRefused(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		s.user().put(s.rows(narrow, []string{"a"}, 1))
		for op, body := range bodies() {
			good, err := wire.Marshal(body)
			require.NoError(t, err)
			for n := range len(good) {
				reply := s.raw(&wire.Request{Op: op, Sequence: wire.Sequence(1, uint64(n+1)), Body: good[:n:n]})
				if op == wire.OpWatchClose && reply.Code == tqerr.OK {
					continue // closing what is not open is fine
				}
				require.Equal(t, tqerr.InvalidArgument, reply.Code, "%s cut after %d of %d bytes", op, n, len(good))
				require.ErrorContains(t, reply.Err(), "message")
			}
			s.raw(&wire.Request{Op: op, Body: good})
		}
		s.user().put(s.rows(narrow, []string{"alive"}, 2))
		require.Equal(t, []int64{2}, s.user().values("alive"))
	})
}

func TestGarbageGetsOneReply(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	with(t, setup{units: 2, limit: 1 << 20}, func(t *testing.T, s *system) {
		s.user().put(s.rows(narrow, []string{"a"}, 1))
		rng := rand.New(rand.NewPCG(seed, 1))
		all := bodies()
		for range 3000 {
			op := wire.Op(rng.IntN(len(wire.OpNames()) + 2))
			var body []byte
			if good := all[op]; good != nil {
				body, _ = wire.Marshal(good)
			}
			for range rng.IntN(6) {
				if len(body) > 0 {
					body[rng.IntN(len(body))] = byte(rng.Uint32())
				}
			}
			if rng.IntN(8) == 0 {
				body = append(body, byte(rng.Uint32()))
			}
			req := &wire.Request{Op: op, Body: body, Payload: make([]byte, rng.IntN(3)*8), Timeout: time.Millisecond}
			if rng.IntN(2) == 0 {
				req.Sequence = rng.Uint64()
			}
			s.raw(req)
		}
		s.check()
		s.user().put(s.rows(narrow, []string{"alive"}, 2))
		require.Equal(t, []int64{2}, s.user().values("alive"))
	})
}

func TestRequestsThatMakeNoSenseAreRefused(t *testing.T) {
	huge := column(1, math.MaxInt64/8, 8)
	many := column(wire.MaxRows)
	cases := map[string]struct {
		op   wire.Op
		body any
		code tqerr.Code
	}{
		"unknown request":             {999, nil, tqerr.Unimplemented},
		"request 0":                   {0, nil, tqerr.Unimplemented},
		"commit of nothing":           {wire.OpCommit, &wire.TxnRequest{Txn: 99}, tqerr.NotFound},
		"rows in two ways":            {wire.OpPut, &wire.PutRequest{Partition: "p", Keys: wire.Strings{"a"}, Insert: 1}, tqerr.InvalidArgument},
		"rows in no way":              {wire.OpPut, &wire.PutRequest{Partition: "p"}, tqerr.InvalidArgument},
		"payload too short":           {wire.OpPut, &wire.PutRequest{Partition: "p", Insert: 1, Inline: true, Columns: []wire.Column{column(1, 2)}}, tqerr.InvalidArgument},
		"more bytes than 64 bit":      {wire.OpPut, &wire.PutRequest{Partition: "p", Insert: 1, Columns: []wire.Column{huge}}, tqerr.InvalidArgument},
		"another number of rows":      {wire.OpPut, &wire.PutRequest{Partition: "p", Insert: 1, Columns: []wire.Column{many}}, tqerr.InvalidArgument},
		"a callable without columns":  {wire.OpPut, &wire.PutRequest{Partition: "p", Insert: 1, Callable: []byte("f")}, tqerr.InvalidArgument},
		"generations are missing":     {wire.OpGet, &wire.GetRequest{Partition: "p", Samples: &wire.Samples{Indexes: wire.Ints{0}}}, tqerr.SampleGone},
		"an index below 0":            {wire.OpGet, &wire.GetRequest{Partition: "p", Samples: &wire.Samples{Indexes: wire.Ints{-1}, Generations: wire.Ints{1}}}, tqerr.SampleGone},
		"an index beyond everything":  {wire.OpGet, &wire.GetRequest{Partition: "p", Samples: &wire.Samples{Indexes: wire.Ints{math.MaxInt64}, Generations: wire.Ints{1}}}, tqerr.SampleGone},
		"keys of an index beyond all": {wire.OpRetrieveKeys, &wire.IndexesRequest{Partition: "p", Indexes: wire.Ints{math.MaxInt64, -1}}, tqerr.OK},
		"insert of very many":         {wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "insert", BatchSize: math.MaxInt}, tqerr.InvalidArgument},
		"fetch of very many":          {wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", BatchSize: math.MaxInt, Task: "t"}, tqerr.DeadlineExceeded},
		"wait for very many":          {wire.OpWait, &wire.WaitRequest{Partition: "p", Count: math.MaxInt}, tqerr.DeadlineExceeded},
		"a watch that is not open":    {wire.OpWatchNext, &wire.WatchRequest{Watch: 99}, tqerr.NotFound},
		"a lease that is not there":   {wire.OpRelease, &wire.ReleaseRequest{Leases: wire.Ints{99, -1, 0}}, tqerr.OK},
		"tags that are no map":        {wire.OpSetTags, &wire.SetTagsRequest{Partition: "p", Samples: wire.Samples{Indexes: wire.Ints{0}, Generations: wire.Ints{1}}, Tags: wire.List{[]byte("\x01")}}, tqerr.InvalidArgument},
		"more tags than samples":      {wire.OpSetTags, &wire.SetTagsRequest{Partition: "p", Tags: wire.List{[]byte("\x80")}}, tqerr.InvalidArgument},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			with(t, setup{}, func(t *testing.T, s *system) {
				s.user().put(s.rows(narrow, []string{"a"}, 1))
				before := s.dump()
				req := &wire.Request{Op: c.op, Sequence: wire.Sequence(1<<24-1, 5)}
				if c.body != nil {
					var err error
					req.Body, err = wire.Marshal(c.body)
					require.NoError(t, err)
				}
				reply := s.raw(req)
				require.Equal(t, c.code, reply.Code, "%v", reply.Err())
				if c.code != tqerr.OK {
					require.NotEmpty(t, reply.Err().Error())
				}
				require.Equal(t, before, s.dump())
			})
		})
	}
}

// A write in two steps is known by its sequence.
func TestAStagedWriteNeedsASequence(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		body, err := wire.Marshal(bodies()[wire.OpPut])
		require.NoError(t, err)
		require.Equal(t, tqerr.InvalidArgument, s.raw(&wire.Request{Op: wire.OpPut, Body: body}).Code)
		require.Zero(t, s.stats())
	})
}
