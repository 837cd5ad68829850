package controller

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/journal"
	"transferqueue/core/sampler"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// journaling is the journal of a server. What a request changes is written down under Server.mu before it is done, and units
// are told after that; so the journal knows of everything that a unit has executed, and of a request at most that nobody was
// told the outcome of. Answers wait until all that they may tell of is durable.
//
// Records say what is done, not what was asked for: of a fetch what the sampler has picked, of a write where its rows are
// staged. Everything else is decided by the catalog, which does the same with the same records.
type journaling struct {
	log     *journal.Log
	running struct { // answers that wait for an fsync, a turn
		sync.Mutex
		sync.WaitGroup
		closed bool
	}
	restored bool          // there was an earlier life
	opening  bool          // what is done is not written down, because a state of all of it will be
	turning  chan struct{} // has an element while nobody makes a turn
	again    atomic.Int64  // earliest time of the next turn after one that failed, in nanoseconds since the start
}

// outcome is the answer to the latest request of a lane of a client, which may come again.
type outcome struct {
	sequence uint64
	result   any         // nil: nothing; a message that is not changed any more
	reply    *wire.Reply // instead, of an earlier life of the controller
}

// origin names the request.
func (c *call) origin() origin {
	if c.s.journal == nil || c.req.Sequence == 0 {
		return origin{}
	}
	return origin{c.peer, c.req.Sequence}
}

// noteLocked writes down what is about to be done, and returns its number, 0 without a journal. After an error it must not be
// done; with a number the journal may have it nevertheless until barrier succeeds. Urgent is what frees something. Called with mu
// held.
func (s *Server) noteLocked(urgent bool, kind byte, message any) (uint64, error) {
	if s.journal == nil || s.journal.opening {
		return 0, nil
	}
	record, err := encodeRecord(kind, message)
	if err != nil {
		return 0, err
	}
	return s.appendLocked(urgent, record)
}

func (s *Server) appendLocked(urgent bool, records ...[]byte) (uint64, error) {
	number, err := s.journal.log.Append(urgent, records...)
	if err != nil && s.journal.log.Broken() == nil {
		return 0, err
	}
	if err != nil || s.journal.log.Overgrown() {
		s.turnSoon()
	}
	return number, err
}

// synced returns when what was noted under a number, and everything before, is as durable as the journal promises.
func (s *Server) synced(number uint64) error {
	if number == 0 {
		return nil
	}
	err := s.journal.log.Sync(number)
	if err != nil {
		s.turnSoon()
	}
	return err
}

// barrier is synced for all that was noted, and makes sure that the journal has nothing that was refused.
func (s *Server) barrier() error {
	s.mu.Lock()
	number, err := s.noteLocked(true, recordMoving, &movingRecord{s.mu.drains.moves})
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return s.synced(number)
}

// settle returns when barrier has succeeded; false: ctx has ended before.
func (s *Server) settle(ctx context.Context) bool {
	for s.barrier() != nil {
		select {
		case <-time.After(turnPause):
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// noteUnitLocked writes down that a unit is about to become part of the session.
func (s *Server) noteUnitLocked(n, old node) error {
	record := recordOf(n)
	if record.Replaces = -1; old != nil {
		record.Replaces = int64(old.ID())
	}
	_, err := s.noteLocked(false, recordUnit, &record)
	return err
}

// notePutsLocked writes writes down, all in one, after it has made sure that none of them can fail.
func (s *Server) notePutsLocked(reply uint8, txns ...*txn) (uint64, error) {
	if s.journal == nil {
		return 0, nil
	}
	writes, units := make([]*catalog.Write, len(txns)), make([][]uint32, len(txns))
	for i, t := range txns {
		writes[i], units[i] = &t.write, t.units
	}
	if err := s.mu.cat.CheckAll(writes, units); err != nil {
		return 0, err
	}
	records := make([][]byte, len(txns))
	for i, t := range txns {
		r := newPutRecord(t.origin, &t.write, t.units, reply)
		for _, sh := range t.shares {
			if sh.staged == nil {
				continue
			}
			if number := store.TxnOf(sh.staged); number != 0 {
				r.Staged = append(r.Staged, stagedRecord{Unit: sh.unit.ID(), Txn: number, Rows: sh.runs})
			} else if sh.unit.Durable() && store.OnDisk(sh.staged) {
				r.Disks = append(r.Disks, int64(sh.unit.ID()))
			}
		}
		var err error
		if records[i], err = encodeRecord(recordPut, r); err != nil {
			return 0, err
		}
	}
	return s.appendLocked(false, records...)
}

// noted makes the error for a change that was written down and could not be done, which would make the journal a lie: a state
// takes the place of the record at once, and nothing is written meanwhile.
func (s *Server) noted(err error) error {
	if s.journal == nil {
		return err
	}
	err = tqerr.Wrap(tqerr.Internal, err, "a write that was checked failed")
	s.journal.log.Break(err)
	s.turnSoon()
	return err
}

// doneLocked remembers the outcome of a request whose change was written down. Called with mu held.
func (s *Server) doneLocked(o origin, result any) {
	if o.Sequence == 0 {
		return
	}
	s.keepLocked(o, outcome{sequence: o.Sequence, result: result})
}

func (s *Server) keepLocked(o origin, out outcome) {
	lanes := s.mu.outcomes[o.Client]
	if lanes == nil {
		lanes = map[uint64]outcome{}
		s.mu.outcomes[o.Client] = lanes
	}
	lane, count := wire.SplitSequence(o.Sequence)
	if _, latest := wire.SplitSequence(lanes[lane].sequence); count >= latest {
		lanes[lane] = out
	}
}

// forget drops the outcomes of a client that is gone.
func (s *Server) forget(client uint64) {
	if s.journal == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.outcomes, client)
}

// noteFetch is what a fetch calls before it hands samples out. memory is everything that a sampler remembers which Python runs.
func (c *call) noteFetch(r *catalog.FetchRequest, picks sampler.Sampler, memory []byte) func(catalog.Pick) error {
	if c.s.journal == nil {
		return nil
	}
	return func(pick catalog.Pick) error {
		record := &fetchRecord{
			Origin: c.origin(), Partition: r.Partition, Fields: r.Fields, N: r.N, Task: r.Task, Sampled: pick.Sampled,
			Consumed: pick.Consumed, End: pick.End, Sampler: picks.Name(), Memory: memory,
		}
		recorder, records := picks.(sampler.Recorder)
		if records {
			var err error
			if record.Changes, err = recorder.Changes(); err != nil {
				return err
			}
		}
		_, err := c.s.noteLocked(false, recordFetch, record)
		if err == nil && records {
			recorder.Recorded()
		}
		if err == nil && memory != nil {
			c.s.mu.memory = memory
		}
		return err
	}
}

// handedLocked remembers the outcome of a fetch.
func (c *call) handedLocked(got *catalog.Described) {
	if got != nil && c.s.journal != nil {
		c.s.doneLocked(c.origin(), metaReply(got))
	}
}

// record has a sampler say what it begins to remember.
func (s *Server) record(picks sampler.Sampler) {
	if r, ok := picks.(sampler.Recorder); ok && s.journal != nil {
		r.Record()
	}
}

// EndJournal says that the session ends for good: nobody will go on from its journal. Call it before Close.
func (s *Server) EndJournal() error {
	if s.journal == nil {
		return nil
	}
	return s.journal.log.End()
}

// close ends the use of the journal. Nothing is appended any more.
func (j *journaling) close() error {
	j.running.Lock()
	j.running.closed = true
	j.running.Unlock()
	j.running.Wait()
	return j.log.Close()
}

// start runs something that close waits for; false: it does not any more.
func (j *journaling) start(name string, run func()) bool {
	j.running.Lock()
	defer j.running.Unlock()
	if j.running.closed {
		return false
	}
	j.running.Add(1)
	guard.Go(name, func() {
		defer j.running.Done()
		run()
	})
	return true
}

// afterDurable calls answer when everything that was written down is durable, perhaps later; with an error when it is not
// going to be.
func (s *Server) afterDurable(answer func(error)) {
	j := s.journal
	if j == nil {
		answer(nil)
		return
	}
	last := j.log.Last()
	if j.log.Durable(last) {
		answer(nil)
		return
	}
	sync := func() {
		err := j.log.Sync(last)
		if err != nil {
			s.turnSoon() // also when nobody writes any more
			err = tqerr.Wrap(tqerr.CodeOf(err), err, "done, but it may not survive a crash")
		}
		answer(err)
	}
	if !j.start("controller journal", sync) {
		answer(errClosed)
	}
}

// turnPause is how long after a turn that has failed the next is tried.
const turnPause = time.Second

// turnSoon begins a turn, unless one runs or has just failed.
func (s *Server) turnSoon() {
	j := s.journal
	if time.Since(s.started) < time.Duration(j.again.Load()) || s.ctx.Err() != nil {
		return
	}
	select {
	case <-j.turning:
	default:
		return
	}
	started := j.start("controller journal", func() {
		defer func() { j.turning <- struct{}{} }()
		err := s.turn(s.ctx)
		if err == nil && j.log.Broken() != nil {
			err = s.turn(s.ctx) // an fsync of the new log has failed meanwhile
		}
		if err != nil {
			j.again.Store(int64(time.Since(s.started) + turnPause))
		}
	})
	if !started {
		j.turning <- struct{}{}
	}
}

// onlyTurn waits until nobody makes a turn, and keeps others from it until done is called.
func (s *Server) onlyTurn(ctx context.Context) (done func(), err error) {
	if s.journal == nil {
		return func() {}, nil
	}
	select {
	case <-s.journal.turning:
		return func() { s.journal.turning <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, ctxError(ctx, "the journal is written anew")
	}
}

// replaceLocked writes down that everything is another catalog from now on, and what units are owed by that. The caller is the only
// one who makes a turn, and holds mu.
func (s *Server) replaceLocked(next *catalog.Catalog, owed map[uint32][]owedRecord) error {
	if s.journal == nil {
		return nil
	}
	t, err := s.journal.log.Begin()
	if err != nil {
		return err
	}
	memory, err := s.memoryLocked()
	if err != nil {
		t.Abandon()
		return err
	}
	t.Switch()
	m := s.imageLocked(s.mu.sampler.Name(), memory)
	m.catalog = next.Image()
	for i := range m.units {
		m.units[i].Owed = append(m.units[i].Owed, owed[m.units[i].ID]...)
	}
	return t.Finish(m.write)
}

// memoryLocked is what the sampler remembers; of one that Python runs, what it has said last.
func (s *Server) memoryLocked() ([]byte, error) {
	if _, isPython := s.mu.sampler.(*sampler.Python); isPython {
		return s.mu.memory, nil
	}
	return s.mu.sampler.Save()
}

// turn writes the state down and begins a new log. The caller has taken the element of turning.
func (s *Server) turn(ctx context.Context) error {
	t, err := s.journal.log.Begin()
	if err != nil {
		return err
	}
	m, err := func() (*image, error) {
		s.mu.RLock() // appending needs it for writing
		defer s.mu.RUnlock()
		memory, err := s.memoryLocked()
		if err != nil {
			t.Abandon()
			return nil, err
		}
		t.Switch()
		return s.imageLocked(s.mu.sampler.Name(), memory), nil
	}()
	if err != nil {
		return err
	}
	for _, n := range s.nodes.Load().order {
		if n.Lost() == nil { // what the state has was executed
			if err := n.sync(ctx); err != nil && n.Lost() == nil {
				return err
			}
		}
	}
	return t.Finish(m.write)
}
