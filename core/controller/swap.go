package controller

import (
	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// A checkpoint takes the place of everything when the journal has the state of it. That state says what every unit is owed then,
// so that a controller which dies before the units have done it all, or any of it, is followed by one that has them do the rest.
// A cell of the checkpoint may have the name of one that it replaces, sample and generation included. So it is told by the write
// that brings it whether it is there: one that is staged or held still is not.

// hold lets what goes to disks of this process be committed by the next one.
func (l *loading) hold() error {
	if l.s.journal == nil {
		return nil
	}
	for _, r := range l.rows {
		for _, sh := range r.shares {
			if sh.staged != nil && !sh.unit.waits() && sh.unit.Durable() && store.OnDisk(sh.staged) {
				if err := store.Hold(sh.staged); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// noteSwapLocked takes a number in the journal for what units are about to be owed, 0 without one.
func (s *Server) noteSwapLocked() (uint64, error) {
	if s.journal == nil {
		return 0, nil
	}
	return s.appendLocked(false, []byte{recordSwap})
}

// owed is what the units have to do for the catalog that is next, under the number of a change, and the write of each unit that is
// its last. Without a journal nobody is owed anything.
func (l *loading) owed(next *catalog.Catalog, change uint64) (owed map[uint32][]owedRecord, last map[uint32]store.Staged) {
	if change == 0 {
		return nil, nil
	}
	owed, last = map[uint32][]owedRecord{}, map[uint32]store.Staged{}
	for _, g := range l.s.mu.cat.Groups() {
		if older := newerThan(next, g.Samples); len(older) > 0 && len(g.Fields) > 0 {
			owed[g.Unit] = append(owed[g.Unit], owedRecord{
				Number: change, Deletes: true, Partition: g.Partition, Fields: g.Fields, Samples: *wireSamples(older),
			})
		}
	}
	for _, r := range l.rows {
		samples := next.Samples(r.indexes)
		for _, sh := range r.shares {
			if sh.staged == nil {
				continue
			}
			fields := make([]string, len(sh.cols))
			for k := range sh.cols {
				fields[k] = sh.cols[k].Field
			}
			id := sh.unit.ID()
			owed[id] = append(owed[id], owedRecord{
				Number: change, Txn: store.TxnOf(sh.staged), Partition: r.partition, Fields: fields,
				Samples: *wireSamples(pickRuns(samples, sh.runs)),
			})
			last[id] = sh.staged
		}
	}
	return owed, last
}

// newerThan picks the samples whose cells would not give way to those of a catalog. Nothing else that has ended has to be deleted
// by name: it is found by the comparison of what units have with the catalog.
func newerThan(next *catalog.Catalog, samples []schema.Sample) (newer []schema.Sample) {
	for k, there := range next.Samples(indexesOf(samples)) {
		if samples[k].Generation > there.Generation {
			newer = append(newer, samples[k])
		}
	}
	return newer
}

// recommitOwed has a unit of this process do what the process before has not done of what its disk was owed. Cells of a write that
// was not done, and of one that was in memory only, are those that were there before.
func recommitOwed(u Unit, owed []owedRecord) error {
	executed := u.Changed()
	for i := range owed {
		o := &owed[i]
		if o.Number <= executed {
			continue
		}
		samples, held := samplesOf(&o.Samples), u.Holds(o.Txn)
		if o.Deletes || held || o.Txn == 0 {
			u.Delete(o.Partition, o.Fields, samples)
		}
		if !held {
			continue
		}
		if err := u.Recommit(o.Txn, samples, 0); err != nil {
			return err
		}
	}
	return nil
}
