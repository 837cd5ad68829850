package remote_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/bufpool"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/memtier"
	"transferqueue/core/store/storetest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/inproc"
	"transferqueue/core/transport/local"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// network puts a handler behind a transport, and returns the way to it and what ends it.
type network func(t testing.TB, h transport.Handler) (dial func(peer uint64) (transport.Poster, error), end func())

var networks = map[string]network{
	"local": func(t testing.TB, h transport.Handler) (func(uint64) (transport.Poster, error), func()) {
		path := filepath.Join(t.TempDir(), "u.sock")
		s, err := local.Listen(path, []byte("secret"), h)
		require.NoError(t, err)
		return func(peer uint64) (transport.Poster, error) {
			return local.Dial(context.Background(), path, []byte("secret"), peer)
		}, func() { _ = s.Close() }
	},
	"inproc": func(_ testing.TB, h transport.Handler) (func(uint64) (transport.Poster, error), func()) {
		s := inproc.NewServer(h)
		return func(peer uint64) (transport.Poster, error) { return s.Dial(peer) }, func() { _ = s.Close() }
	},
	"memnet": func(_ testing.TB, h transport.Handler) (func(uint64) (transport.Poster, error), func()) {
		n := memnet.New(1, h)
		return func(peer uint64) (transport.Poster, error) { return n.Dial(peer) }, func() { _ = n.Close() }
	},
}

// fixture is a unit server and the way to it.
type fixture struct {
	t      testing.TB
	server *remote.Server
	jobs   *jobs.Queue
	dial   func(peer uint64) (transport.Poster, error)
	end    func()
}

func serve(t testing.TB, n network, limit int64) *fixture {
	pool := bufpool.New()
	f := &fixture{t: t, jobs: jobs.New(pool)}
	var err error
	f.server, err = remote.NewServer(remote.Options{Name: "u", MemoryLimit: limit, SampleLimit: 7, Jobs: f.jobs})
	require.NoError(t, err)
	f.dial, f.end = n(t, f.server)
	t.Cleanup(func() {
		f.jobs.Close()
		f.end()
		if err := f.server.Close(); err != nil {
			t.Error(err)
		}
		if live, _ := pool.Stats(); live != 0 {
			t.Errorf("%d bytes of the pool were not given back", live)
		}
		pool.Close()
	})
	return f
}

// open connects as a controller.
func (f *fixture) open(peer, session uint64) (*remote.Unit, error) {
	conn, err := f.dial(peer)
	require.NoError(f.t, err)
	return remote.Open(f.t.Context(), conn, remote.Address{Name: "u", Session: session, Keep: true})
}

// openAs connects as soon as the unit has noticed that the controller before is gone.
func (f *fixture) openAs(at remote.Address) *remote.Unit {
	for {
		conn, err := f.dial(at.Session)
		require.NoError(f.t, err)
		u, err := remote.Open(f.t.Context(), conn, at)
		if tqerr.CodeOf(err) == tqerr.AlreadyExists {
			continue
		}
		require.NoError(f.t, err)
		f.t.Cleanup(func() { _ = u.Close() })
		return u
	}
}

func (f *fixture) unit(session uint64) *remote.Unit {
	u, err := f.open(session, session)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = u.Close() })
	return u
}

// synced is a unit in another process as a store that has done what it was told when a method returns.
type synced struct {
	t testing.TB
	f *fixture
	*remote.Unit
}

func (s *synced) sync() { require.NoError(s.t, s.Sync(context.Background())) }

func (s *synced) Stage(partition string, columns []schema.Column) (store.Staged, error) {
	tx, err := s.Unit.Stage(context.Background(), partition, columns, nil)
	if err != nil {
		return nil, err
	}
	return syncedTx{tx, s}, nil
}

type syncedTx struct {
	store.Staged
	s *synced
}

func (tx syncedTx) Commit(samples []schema.Sample) {
	tx.Staged.Commit(samples)
	tx.s.sync()
}

func (tx syncedTx) Abort() {
	tx.Staged.Abort()
	tx.s.sync()
}

type syncedLease struct {
	store.Lease
	s *synced
}

func (l syncedLease) Release() {
	l.Lease.Release()
	l.s.sync()
}

func (s *synced) Read(partition string, fields []string, samples []schema.Sample) (store.Lease, error) {
	cells, err := s.Unit.Read(&unit.Query{Partition: partition, Fields: fields, Samples: samples, Inline: -1}).Wait(context.Background())
	if err != nil {
		return nil, err
	}
	require.Len(s.t, cells.Leases, 1)
	return syncedLease{cells.Leases[0], s}, nil
}

func (s *synced) Has(partition string, fields []string, samples []schema.Sample) bool {
	l, err := s.Read(partition, fields, samples)
	if err != nil {
		var missing *store.MissingError
		return !errors.As(err, &missing)
	}
	l.Release()
	return true
}

func (s *synced) Delete(partition string, fields []string, samples []schema.Sample) int64 {
	before := s.Stats().MemoryUsed
	d := s.Unit.Delete(partition, fields, samples, 0)
	<-d.Done()
	require.NoError(s.t, d.Err())
	return before - s.Stats().MemoryUsed
}

func (s *synced) Bytes(b store.Block) []byte {
	data, err := s.Unit.Bytes(b)
	require.NoError(s.t, err)
	return data
}

func (s *synced) Inventory() []schema.Stock {
	list, err := s.Unit.Inventory(context.Background())
	require.NoError(s.t, err)
	return list
}

// Close ends the unit's store, which the suite expects to refuse while something is staged or leased.
func (s *synced) Close() error {
	if err := s.f.server.Close(); err != nil {
		return err
	}
	s.f.end()
	return s.Unit.Close()
}

func (s *synced) Check() error { return s.f.server.Unit().Store.(*memtier.Store).Check() }

func TestStore(t *testing.T) {
	for name, n := range networks {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
				f := serve(t, n, o.MemoryLimit)
				u, err := f.open(1, 1)
				require.NoError(t, err)
				return &synced{t, f, u}
			})
		})
	}
}

func TestOpening(t *testing.T) {
	for name, n := range networks {
		t.Run(name, func(t *testing.T) {
			f := serve(t, n, 0)
			u := f.unit(1)
			require.EqualValues(t, 7, u.SampleLimit())
			require.NotZero(t, u.Incarnation())
			_, err := f.open(2, 2)
			require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err), "one controller at a time")
			require.ErrorContains(t, err, `unit "u"`)
			put(t, u, 1)
			leave := func(u *remote.Unit) {
				lease, err := u.Read(&unit.Query{Partition: "p", Fields: []string{"x"}, Samples: samplesTo(1), Inline: -1}).Wait(t.Context())
				require.NoError(t, err)
				require.Len(t, lease.Leases, 1)
				_, err = u.Stage(t.Context(), "p", columns(3), nil)
				require.NoError(t, err)
				require.NoError(t, u.Close())
			}
			leave(u)
			again := f.reopen(1)
			st := again.Stats()
			st.MemoryUsed = 0
			require.Equal(t, store.Stats{Cells: 1}, st, "cells stay for the session, and nothing that was staged or leased")
			leave(again)
			other := f.reopen(2)
			require.Zero(t, other.Stats(), "another session begins empty")
			put(t, other, 2)
			require.NoError(t, other.Close())
			forgetful := f.openAs(remote.Address{Name: "u", Session: 2})
			require.Zero(t, forgetful.Stats(), "nobody has asked to keep the cells")
			put(t, forgetful, 1)

		})
	}
}

// reopen opens as soon as the unit has noticed that the controller before is gone.
func (f *fixture) reopen(session uint64) *remote.Unit {
	return f.openAs(remote.Address{Name: "u", Session: session, Keep: true})
}

func columns(rows int) []schema.Column {
	return []schema.Column{{Field: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: []int64{2}}}
}

func samplesTo(n int) []schema.Sample {
	out := make([]schema.Sample, n)
	for i := range out {
		out[i] = schema.Sample{Index: int64(i), Generation: 1}
	}
	return out
}

// put stores n rows of 16 bytes.
func put(t testing.TB, u *remote.Unit, n int) {
	tx, err := u.Stage(t.Context(), "p", columns(n), make([]byte, 16*n))
	require.NoError(t, err)
	tx.Commit(samplesTo(n))
}

// What does not fit together is refused by the unit and changes nothing.
func TestBadRequests(t *testing.T) {
	cases := map[string]struct {
		op      wire.Op
		body    any
		payload int
		code    tqerr.Code
	}{
		"not opened by this op":      {wire.OpPut, &wire.PutRequest{}, 0, tqerr.Unimplemented},
		"opened twice":               {wire.OpUnitOpen, &wire.UnitOpenRequest{Session: 1}, 0, tqerr.AlreadyExists},
		"payload of another size":    {wire.OpUnitStage, &wire.UnitStageRequest{Txn: 9, Partition: "p", Columns: wireColumns(2), Filled: true}, 31, tqerr.InvalidArgument},
		"a write twice":              {wire.OpUnitStage, &wire.UnitStageRequest{Txn: 1, Partition: "p", Columns: wireColumns(2)}, 0, tqerr.InvalidArgument},
		"write number 0":             {wire.OpUnitStage, &wire.UnitStageRequest{Partition: "p", Columns: wireColumns(2)}, 0, tqerr.InvalidArgument},
		"commit of nothing":          {wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 9}, 0, tqerr.NotFound},
		"commit of too few rows":     {wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 1, Samples: wireSamples(1)}, 0, tqerr.InvalidArgument},
		"commit of negative indexes": {wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 1, Samples: wire.Samples{Indexes: wire.Ints{-1, 2}, Generations: wire.Ints{1, 1}}}, 0, tqerr.InvalidArgument},
		"lists of different lengths": {wire.OpUnitDelete, &wire.UnitDeleteRequest{Partition: "p", Samples: wire.Samples{Indexes: wire.Ints{1}}}, 0, tqerr.InvalidArgument},
		"a body of another message":  {wire.OpUnitRead, &wire.UnitOpened{Name: "x"}, 0, tqerr.InvalidArgument},
		"operands that are nowhere":  {wire.OpUnitTransform, &wire.UnitTransformRequest{Txn: 9, Partition: "p", Rows: 2, Columns: wireColumns(2), Operand: 8}, 0, tqerr.NotFound},
		"operands of other rows":     {wire.OpUnitTransform, &wire.UnitTransformRequest{Txn: 9, Partition: "p", Rows: 3, Columns: wireColumns(2)}, 32, tqerr.InvalidArgument},
		"keys of other rows":         {wire.OpUnitTransform, &wire.UnitTransformRequest{Txn: 9, Partition: "p", Rows: 2, Keys: wire.Strings{"a"}, Columns: wireColumns(2)}, 32, tqerr.InvalidArgument},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			f := serve(t, networks["inproc"], 0)
			conn, err := f.dial(1)
			require.NoError(t, err)
			sequence := uint64(0)
			ask := func(op wire.Op, body any, payload int) error {
				raw, err := wire.Marshal(body)
				require.NoError(t, err)
				sequence++
				_, err = conn.Call(t.Context(), &wire.Request{Op: op, Sequence: sequence, Body: raw, Payload: make([]byte, payload)})
				return err
			}
			require.NoError(t, ask(wire.OpUnitOpen, &wire.UnitOpenRequest{Session: 1}, 0))
			require.NoError(t, ask(wire.OpUnitStage, &wire.UnitStageRequest{Txn: 1, Partition: "p", Columns: wireColumns(2)}, 0))
			before := f.server.Unit().Stats()
			require.Equal(t, c.code, tqerr.CodeOf(ask(c.op, c.body, c.payload)))
			require.Equal(t, before, f.server.Unit().Stats())
			if c.op == wire.OpUnitOpen {
				return
			}
			require.NoError(t, ask(wire.OpUnitCommit, &wire.UnitCommitRequest{Txn: 1, Samples: wireSamples(2)}, 0), "the stream goes on")
			sequence += 3
			require.Equal(t, tqerr.Corruption, tqerr.CodeOf(ask(wire.OpUnitStats, &wire.UnitOpenRequest{}, 0)), "a request is missing")
			stranger, err := f.dial(2)
			require.NoError(t, err)
			_, err = stranger.Call(t.Context(), &wire.Request{Op: wire.OpUnitStats, Sequence: 1})
			require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err))
		})
	}
}

func wireColumns(rows int) []wire.Column { return []wire.Column{wire.Column(columns(rows)[0])} }

func wireSamples(n int) (out wire.Samples) {
	for _, s := range samplesTo(n) {
		out.Indexes, out.Generations = append(out.Indexes, s.Index), append(out.Generations, int64(s.Generation))
	}
	return out
}
