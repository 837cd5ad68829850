// Package servers has what the servers of several transports do in the same way.
package servers

import (
	"context"
	"errors"
	"net"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Accept starts connections until the listener is closed. When the process has no descriptor left it waits and tries again, until
// stop is closed: clients queue meanwhile.
func Accept[C net.Conn](accept func() (C, error), stop <-chan struct{}, start func(C)) {
	for pause := time.Millisecond; ; {
		conn, err := accept()
		if err == nil {
			pause = time.Millisecond
			start(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-stop:
			return
		}
	}
}

// Handle calls the handler. A panic in it, and a library that is poisoned already, give an Internal reply.
func Handle(ctx context.Context, h transport.Handler, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	err := guard.Poisoned()
	if err == nil {
		err = func() (err error) {
			defer guard.Recover(&err)
			h.Serve(ctx, peer, req, reply)
			return nil
		}()
	}
	if err != nil {
		reply(wire.ErrorReply(err))
	}
}
