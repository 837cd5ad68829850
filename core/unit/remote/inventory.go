package remote

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// stockRows is how many rows of an inventory go into one message, but for a single entry that has more.
const stockRows = 1 << 17

// inventory lists what the unit holds, part by part.
func (l *life) inventory(r *request) (*wire.UnitReply, error) {
	var req wire.UnitInventoryRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if req.From == 0 {
		l.mu.stock = l.unit.Inventory()
	}
	if req.From < 0 || req.From > len(l.mu.stock) {
		return nil, tqerr.New(tqerr.InvalidArgument, "inventory from %d of %d", req.From, len(l.mu.stock))
	}
	reply, rows := &wire.UnitReply{}, 0
	for i, s := range l.mu.stock[req.From:] {
		if rows += len(s.Samples); rows > stockRows && i > 0 {
			reply.More = req.From + i
			return reply, nil
		}
		reply.Stock = append(reply.Stock, wire.UnitStock{Partition: s.Partition, Column: wire.Column(s.Column), Samples: wireSamples(s.Samples)})
	}
	l.mu.stock = nil
	return reply, nil
}

// discard drops all cells.
func (l *life) discard(r *request) (*wire.UnitReply, error) {
	var req wire.UnitDiscardRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	if req.Session != l.session {
		return nil, tqerr.New(tqerr.InvalidArgument, "session %s is not %s", SessionName(req.Session), SessionName(l.session))
	}
	if err := l.enter(); err != nil {
		return nil, err
	}
	return l.later(r, func() (*wire.UnitReply, error) { return nil, l.unit.Discard(SessionName(l.session)) })
}

// Durable reports whether what the unit has on disk outlives its process.
func (u *Unit) Durable() bool { return u.opened.Durable }

// Inventory lists what the unit holds.
func (u *Unit) Inventory(ctx context.Context) (out []schema.Stock, err error) {
	for from := 0; ; {
		a := u.post(wire.OpUnitInventory, &wire.UnitInventoryRequest{From: from}, nil)
		if err := a.wait(ctx); err != nil {
			return nil, err
		}
		for i := range a.reply.Stock {
			s := &a.reply.Stock[i]
			samples, err := samplesOf(&s.Samples)
			if err == nil {
				err = (*schema.Column)(&s.Column).Validate()
			}
			if err != nil || len(samples) != s.Column.Rows {
				return nil, tqerr.New(tqerr.Corruption, "unit %q: its inventory makes no sense: field %q: %d samples, %d rows: %v", u.at.Name, s.Column.Field, len(samples), s.Column.Rows, err)
			}
			out = append(out, schema.Stock{Partition: s.Partition, Column: schema.Column(s.Column), Samples: samples})
		}
		switch {
		case a.reply.More == 0:
			return out, nil
		case a.reply.More <= from:
			return nil, tqerr.New(tqerr.Corruption, "unit %q: its inventory goes on at %d after %d", u.at.Name, a.reply.More, from)
		}
		from = a.reply.More
	}
}

// Discard drops all cells of the unit, because its session ends for good.
func (u *Unit) Discard(ctx context.Context) error {
	return u.post(wire.OpUnitDiscard, &wire.UnitDiscardRequest{Session: u.at.Session}, nil).wait(ctx)
}
