package client

import (
	"context"
	"sync"
)

// maxDirects bounds the direct connections of a client; callers beyond it share the common connection.
const maxDirects = 32

// directs are the connections of callers that wait, one for each of them, kept for the next.
type directs struct {
	mu     sync.Mutex
	idle   []Direct
	all    map[Direct]struct{}
	closed bool
}

// take returns a connection, nil when there is none to be had.
func (d *directs) take(ctx context.Context, open func(context.Context) (Direct, error)) Direct {
	if open == nil {
		return nil
	}
	d.mu.Lock()
	if n := len(d.idle); n > 0 {
		last := d.idle[n-1]
		d.idle = d.idle[:n-1]
		d.mu.Unlock()
		return last
	}
	full := d.closed || len(d.all) >= maxDirects
	d.mu.Unlock()
	if full {
		return nil
	}
	fresh, err := open(ctx)
	if err != nil {
		return nil // the common connection will say what is wrong
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.all == nil {
		d.all = map[Direct]struct{}{}
	}
	d.all[fresh] = struct{}{}
	return fresh
}

// give takes a connection back after its request.
func (d *directs) give(c Direct) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed && !c.Broken() {
		d.idle = append(d.idle, c)
		return
	}
	delete(d.all, c)
	_ = c.Close()
}

// drop closes the idle connections, whose server is gone.
func (d *directs) drop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.idle {
		delete(d.all, c)
		_ = c.Close()
	}
	d.idle = nil
}

// close closes the idle connections; those in use follow when they are given back.
func (d *directs) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, c := range d.idle {
		delete(d.all, c)
		_ = c.Close()
	}
	d.idle = nil
}

func (d *directs) descriptors() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []int
	for c := range d.all {
		out = append(out, c.FD())
	}
	return out
}
