package remote

import (
	"context"

	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// outcome is what became of a request of a controller that may repeat it. Guarded by life.mu.
type outcome struct {
	reply *wire.Reply         // nil: still to come
	send  []func(*wire.Reply) // on each connection that it came on
	stop  context.CancelFunc  // of its context
}

// remember makes the answer of a request one that is given again, until the controller says that it has it. The request goes on
// when its connection breaks, but not when the controller is gone.
func (l *life) remember(r *request) {
	o := &outcome{send: []func(*wire.Reply){r.reply}}
	if r.Timeout != 0 {
		r.ctx, o.stop = context.WithTimeout(l.ctx, r.Timeout)
	} else {
		r.ctx, o.stop = context.WithCancel(l.ctx)
	}
	l.mu.Lock()
	l.mu.outcomes[r.Sequence] = o
	if r.Ack != r.Sequence {
		delete(l.mu.outcomes, r.Ack)
	}
	l.mu.Unlock()
	r.reply = func(reply *wire.Reply) {
		l.mu.Lock()
		send := o.send
		o.reply, o.send = reply, nil
		l.mu.Unlock()
		o.stop()
		for _, fn := range send {
			fn(reply)
		}
	}
}

// repeat answers a request that was here before: with what became of it, now or later.
func (l *life) repeat(r *request) {
	l.mu.Lock()
	o := l.mu.outcomes[r.Sequence]
	var reply *wire.Reply
	switch {
	case o == nil:
		reply = wire.ErrorReply(tqerr.New(tqerr.Corruption, "request %d came again after its answer had arrived", r.Sequence))
	case o.reply != nil:
		reply = o.reply
	default:
		o.send = append(o.send, r.reply)
	}
	l.mu.Unlock()
	if reply != nil {
		r.reply(reply)
	}
}
