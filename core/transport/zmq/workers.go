//go:build zmq

package zmq

import (
	"sync/atomic"

	"transferqueue/core/guard"
)

// maxIdleWorkers is how many goroutines wait for work, half of what the reactor may receive at once. Each has some kilobytes of
// stack.
const maxIdleWorkers = batch / 2

// workers are goroutines that serve connections which have something to serve. They are kept because a new one would have to
// grow its stack for every request, a tenth of all that it costs.
type workers struct {
	work chan *conn // taken at once by one that is idle
	stop chan struct{}
	idle atomic.Int32
}

func newWorkers() *workers {
	return &workers{work: make(chan *conn), stop: make(chan struct{})}
}

// serve has a worker call the work of a connection. It does not block.
func (w *workers) serve(c *conn) {
	select {
	case w.work <- c:
	default:
		guard.Go("zmq: serve peers", func() { w.run(c) })
	}
}

func (w *workers) run(c *conn) {
	for {
		c.work()
		if w.idle.Add(1) > maxIdleWorkers {
			w.idle.Add(-1)
			return
		}
		select {
		case c = <-w.work:
			w.idle.Add(-1)
		case <-w.stop:
			return
		}
	}
}

// end sends idle workers home; the others follow when they have nothing to do.
func (w *workers) end() { close(w.stop) }
