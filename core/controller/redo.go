package controller

import (
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// change is what a unit may not have executed.
type change struct {
	number    uint64
	partition string
	staged    []stagedRecord
	samples   []schema.Sample // of a write, by row
	units     []uint32        // where the rows are
	fields    []string        // that they get
	deleted   *catalog.Clearing
}

// touches reports whether a write has rows on a unit.
func (ch *change) touches(unit uint32) bool {
	return len(ch.fields) > 0 && slices.Contains(ch.units, unit)
}

// on is the samples of a write on a unit.
func (ch *change) on(unit uint32) (samples []schema.Sample) {
	for row, at := range ch.units {
		if at == unit {
			samples = append(samples, ch.samples[row])
		}
	}
	return samples
}

// mayMiss reports whether the unit of some row may not have executed a write that is in the journal.
func (r *recovering) mayMiss(ch *change) bool {
	return slices.ContainsFunc(r.units, func(x unitRecord) bool {
		u := r.here(x.Name)
		return ch.touches(x.ID) && (u == nil || u.Durable() && u.Changed() < ch.number)
	})
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
	recordMove:      (*recovering).move,
	recordDuty:      (*recovering).duty,
	recordDrain:     (*recovering).drain,
	recordMoving:    (*recovering).moving,
	recordSwap:      func(*recovering, uint64, []byte) error { return nil },
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
	ch := change{number: number, partition: x.Partition, staged: x.Staged, samples: applied.Samples, units: units}
	for i := range w.Columns {
		ch.fields = append(ch.fields, w.Columns[i].Field)
	}
	if len(x.Staged) > 0 || r.mayMiss(&ch) {
		r.changes = append(r.changes, ch)
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

// finishLast does the write again that was held back: there is a later record, so its unit has executed it.
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

// decideLast looks whether the unit to whose disk the last write went had executed it when it died with the controller. When it
// had not, the write has not happened. A disk that is not the one that the unit had cannot tell: somebody may have been answered,
// so the write has happened, and what it wrote is lost. Of a write with several parts each is held, so that it is not asked here.
func (r *recovering) decideLast() error {
	var x putRecord
	if err := decodeRecord(r.last, &x); err != nil {
		return err
	}
	for i := range r.units {
		unit := &r.units[i]
		if !slices.Contains(x.Disks, int64(unit.ID)) {
			continue
		}
		u := r.here(unit.Name)
		if u != nil && (!u.Owns(remote.SessionName(sessionNumber(r.s.opts.Session))) || u.Changed() >= r.number) {
			return r.doPut(r.number, &x)
		}
	}
	return nil
}
