package controller

import (
	"context"
	"maps"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
)

// Unit is a storage unit in this process.
type Unit interface {
	store.Store
	// Pin is Read without reading the disk.
	store.Pinner
	store.DiskStager
	// Advise lets somebody say what samples are needed for, when cells have to move to disk.
	Advise(a store.Advisor)
	// Durable reports whether what is on its disk outlives the process, and Secure returns when all that has happened does.
	Durable() bool
	Secure() error
	// Changed is the number of the last change that it has executed on its disk.
	Changed() uint64
	// Follow keeps what is done from becoming durable before the journal knows of it for good.
	Follow(j disktier.Journal)
	// Recommit commits what an earlier process has held, as long as it Holds that, and DropHeld frees the rest.
	Holds(txn uint64) bool
	Recommit(txn uint64, samples []schema.Sample, change uint64) error
	DropHeld()
	// Own makes what is on its disk that of a session, and fails when it is another's. Owns says that it is.
	Own(session string) error
	Owns(session string) bool
	Counters() store.Counters
	ID() uint32
	Name() string
	Host() string
	// Segment gives a duplicate of a segment's descriptor, which the caller closes, and its size.
	Segment(segment uint32) (fd int, size int64, err error)
	// Update computes merge(stored, operand) for every cell and stages the results.
	Update(ctx context.Context, spec *unit.UpdateSpec) (*unit.Transformed, error)
	// Parse runs a data parser over rows of a put and stages what it returns.
	Parse(ctx context.Context, spec *unit.ParseSpec) (*unit.Transformed, error)
}

// node is a unit as the server uses it, wherever it is. Read, Delete and the ends of staged writes are called with Server.mu
// held and do not wait; a unit executes them in the order of the calls.
type node interface {
	ID() uint32
	Name() string
	Host() string
	Stats() store.Stats
	Counters() store.Counters
	SampleLimit() int64 // 0: none
	OnFree(func())
	Segment(segment uint32) (fd int, size int64, err error)
	// Bytes is the memory of a block that is staged or leased.
	Bytes(store.Block) ([]byte, error)

	// Stage reserves memory. What it returns has to be prepared, with mu not held, before it is committed. A unit that waits also fills it when payload is not nil.
	Stage(ctx context.Context, partition string, columns []schema.Column, payload []byte) (store.Staged, error)
	// StageOnDisk is Stage for a batch for which memory has no room: all of it goes to disk.
	StageOnDisk(ctx context.Context, partition string, columns []schema.Column) (store.Staged, error)
	Read(q *unit.Query) unit.Reading
	// Delete returns nil when it is done already. A durable unit answers when it is durable. change is the number of what is done
	// in the journal, 0: there is none.
	Delete(partition string, fields []string, samples []schema.Sample, change uint64) unit.Deleting
	Update(ctx context.Context, spec *unit.UpdateSpec) (*unit.Transformed, error)
	Parse(ctx context.Context, spec *unit.ParseSpec) (*unit.Transformed, error)
	// Piece reads bytes of a lease of this unit, as store.Streamer does.
	Piece(ctx context.Context, l store.Lease, column int, offset int64, sum uint32, to []byte) (uint32, error)

	// Machine is where the unit's memory can be mapped.
	Machine() string
	// away is the unit when it is on another host than the controller, else nil.
	away() *remote.Unit
	// Inventory lists all cells, in no order with other requests.
	Inventory(ctx context.Context) ([]schema.Stock, error)
	// Discard drops all cells, because the session ends for good.
	Discard(ctx context.Context) error
	// Durable reports whether what is on the unit's disk outlives its process.
	Durable() bool

	// Lost is nil as long as the unit can be reached.
	Lost() error
	// waits reports that the unit answers later, so that handlers must not wait for it on the goroutine that they are called on.
	waits() bool
	// sync waits until Stats is what the unit holds, and until a unit of this process has made that as durable as it promises.
	sync(ctx context.Context) error
	// disconnect ends requests to the unit, and close what the server has of it.
	disconnect()
	close()
	descriptors() []int
}

// inside is a unit in this process: it does everything at once.
type inside struct {
	Unit
	number  uint32 // in the session
	samples int64
	machine string
}

func (n inside) ID() uint32         { return n.number }
func (n inside) Machine() string    { return n.machine }
func (n inside) away() *remote.Unit { return nil }

func (n inside) SampleLimit() int64                  { return n.samples }
func (n inside) Lost() error                         { return nil }
func (n inside) waits() bool                         { return false }
func (n inside) sync(context.Context) error          { return n.Secure() }
func (n inside) close()                              {}
func (n inside) disconnect()                         {}
func (n inside) descriptors() []int                  { return nil }
func (n inside) Bytes(b store.Block) ([]byte, error) { return n.Unit.Bytes(b), nil }
func (n inside) Delete(partition string, fields []string, samples []schema.Sample, _ uint64) unit.Deleting {
	n.Unit.Delete(partition, fields, samples)
	if !n.Durable() {
		return nil
	}
	d := &securing{done: make(chan struct{})}
	guard.Go("unit "+n.Name(), func() {
		defer close(d.done)
		d.err = n.Secure()
	})
	return d
}

// securing is a delete that is not durable yet.
type securing struct {
	done chan struct{}
	err  error
}

// Done implements unit.Deleting.
func (s *securing) Done() <-chan struct{} { return s.done }

// Err implements unit.Deleting.
func (s *securing) Err() error { return s.err }

// Inventory implements node.
func (n inside) Inventory(context.Context) ([]schema.Stock, error) { return n.Unit.Inventory(), nil }

// Discard implements node. The owner of the unit does it.
func (n inside) Discard(context.Context) error { return nil }

func (n inside) Stage(_ context.Context, partition string, columns []schema.Column, _ []byte) (store.Staged, error) {
	return n.Unit.Stage(partition, columns)
}

func (n inside) StageOnDisk(_ context.Context, partition string, columns []schema.Column) (store.Staged, error) {
	return n.Unit.StageOnDisk(partition, columns)
}

func (n inside) Piece(ctx context.Context, l store.Lease, column int, offset int64, sum uint32, to []byte) (uint32, error) {
	if ctx.Err() != nil {
		return 0, ctxError(ctx, "reading values from disk")
	}
	return l.(store.Streamer).Piece(column, offset, sum, to)
}

// outside is a unit in a process of its own.
type outside struct{ *remote.Unit }

func (n outside) away() *remote.Unit {
	if n.Away() {
		return n.Unit
	}
	return nil
}

func (n outside) waits() bool                    { return true }
func (n outside) sync(ctx context.Context) error { return n.Sync(ctx) }
func (n outside) disconnect()                    { _ = n.Disconnect() }
func (n outside) close()                         { _ = n.Close() }
func (n outside) descriptors() []int             { return n.Descriptors() }

// nodes are the units of a session, those that are gone included. A value never changes. A unit that has come back has another
// number, so that nobody takes memory of its old process for that of the new one.
type nodes struct {
	byID  map[uint32]node // also what was replaced
	order []node
}

func (s *Server) node(id uint32) node { return s.nodes.Load().byID[id] }

// nextUnit is a number that no unit of the session has had.
func (s *Server) nextUnit() (number uint32) {
	for id := range s.nodes.Load().byID {
		number = max(number, id+1)
	}
	return number
}

// addLocked makes a unit known, in the place of one that is gone when old is not nil. Called with mu held, or before the server
// is shared.
func (s *Server) addLocked(n, old node) {
	if a, asks := n.(interface{ Advise(store.Advisor) }); asks {
		a.Advise(s.advise)
	}
	n = meter(n)
	now := s.nodes.Load()
	next := &nodes{byID: maps.Clone(now.byID), order: slices.Clone(now.order)}
	if next.byID == nil {
		next.byID = map[uint32]node{}
	}
	next.byID[n.ID()] = n
	if old == nil {
		next.order = append(next.order, n)
		s.mu.cat.AddUnit(n.ID(), n.Machine())
	} else {
		next.order[slices.Index(next.order, old)] = n
		s.mu.cat.ReplaceUnit(old.ID(), n.ID(), n.Machine())
	}
	s.mu.cat.LimitUnit(n.ID(), n.SampleLimit())
	n.OnFree(s.room.Signal)
	s.nodes.Store(next)
}

// rooms says how much each unit could take. Those that are gone take nothing.
func (s *Server) rooms() []catalog.Room {
	all := s.nodes.Load().order
	out := make([]catalog.Room, 0, len(all))
	for _, n := range all {
		if n.Lost() != nil {
			continue
		}
		st := n.Stats()
		out = append(out, catalog.Room{Unit: n.ID(), Free: st.Room(), Used: st.MemoryUsed + st.DiskUsed})
	}
	return out
}

// explain says why no unit takes samples.
func (s *Server) explain(err error) error {
	all := s.nodes.Load().order
	switch {
	case tqerr.CodeOf(err) != tqerr.Unavailable:
		return err
	case len(all) == 0:
		return tqerr.New(tqerr.Unavailable, "no storage unit has joined the session yet")
	case !slices.ContainsFunc(all, func(n node) bool { return n.Lost() == nil }):
		return tqerr.New(tqerr.Unavailable, "all %d storage units are gone", len(all))
	}
	return err
}

// Descriptors lists the descriptors that the server holds of units in other processes, which a forked child must close.
func (s *Server) Descriptors() []int {
	var out []int
	for _, n := range s.nodes.Load().byID {
		out = append(out, n.descriptors()...)
	}
	return out
}
