package controller

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"transferqueue/core/internal/metrics"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// kind says as what a request is counted: its number, or one of the numbers behind them.
type kind int

var (
	kindClearFields = kind(len(wire.OpNames()))
	numKinds        = kindClearFields + 1
)

// kindNames are the names that dashboards of the peer package know. A write in two steps is counted by its commit, as the
// notice of written data; its first step has a name of its own. Requests without a line have their own name.
var kindNames = map[kind]string{
	kind(wire.OpPut):          "RESERVE_DATA",
	kind(wire.OpCommit):       "NOTIFY_DATA_UPDATE",
	kind(wire.OpGet):          "GET_DATA",
	kind(wire.OpClear):        "CLEAR_META",
	kindClearFields:           "KV_CLEAR_FIELDS",
	kind(wire.OpList):         "KV_LIST",
	kind(wire.OpMeta):         "GET_META",
	kind(wire.OpRetrieveMeta): "KV_RETRIEVE_META",
	kind(wire.OpRetrieveKeys): "KV_RETRIEVE_KEYS",
	kind(wire.OpSetTags):      "SET_CUSTOM_META",
	kind(wire.OpConsumption):  "GET_CONSUMPTION",
	kind(wire.OpProduction):   "GET_PRODUCTION",
	kind(wire.OpPartitions):   "GET_LIST_PARTITIONS",
	kind(wire.OpUnits):        "LIST_UNITS",
}

func (k kind) String() string {
	if name, known := kindNames[k]; known {
		return name
	}
	return strings.ToUpper(wire.Op(k).String())
}

// counters are what a server counts beside its state.
type counters struct {
	requests    []metrics.Series // by kind
	waitingPuts atomic.Int64
	moved       struct{ samples, cells, bytes atomic.Int64 }
}

// measured is what a call notes for its counters.
type measured struct {
	kind    kind
	began   time.Time
	samples int // that it touches when it succeeds
}

// observe counts a call that has ended. One that its caller has given up is not an error.
func (c *call) observe(code tqerr.Code) {
	samples := c.samples
	if code != tqerr.OK {
		samples = 0
	}
	failed := code != tqerr.OK && code != tqerr.Cancelled
	c.s.metrics.requests[c.kind].Observe(time.Since(c.began), samples, failed)
}

// metered counts what the controller asks of a unit, wherever that runs.
type metered struct {
	node
	put, get, clear, update metrics.Series
}

func meter(n node) node { return &metered{node: n} }

// unmetered is the unit itself, for steps of something that is counted as a whole.
func unmetered(n node) node {
	if m, ok := n.(*metered); ok {
		return m.node
	}
	return n
}

// Stage counts a put when it is committed: how long it took includes what its writer did between.
func (m *metered) Stage(ctx context.Context, partition string, columns []schema.Column, payload []byte) (store.Staged, error) {
	return m.staged(func() (store.Staged, error) { return m.node.Stage(ctx, partition, columns, payload) })
}

func (m *metered) StageOnDisk(ctx context.Context, partition string, columns []schema.Column) (store.Staged, error) {
	return m.staged(func() (store.Staged, error) { return m.node.StageOnDisk(ctx, partition, columns) })
}

func (m *metered) staged(stage func() (store.Staged, error)) (store.Staged, error) {
	m.put.Arrive()
	began := time.Now()
	staged, err := stage()
	if err != nil {
		m.put.Observe(time.Since(began), 0, true)
		return nil, err
	}
	return &meteredPut{Staged: staged, series: &m.put, began: began}, nil
}

type meteredPut struct {
	store.Staged
	series *metrics.Series
	began  time.Time
}

func (p *meteredPut) Commit(samples []schema.Sample) { p.CommitChange(samples, 0) }

// CommitChange implements store.Numbered.
func (p *meteredPut) CommitChange(samples []schema.Sample, change uint64) {
	store.CommitChange(p.Staged, samples, change)
	p.series.Observe(time.Since(p.began), len(samples), false)
}

// Txn implements store.Numbered.
func (p *meteredPut) Txn() uint64 { return store.TxnOf(p.Staged) }

// Hold implements store.Holder.
func (p *meteredPut) Hold() error { return store.Hold(p.Staged) }

// OnDisk implements store.Numbered.
func (p *meteredPut) OnDisk() bool { return store.OnDisk(p.Staged) }

// PrepareAndShed implements store.Shedder.
func (p *meteredPut) PrepareAndShed(ctx context.Context) error {
	return store.PrepareAndShed(ctx, p.Staged)
}

// Prepare implements store.Preparer.
func (p *meteredPut) Prepare(ctx context.Context) error { return store.Prepare(ctx, p.Staged) }

// Writes implements store.Preparer.
func (p *meteredPut) Writes() bool { return store.Writes(p.Staged) }

// Confirms implements store.Confirmer.
func (p *meteredPut) Confirms() bool { return store.Confirms(p.Staged) }

// Confirm implements store.Confirmer.
func (p *meteredPut) Confirm() error { return store.Confirm(p.Staged) }

// unmeteredPut is the staged write itself, which a unit elsewhere knows by its number.
func unmeteredPut(s store.Staged) store.Staged {
	if p, ok := s.(*meteredPut); ok {
		return p.Staged
	}
	return s
}

func (m *metered) Read(q *unit.Query) unit.Reading {
	m.get.Arrive()
	began := time.Now()
	return &meteredGet{Reading: m.node.Read(q), series: &m.get, began: began, samples: len(q.Samples)}
}

type meteredGet struct {
	unit.Reading
	series  *metrics.Series
	began   time.Time
	samples int
}

func (g *meteredGet) Wait(ctx context.Context) (*unit.Cells, error) {
	cells, err := g.Reading.Wait(ctx)
	end(g.series, g.began, g.samples, err)
	return cells, err
}

func (m *metered) Delete(partition string, fields []string, samples []schema.Sample, change uint64) unit.Deleting {
	m.clear.Arrive()
	began := time.Now()
	waiting := m.node.Delete(partition, fields, samples, change)
	if waiting == nil {
		m.clear.Observe(time.Since(began), len(samples), false)
		return nil
	}
	return &meteredClear{Deleting: waiting, series: &m.clear, began: began, samples: len(samples)}
}

// meteredClear counts when somebody looks at what became of it.
type meteredClear struct {
	unit.Deleting
	series  *metrics.Series
	began   time.Time
	samples int
	counted atomic.Bool
}

func (c *meteredClear) Err() error {
	err := c.Deleting.Err()
	if !c.counted.Swap(true) {
		end(c.series, c.began, c.samples, err)
	}
	return err
}

func (m *metered) Update(ctx context.Context, spec *unit.UpdateSpec) (*unit.Transformed, error) {
	m.update.Arrive()
	began := time.Now()
	plain := *spec
	plain.Staged = unmeteredPut(spec.Staged)
	result, err := m.node.Update(ctx, &plain)
	end(&m.update, began, len(spec.Samples), err)
	return result, err
}

// Parse is a put whose bytes are computed here.
func (m *metered) Parse(ctx context.Context, spec *unit.ParseSpec) (*unit.Transformed, error) {
	m.put.Arrive()
	began := time.Now()
	plain := *spec
	plain.Staged = unmeteredPut(spec.Staged)
	result, err := m.node.Parse(ctx, &plain)
	end(&m.put, began, spec.Rows, err)
	return result, err
}

func end(s *metrics.Series, began time.Time, samples int, err error) {
	if err != nil {
		samples = 0
	}
	s.Observe(time.Since(began), samples, err != nil && tqerr.CodeOf(err) != tqerr.Cancelled)
}

func requestMetrics(name string, s *metrics.Series) wire.RequestMetrics {
	shot := s.Snapshot()
	return wire.RequestMetrics{
		Type: name, Errors: shot.Errors, Samples: shot.Samples, Arrived: shot.Arrived, Sum: int64(shot.Sum),
		Buckets: shot.Buckets[:], P50: int64(shot.Quantile(0.5)), P99: int64(shot.Quantile(0.99)),
	}
}

func (m *metered) metrics(info wire.UnitInfo) wire.UnitMetrics {
	return wire.UnitMetrics{Info: info, Resident: info.MemoryPhysical, Requests: []wire.RequestMetrics{
		requestMetrics("PUT_DATA", &m.put), requestMetrics("GET_DATA", &m.get),
		requestMetrics("CLEAR_DATA", &m.clear), requestMetrics("UPDATE_DATA", &m.update),
	}}
}

// metrics answers with all counters and gauges. It takes the read lock for as long as a listing of the partitions does.
func (c *call) metrics() (any, error) {
	s := c.s
	reply := &wire.MetricsReply{Uptime: int64(time.Since(s.started)), Resident: metrics.Resident()}
	for _, bound := range metrics.Bounds {
		reply.Bounds = append(reply.Bounds, int64(bound))
	}
	for k := range s.metrics.requests {
		if one := requestMetrics(kind(k).String(), &s.metrics.requests[k]); !empty(&one) {
			reply.Requests = append(reply.Requests, one)
		}
	}
	units, infos := s.unitInfos()
	for i, n := range units {
		reply.Units = append(reply.Units, n.(*metered).metrics(infos[i]))
	}
	reply.Queues.WaitingPuts = s.metrics.waitingPuts.Load()
	if s.opts.Jobs != nil {
		reply.Queues.Jobs = int64(s.opts.Jobs())
	}
	s.clients.Lock()
	reply.Queues.Clients = int64(len(s.clients.byID))
	s.clients.Unlock()
	s.mu.RLock()
	defer s.mu.RUnlock()
	s.stateLocked(reply)
	return reply, nil
}

func empty(r *wire.RequestMetrics) bool {
	for _, n := range r.Buckets {
		if n != 0 {
			return false
		}
	}
	return true
}

// stateLocked adds what is read from the catalog. Called with mu held for reading.
func (s *Server) stateLocked(reply *wire.MetricsReply) {
	for _, list := range s.mu.waiters {
		reply.Queues.Waiters += int64(len(list))
	}
	for _, list := range s.mu.watches {
		reply.Queues.Watches += int64(len(list))
	}
	reply.Queues.Writes = int64(len(s.mu.writes.list))
	moved := &s.metrics.moved
	reply.Moves = wire.MoveMetrics{Samples: moved.samples.Load(), Cells: moved.cells.Load(), Bytes: moved.bytes.Load()}
	for _, d := range s.mu.drains.byID {
		if d.ended == nil {
			reply.Moves.Drains++
		}
	}
	reply.Allocated, reply.Reusable = s.mu.cat.Indexes()
	for _, p := range s.mu.cat.Summary() {
		reply.Partitions = append(reply.Partitions, wire.PartitionMetrics{
			Name: p.Name, Samples: int64(p.Samples), Produced: int64(p.Produced), Tasks: p.Tasks, Consumed: p.Consumed,
		})
	}
}
