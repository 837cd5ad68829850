package controller

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"transferqueue/core/catalog"
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
	s.journal = &journaling{log: o.Journal, opening: true, turning: make(chan struct{}, 1)}
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
	s.journal.restored = found
	s.number = sessionNumber(s.opts.Session)
	for _, u := range o.Units {
		if err == nil {
			err = u.Own(remote.SessionName(s.number))
		}
	}
	if err == nil && found {
		err = r.findUnits(ctx)
	} else if err == nil {
		for _, u := range o.Units {
			s.addLocked(inside{u, u.ID(), s.sampleLimit(), o.Machine}, nil)
		}
	}
	s.journal.opening = false
	if err != nil {
		return s, err
	}
	s.record(s.mu.sampler)
	if err := s.turn(ctx); err != nil { // nothing can be appended before
		return s, err
	}
	s.await()
	if found {
		s.journal.start("controller clients of an earlier life", s.stopAwaiting)
	}
	for _, cl := range s.mu.cat.Unfinished() {
		s.clearAgain(cl)
	}
	return s, nil
}

// Session is the identity of the session: that of Options, or that of the journal.
func (s *Server) Session() string { return s.opts.Session }

// Secret is that of Options, or that of the journal.
func (s *Server) Secret() []byte { return s.opts.Secret }

// Config is the configuration of the session, as it was stored last.
func (s *Server) Config() []byte { return *s.blob.Load() }

// Restored reports that the session goes on where an earlier life of the controller has ended.
func (s *Server) Restored() bool { return s.journal != nil && s.journal.restored }

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
	last     []byte // the last record when it is a write that touches disks of this process, and its number
	number   uint64
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
	if err := r.finishLast(); err != nil {
		return err
	}
	s := r.s
	if len(record) == 0 {
		return tqerr.New(tqerr.Corruption, "an empty record")
	}
	switch kind := record[0]; kind {
	case recordSession:
		var x sessionRecord
		err := decodeRecord(record, &x)
		s.opts.Session, s.opts.Secret = x.Session, x.Secret
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
func (r *recovering) ready() error {
	if err := r.build(); err != nil || r.last == nil {
		return err
	}
	return r.decideLast()
}

// finishLast does the write again that was held back: there is a later record, so all units have executed it.
func (r *recovering) finishLast() error {
	if r.last == nil {
		return nil
	}
	var x putRecord
	err := decodeRecord(r.last, &x)
	if r.last = nil; err != nil {
		return err
	}
	return r.doPut(r.number, &x)
}

// decideLast looks whether the units of this process had executed the last write when they died with the controller. When none
// of them had, it has not happened. When some had and others not, it is done as far as it was; who made it is not told that it
// has succeeded.
func (r *recovering) decideLast() error {
	var x putRecord
	if err := decodeRecord(r.last, &x); err != nil {
		return err
	}
	executed := 0
	for _, id := range x.Disks {
		i := slices.IndexFunc(r.units, func(u unitRecord) bool { return int64(u.ID) == id })
		if i < 0 {
			continue
		}
		if u := r.here(r.units[i].Name); u != nil && u.Changed() >= r.number {
			executed++
		}
	}
	if executed == 0 {
		return nil
	}
	if executed < len(x.Disks) {
		if x.Reply = replyNothing; x.Update {
			reply := wire.ErrorReply(tqerr.New(tqerr.DataLost, "the controller died while the units stored the update; on some of them it has happened, on others not"))
			r.s.keepLocked(x.Origin, outcome{sequence: x.Origin.Sequence, reply: reply})
		}
	}
	return r.doPut(r.number, &x)
}

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
	if number == 0 {
		r.units = append(r.units, x)
		return nil
	}
	if err := r.build(); err != nil {
		return err
	}
	cat := r.s.mu.cat
	if i := slices.IndexFunc(r.units, func(u unitRecord) bool { return int64(u.ID) == x.Replaces }); i >= 0 {
		cat.ReplaceUnit(r.units[i].ID, x.ID, x.Machine)
		r.units[i] = x
	} else {
		cat.AddUnit(x.ID, x.Machine)
		r.units = append(r.units, x)
	}
	cat.LimitUnit(x.ID, x.SampleLimit)
	return nil
}

func (r *recovering) stock(_ uint64, record []byte) error {
	var x stockRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	stock := make([]schema.Stock, len(x.Stock))
	for i := range x.Stock {
		stock[i] = schema.Stock{
			Partition: x.Stock[i].Partition, Column: schema.Column(x.Stock[i].Column), Samples: samplesOf(&x.Stock[i].Samples),
		}
	}
	r.s.mu.cat.Reconcile(x.Unit, stock)
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
	recordStock:     (*recovering).stock,
	recordGiveBack:  (*recovering).giveBack,
}

func (r *recovering) put(number uint64, record []byte) error {
	var x putRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	if len(x.Disks) > 0 {
		r.last, r.number = slices.Clone(record), number
		return nil
	}
	return r.doPut(number, &x)
}

func (r *recovering) doPut(number uint64, x *putRecord) error {
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

func (r *recovering) giveBack(_ uint64, record []byte) error {
	var x giveBackRecord
	err := decodeRecord(record, &x)
	if err == nil {
		r.s.giveBackLocked(&x)
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
	if err := r.checkUnits(); err != nil {
		return err
	}
	s := r.s
	next := uint32(0) // no unit has had it
	for _, x := range r.units {
		next = max(next, x.ID+1)
		s.addLocked(absent{x, errNotAsked}, nil)
	}
	places := s.nodes.Load().order
	for i, x := range r.units {
		if x.Inside {
			// Clients may still map the memory of the dead process under the old number.
			if err := r.reconcile(ctx, inside{r.here(x.Name), next, s.sampleLimit(), s.opts.Machine}, places[i]); err != nil {
				return err
			}
			next++
		}
	}
	found := make([]node, len(r.units))
	err := together(ctx, len(r.units), len(r.units), func(ctx context.Context, i int) error {
		if !r.units[i].Inside {
			found[i] = r.find(ctx, &r.units[i])
		}
		return nil
	})
	for i, n := range found {
		if n != nil {
			s.addLocked(n, places[i])
		}
	}
	return err
}

// reconcile puts a unit that was started anew in the place of what it was, with what it still has.
func (r *recovering) reconcile(ctx context.Context, n, place node) error {
	stock, err := n.Inventory(ctx)
	if err != nil {
		return err
	}
	r.s.addLocked(n, place)
	deletions, err := r.s.reconcileLocked(n, stock)
	for _, d := range deletions {
		<-d.Done()
		if err == nil {
			err = d.Err()
		}
	}
	return err
}

func (r *recovering) here(name string) Unit {
	for _, u := range r.s.opts.Units {
		if u.Name() == name {
			return u
		}
	}
	return nil
}

// checkUnits makes sure that this process has the units that the one before it had.
func (r *recovering) checkUnits() error {
	refuse := func(name, how string) error {
		return tqerr.New(tqerr.InvalidState, "journal %s: it is of a session %s unit %q in the controller's process; start as many units there as before, or name another folder", r.dir, how, name)
	}
	before := map[string]bool{}
	for _, x := range r.units {
		before[x.Name] = x.Inside
		if here := r.here(x.Name) != nil; here != x.Inside {
			how := "with"
			if here {
				how = "without"
			}
			return refuse(x.Name, how)
		}
	}
	for _, u := range r.s.opts.Units {
		if !before[u.Name()] {
			return refuse(u.Name(), "without")
		}
	}
	return nil
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
		return absent{*x, err}
	}
	return outside{u}
}

var (
	errNotAsked  error = tqerr.New(tqerr.Unavailable, "it was not asked yet")
	errOtherLife error = tqerr.New(tqerr.Unavailable, "it was started anew")
)

// reach opens a unit. One that has not noticed yet that its controller is dead is asked again.
func (r *recovering) reach(ctx context.Context, x *unitRecord) (*remote.Unit, error) {
	at := &wire.UnitAddress{
		Name: x.Name, Host: x.Host, Socket: x.Socket, Secret: x.Secret, Address: x.Address, Machine: x.Machine, Key: x.Key,
	}
	for {
		conn, err := r.s.dial(ctx, at, rand.Uint64()|1)
		if err != nil {
			return nil, err
		}
		u, err := remote.Open(ctx, conn, remote.Address{
			ID: x.ID, Name: x.Name, Host: x.Host, Socket: x.Socket, Secret: x.Secret, Address: x.Address, Key: x.Key,
			Machine: x.Machine, Session: r.s.number, Keep: true, Hold: true,
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
	return nil
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

// leastAwait is how long at least clients of an earlier life are awaited, and what they read from units is kept.
const leastAwait = 30 * time.Second

// stopAwaiting drops what is kept for clients of the earlier life that have not come in all the time for which they wait for a
// controller: outcomes; and what units hold for all of them: what they have leased, and staged without committing it, from
// where they read it back.
func (s *Server) stopAwaiting() {
	if !s.awaited() {
		return
	}
	s.clients.Lock()
	awaited := s.clients.awaited
	s.clients.awaited = nil
	s.clients.Unlock()
	for client := range awaited {
		s.forget(client)
	}
	for _, n := range s.nodes.Load().order {
		if u, ok := unmetered(n).(outside); ok && n.Lost() == nil {
			_ = u.Settle(s.ctx, true) // one that is lost has nobody who reads from it
		}
	}
}

// awaited returns when nobody of the earlier life is awaited any more; false: the server closes.
func (s *Server) awaited() bool {
	timer := time.NewTimer(max(s.opts.RestartWait, leastAwait))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// settleLater ends what an earlier life has left on a unit that was missed until now.
func (s *Server) settleLater(u *remote.Unit) {
	s.journal.start("controller unit of an earlier life", func() {
		if s.awaited() {
			_ = u.Settle(s.ctx, true)
		}
	})
}
