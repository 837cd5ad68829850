package controller

import (
	"context"
	"errors"
	"slices"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/journal"
	"transferqueue/core/sampler"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// Open is New for a server that may have a journal: it goes on where an earlier life has ended. Units in processes of their
// own that live are found again. An error means that nothing has changed, and that the journal is closed.
func Open(ctx context.Context, o Options) (s *Server, err error) {
	if o.Journal == nil {
		return New(o), nil
	}
	s = blank(o)
	s.opts.Units = o.Units
	s.journal = &journaling{log: o.Journal, turning: make(chan struct{}, 1)}
	s.journal.turning <- struct{}{}
	s.mu.outcomes = map[uint64]map[uint64]outcome{}
	defer func() {
		if err != nil {
			s.Close()
			s = nil
		}
	}()
	r := &recovering{s: s, dir: o.Journal.Dir()}
	found, err := o.Journal.Recover(r.record)
	if err == nil {
		err = r.ready()
	}
	if err == nil && found {
		err = r.findUnits(ctx)
	} else if err == nil {
		for _, u := range o.Units {
			s.addLocked(inside{u, s.sampleLimit()})
		}
	}
	if err != nil {
		return s, err
	}
	for _, u := range o.Units {
		u.Advise(s.advise)
	}
	s.record(s.mu.sampler)
	if err := s.turn(ctx); err != nil { // nothing can be appended before
		return s, err
	}
	s.await()
	for _, cl := range s.mu.cat.Unfinished() {
		s.clearAgain(cl)
	}
	return s, nil
}

// recovering is an earlier life of a server that is being read.
type recovering struct {
	s        *Server
	dir      string
	state    []byte
	clearing []clearingRecord
	places   *placesRecord
	built    bool // the catalog is there
	memory   *memoryRecord
	units    []unitRecord
	changes  []change
}

// change is what a unit may not have executed.
type change struct {
	number    uint64
	partition string
	staged    []stagedRecord
	samples   []schema.Sample // of a write, by row
	deleted   *catalog.Clearing
}

// record takes one record of the journal.
func (r *recovering) record(number uint64, record []byte) error {
	s := r.s
	if len(record) == 0 {
		return tqerr.New(tqerr.Corruption, "an empty record")
	}
	switch kind := record[0]; kind {
	case recordSession:
		var x sessionRecord
		err := decodeRecord(record, &x)
		s.opts.Session = x.Session
		return err
	case recordSampler:
		return r.sampler(record)
	case recordMemory:
		r.memory = &memoryRecord{}
		return decodeRecord(record, r.memory)
	case recordConfig:
		var x configRecord
		err := decodeRecord(record, &x)
		s.blob.Store(&x.Config)
		return err
	case recordState:
		var x stateRecord
		err := decodeRecord(record, &x)
		r.state = append(r.state, x.Piece...)
		return err
	case recordClearing:
		var x clearingRecord
		err := decodeRecord(record, &x)
		r.clearing = append(r.clearing, x)
		return err
	case recordPlaces:
		r.places = &placesRecord{}
		return decodeRecord(record, r.places)
	case recordOutcome:
		return r.outcome(record)
	case recordUnit:
		return r.unit(number, record)
	}
	if err := r.build(); err != nil {
		return err
	}
	again, known := redo[record[0]]
	if !known {
		return tqerr.New(tqerr.VersionMismatch, "a record of kind %d, which this program does not know", record[0])
	}
	return again(r, number, record)
}

// build makes the catalog of the state, which is complete when the first change comes.
func (r *recovering) build() (err error) {
	if r.built {
		return nil
	}
	r.built = true
	s := r.s
	o := catalog.Options{PreAllocate: max(s.opts.PreAllocate, 1), SampleLimitPerUnit: s.sampleLimit()}
	if r.places != nil {
		s.mu.cat, err = catalogOf(o, r.dir, r.state, r.places, r.clearing)
		r.state, r.clearing = nil, nil
	}
	if err == nil && r.memory != nil {
		err = r.remember(r.memory)
	}
	return err
}

// ready makes sure that the server is as it was.
func (r *recovering) ready() error { return r.build() }

// remember gives the sampler what it remembered, unless the session has another one by now.
func (r *recovering) remember(m *memoryRecord) error {
	picks := r.s.mu.sampler
	if picks == nil || picks.Name() != m.Name || len(m.State) == 0 {
		return nil
	}
	if p, isPython := picks.(*sampler.Python); isPython {
		p.Restore(m.State)
		r.s.mu.memory = m.State
		return nil
	}
	return picks.Load(m.State)
}

func (r *recovering) sampler(record []byte) error {
	x := &samplerRecord{}
	if err := decodeRecord(record, x); err != nil {
		return err
	}
	fresh, err := sampler.Make(x.spec(), r.s.opts.Python, r.s.opts.SamplerTime)
	if err != nil {
		return err
	}
	r.s.mu.sampler, r.s.mu.registered, r.s.mu.memory = fresh, x, nil
	return nil
}

func (r *recovering) outcome(record []byte) error {
	var x outcomeRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	r.s.keepLocked(x.Origin, outcome{sequence: x.Origin.Sequence, reply: &wire.Reply{Code: tqerr.Code(x.Code), Body: x.Body}})
	return nil
}

// unit takes a unit: of a state when number is 0, else one that has joined then.
func (r *recovering) unit(number uint64, record []byte) error {
	var x unitRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	if i := slices.IndexFunc(r.units, func(u unitRecord) bool { return u.ID == x.ID }); i >= 0 {
		r.units[i] = x // it has come back
	} else {
		r.units = append(r.units, x)
	}
	if number == 0 {
		return nil
	}
	if err := r.build(); err != nil {
		return err
	}
	r.s.mu.cat.AddUnit(x.ID, x.Host)
	r.s.mu.cat.LimitUnit(x.ID, x.SampleLimit)
	return nil
}

// redo does a change again, by the kind of its record.
var redo = map[byte]func(r *recovering, number uint64, record []byte) error{
	recordPut:       (*recovering).put,
	recordTags:      (*recovering).tags,
	recordClear:     (*recovering).clear,
	recordFinish:    (*recovering).finish,
	recordFetch:     (*recovering).fetch,
	recordReset:     (*recovering).reset,
	recordPartition: (*recovering).partition,
}

func (r *recovering) put(number uint64, record []byte) error {
	var x putRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	w, units, err := x.write()
	if err != nil {
		return err
	}
	applied, err := r.s.mu.cat.Apply(w, units)
	if err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "a write that was done cannot be done again")
	}
	if len(x.Staged) > 0 {
		r.changes = append(r.changes, change{number: number, partition: x.Partition, staged: x.Staged, samples: applied.Samples})
	}
	switch x.Reply {
	case replyResult, replyColumns:
		result := putResult(applied)
		if x.Reply == replyColumns {
			result.Columns = x.Columns
		}
		r.s.doneLocked(x.Origin, &wire.PutReply{Result: result})
	case replyInserted:
		r.s.doneLocked(x.Origin, inserted(applied, x.Fields))
	}
	return nil
}

func (r *recovering) tags(_ uint64, record []byte) error {
	var x tagsRecord
	err := decodeRecord(record, &x)
	if err == nil {
		_, err = r.s.mu.cat.SetTags(x.Partition, samplesOf(&x.Samples), x.Tags)
	}
	if err == nil {
		r.s.doneLocked(x.Origin, nil)
	}
	return err
}

func (r *recovering) clear(number uint64, record []byte) error {
	var x clearRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	s := r.s
	cl := hide(s.mu.cat, &x)
	if cl.Fields == nil {
		s.forgetCleared(cl, x.Whole)
	}
	r.changes = append(r.changes, change{number: number, partition: x.Partition, deleted: cl})
	s.doneLocked(x.Origin, nil)
	return nil
}

func (r *recovering) finish(_ uint64, record []byte) error {
	var x finishRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	r.s.mu.cat.FinishClear(catalog.Finishing(x.Partition, samplesOf(&x.Samples), x.Whole))
	return nil
}

func (r *recovering) fetch(_ uint64, record []byte) error {
	var x fetchRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	request := catalog.FetchRequest{Partition: x.Partition, Fields: x.Fields, N: x.N, Task: x.Task}
	got, err := r.s.mu.cat.Hand(request, catalog.Pick{Sampled: x.Sampled, Consumed: x.Consumed, End: x.End})
	if err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "a fetch that was done cannot be done again")
	}
	picks := r.s.mu.sampler
	if picks != nil && picks.Name() == x.Sampler {
		if recorder, ok := picks.(sampler.Recorder); ok && len(x.Changes) > 0 {
			err = recorder.Redo(x.Changes)
		}
		if len(x.Memory) > 0 {
			err = r.remember(&memoryRecord{x.Sampler, x.Memory})
		}
	}
	if got != nil {
		r.s.doneLocked(x.Origin, metaReply(got))
	}
	return err
}

func (r *recovering) reset(_ uint64, record []byte) error {
	var x resetRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	r.s.mu.cat.ResetConsumption(x.Partition, x.Task)
	r.s.mu.sampler.Reset(x.Partition, x.Task)
	r.s.doneLocked(x.Origin, nil)
	return nil
}

func (r *recovering) partition(_ uint64, record []byte) error {
	var x partitionRecord
	err := decodeRecord(record, &x)
	if err == nil {
		r.s.mu.cat.EnsurePartition(x.Partition)
	}
	return err
}

// findUnits puts the units of the earlier life in their places: those of this process, those that live elsewhere, and for
// those that are gone somebody who says so.
func (r *recovering) findUnits(ctx context.Context) error {
	s := r.s
	here := map[string]Unit{}
	for _, u := range s.opts.Units {
		here[u.Name()] = u
	}
	nodes := make([]node, len(r.units))
	slices.SortFunc(r.units, func(a, b unitRecord) int { return int(a.ID) - int(b.ID) })
	for i, x := range r.units {
		u := here[x.Name]
		if delete(here, x.Name); x.Inside && (u == nil || u.ID() != x.ID) || !x.Inside && u != nil {
			return tqerr.New(tqerr.InvalidState, "journal %s: it is of a session with unit %q in the controller's process: %t; start as many units there as before, or name another folder", r.dir, x.Name, x.Inside)
		}
		if x.Inside {
			nodes[i] = inside{u, s.sampleLimit()}
		}
	}
	for name := range here {
		return tqerr.New(tqerr.InvalidState, "journal %s: it is of a session without a unit %q in the controller's process; start as many units there as before, or name another folder", r.dir, name)
	}
	err := together(ctx, len(nodes), len(nodes), func(ctx context.Context, i int) error {
		if nodes[i] != nil {
			return nil
		}
		nodes[i] = r.find(ctx, &r.units[i])
		return nil
	})
	for _, n := range nodes {
		s.addLocked(n)
	}
	return err
}

// findTime is how long a unit has to answer a controller that was started anew.
const findTime = 5 * time.Second

// find connects to a unit and has it execute what it has missed.
func (r *recovering) find(ctx context.Context, x *unitRecord) node {
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	u, err := r.reach(ctx, x)
	if err == nil && u.Incarnation() != x.Incarnation {
		err = errors.Join(errOtherLife, u.Close())
	}
	if err == nil {
		if err = r.catchUp(ctx, u); err != nil {
			_ = u.Close()
		}
	}
	if err != nil {
		return absent{*x}
	}
	return outside{u, x.Secret}
}

var errOtherLife error = tqerr.New(tqerr.Unavailable, "the unit was started anew")

// reach opens a unit. One that has not noticed yet that its controller is dead is asked again.
func (r *recovering) reach(ctx context.Context, x *unitRecord) (*remote.Unit, error) {
	for {
		conn, err := r.s.dial(ctx, &wire.UnitAddress{Name: x.Name, Host: x.Host, Socket: x.Socket, Secret: x.Secret}, x.Session)
		if err != nil {
			return nil, err
		}
		u, err := remote.Open(ctx, conn, remote.Address{
			ID: x.ID, Name: x.Name, Host: x.Host, Socket: x.Socket, Session: x.Session, Keep: true,
		})
		if tqerr.CodeOf(err) != tqerr.AlreadyExists {
			return u, err
		}
		select {
		case <-time.After(findPause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

const findPause = 10 * time.Millisecond

// catchUp has a unit execute the changes that the dead controller has written down and not told it any more.
func (r *recovering) catchUp(ctx context.Context, u *remote.Unit) error {
	for i := range r.changes {
		ch := &r.changes[i]
		if ch.number <= u.Changed() {
			continue
		}
		for _, part := range ch.staged {
			if part.Unit != u.ID() {
				continue
			}
			if err := u.Recommit(ctx, part.Txn, pickRuns(ch.samples, part.Rows), ch.number); err != nil {
				return err
			}
		}
		if ch.deleted == nil || len(ch.deleted.Samples) == 0 {
			continue
		}
		var mine []schema.Sample
		for k, x := range ch.deleted.Samples {
			if ch.deleted.Units[k] == u.ID() {
				mine = append(mine, x)
			}
		}
		if len(mine) == 0 {
			continue
		}
		deleting := u.Delete(ch.partition, ch.deleted.Fields, mine, ch.number)
		select {
		case <-deleting.Done():
		case <-ctx.Done():
			return ctxError(ctx, "a unit deletes what was cleared")
		}
		if err := deleting.Err(); err != nil {
			return err
		}
	}
	return u.Settle(ctx, false)
}

// clearAgain finishes a clear that the earlier life has begun.
func (s *Server) clearAgain(cl *catalog.Clearing) {
	s.mu.Lock()
	d := s.deleteLocked(cl, 0)
	s.mu.Unlock()
	s.finish(d)
}

// await lets clients of the earlier life find the outcomes of their requests.
func (s *Server) await() {
	s.clients.awaited = map[uint64]map[uint64]*lane{}
	for client, outcomes := range s.mu.outcomes {
		lanes := map[uint64]*lane{}
		for number, out := range outcomes {
			reply := out.reply
			if reply == nil {
				reply = (&call{req: &wire.Request{}}).makeReply(out.result, nil)
			}
			_, count := wire.SplitSequence(out.sequence)
			lanes[number] = &lane{count: count, reply: reply}
		}
		s.clients.awaited[client] = lanes
	}
}

var _ = journal.Relaxed
