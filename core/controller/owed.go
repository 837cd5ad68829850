package controller

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// owedRecord is a change that a unit in another process has not told that it has executed: it commits what it has staged under a
// number, or deletes cells. Fields are those of the cells.
type owedRecord struct {
	Number    uint64 // of the change
	Deletes   bool
	Txn       uint64
	Partition string
	Fields    wire.Strings
	Samples   wire.Samples
}

// owedTo is what a unit may not have executed: of the earlier life, and of those before in which it was not found.
func (r *recovering) owedTo(x *unitRecord) []owedRecord {
	owed := x.Owed
	for i := range r.changes {
		ch := &r.changes[i]
		for _, part := range ch.staged {
			if part.Unit == x.ID {
				samples := pickRuns(ch.samples, part.Rows)
				owed = append(owed, owedRecord{Number: ch.number, Txn: part.Txn, Partition: ch.partition, Fields: ch.fields, Samples: *wireSamples(samples)})
			}
		}
		if ch.deleted == nil {
			continue
		}
		var mine []schema.Sample
		for k, sample := range ch.deleted.Samples {
			if ch.deleted.Units[k] == x.ID {
				mine = append(mine, sample)
			}
		}
		if len(mine) > 0 {
			owed = append(owed, owedRecord{
				Number: ch.number, Deletes: true, Partition: ch.partition, Fields: ch.deleted.Fields, Samples: *wireSamples(mine),
			})
		}
	}
	return owed
}

// catchUp has a unit execute what it is owed and has not executed. Missed tells that it has not staged something: what has several
// parts under one number may have been executed in part.
func catchUp(ctx context.Context, u *remote.Unit, owed []owedRecord) (missed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	for i := range owed {
		o := &owed[i]
		if o.Number <= u.Changed() {
			continue
		}
		samples, number := samplesOf(&o.Samples), o.Number
		if i+1 < len(owed) && owed[i+1].Number == number {
			number = 0
		}
		if !o.Deletes {
			err := u.Recommit(ctx, o.Txn, samples, number)
			if tqerr.CodeOf(err) == tqerr.NotFound {
				missed, err = true, nil
			}
			if err != nil {
				return missed, err
			}
			continue
		}
		deleting := u.Delete(o.Partition, o.Fields, samples, number)
		select {
		case <-deleting.Done():
		case <-ctx.Done():
			return missed, ctxError(ctx, "a unit deletes what was cleared")
		}
		if err := deleting.Err(); err != nil {
			return missed, err
		}
	}
	return missed, nil
}

// payOwed is catchUp for a unit that joins in the place of one that was not found. One that was started anew has nothing staged;
// what it has on disk of such cells is older, see recommit.
func payOwed(ctx context.Context, u *remote.Unit, old node) error {
	n, ok := unmetered(old).(absent)
	if !ok {
		return nil
	}
	if n.was.Incarnation == u.Incarnation() {
		_, err := catchUp(ctx, u, n.was.Owed) // what it has is compared anyway
		return err
	}
	for i := range n.was.Owed {
		if o := &n.was.Owed[i]; o.Number > u.Changed() {
			u.Delete(o.Partition, o.Fields, samplesOf(&o.Samples), 0) // in line before the inventory
		}
	}
	return nil
}
