package remote

import (
	"context"
	"time"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// transform computes an update or parses a put beside the stream.
func (l *life) transform(r *request) (*wire.UnitReply, error) {
	var req wire.UnitTransformRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	samples, err := samplesOf(&req.Samples)
	if err != nil {
		return nil, err
	}
	if err := checkRows(&req, samples); err != nil {
		return nil, err
	}
	operands, operand, err := l.operands(&req, r.Payload)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(r.ctx)
	result := &txn{cancel: cancel, users: 1}
	if err = l.enter(); err == nil {
		if err = l.keep(req.Txn, result); err != nil {
			l.running.Done()
		}
	}
	if err != nil {
		cancel()
		l.leave(operand)
		return nil, err
	}
	return l.later(r, func() (*wire.UnitReply, error) {
		defer cancel()
		defer l.leave(operand)
		computed, err := l.compute(ctx, &req, samples, operands)
		if err == nil {
			if err = store.Prepare(ctx, computed.Staged); err != nil {
				computed.Staged.Abort()
			}
		}
		return l.computed(req.Txn, result, computed, err)
	})
}

func checkRows(req *wire.UnitTransformRequest, samples []schema.Sample) error {
	rows := req.Rows
	if req.Update {
		rows = len(samples)
	}
	if req.Keys != nil && len(req.Keys) != rows {
		return tqerr.New(tqerr.InvalidArgument, "%d keys for %d rows", len(req.Keys), rows)
	}
	for i := range req.Columns {
		if c := &req.Columns[i]; c.Rows != rows {
			return tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want %d", c.Field, c.Rows, rows)
		}
	}
	return nil
}

// operands finds the new values: in the payload, or in a staged write, which is in use then.
func (l *life) operands(req *wire.UnitTransformRequest, payload []byte) ([]unit.Operand, *txn, error) {
	columns := columnsOf(req.Columns)
	out := make([]unit.Operand, len(columns))
	if req.Operand == 0 {
		if err := checkPayload(columns, payload); err != nil {
			return nil, nil, err
		}
		for i := range columns {
			n := columns[i].Bytes()
			out[i] = unit.Operand{Column: columns[i], Bytes: payload[:n:n]}
			payload = payload[n:]
		}
		return out, nil, nil
	}
	l.mu.Lock()
	t := l.mu.txns[req.Operand]
	if t == nil || t.staged == nil || len(t.columns) != len(columns) {
		l.mu.Unlock()
		return nil, nil, tqerr.New(tqerr.NotFound, "write %d is not staged with %d columns", req.Operand, len(columns))
	}
	t.users++
	l.mu.Unlock()
	t.loans.Recall()
	for i, block := range t.staged.Blocks() {
		out[i] = unit.Operand{Column: t.columns[i], Bytes: l.unit.Bytes(block)}
	}
	return out, t, nil
}

// leave ends the use of a staged write, which may have been aborted meanwhile.
func (l *life) leave(t *txn) {
	if t == nil {
		return
	}
	l.mu.Lock()
	t.users--
	over := t.aborted && t.users == 0 && t.staged != nil
	l.mu.Unlock()
	if over {
		t.loans.Recall()
		t.staged.Abort()
	}
}

func (l *life) compute(ctx context.Context, req *wire.UnitTransformRequest, samples []schema.Sample, operands []unit.Operand) (*unit.Transformed, error) {
	stage := func(columns []schema.Column) (staged store.Staged, err error) {
		err = unit.WhenRoom(ctx, l.freed, time.Duration(req.WaitMS)*time.Millisecond, nil, func() (err error) {
			staged, err = l.unit.Stage(req.Partition, columns)
			return err
		})
		return staged, err
	}
	if !req.Update {
		return l.unit.Parse(ctx, &unit.ParseSpec{
			Partition: req.Partition, Keys: req.Keys, Rows: req.Rows, Operands: operands, Callable: req.Callable,
			Dedup: req.Dedup, Stage: stage,
		})
	}
	return l.unit.Update(ctx, &unit.UpdateSpec{
		Partition: req.Partition, Samples: samples, Keys: req.Keys, Operands: operands, Merge: req.Merge, Callable: req.Callable,
		Stage: stage,
	})
}

// computed makes a result that can be committed, unless it was aborted meanwhile.
func (l *life) computed(number uint64, t *txn, result *unit.Transformed, err error) (*wire.UnitReply, error) {
	l.mu.Lock()
	t.users--
	aborted := t.aborted
	if err != nil {
		delete(l.mu.txns, number)
	} else if !aborted {
		t.columns, t.staged = result.Columns, result.Staged
	}
	l.mu.Unlock()
	if err != nil {
		return damaged(err)
	}
	if aborted {
		result.Staged.Abort()
		return nil, tqerr.New(tqerr.Cancelled, "write %d was aborted", number)
	}
	reply := &wire.UnitReply{}
	for i := range result.Columns {
		reply.Columns = append(reply.Columns, wire.UnitColumn{Column: wire.Column(result.Columns[i])})
	}
	return reply, nil
}
