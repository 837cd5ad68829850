package client

import (
	"context"
	"sync"
	"time"

	"transferqueue/core/guard"
)

const (
	// asideStep is how many bytes are copied aside at a time, and frontStep how many are sent meanwhile.
	asideStep = 4 << 20
	frontStep = 4 << 20
	// leastPatience is how long what is being sent is waited for when everything else has been copied.
	leastPatience = 20 * time.Millisecond
)

// setAside copies what has not arrived yet into memory of our own, which release gives back. It begins at the end, while the
// sending goes on at the front, until both meet; what is on its way then is waited for, not much longer than patience, and else
// copied too. When it returns nobody reads the caller's memory any more.
func (c *Client) setAside(ctx context.Context, o *outgoing, patience time.Duration) (release func(), err error) {
	size := o.left()
	buffer, err := c.opts.Pool.Get(size)
	if err != nil {
		return func() {}, err
	}
	begun := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := &middle{}
	m.mu.pieces = o.pieces
	var front unsent
	sending := make(chan struct{})
	guard.Go("client put", func() {
		defer close(sending)
		front = c.sendFront(ctx, o, m)
	})
	m.copyBack(buffer)
	timer := time.NewTimer(max(patience-time.Since(begun), leastPatience))
	defer timer.Stop()
	select {
	case <-sending:
	case <-timer.C:
		cancel()
		<-sending
	}
	at := front.sent
	for _, p := range front.pieces {
		at += int64(copy(buffer[at:], p))
	}
	o.offset, o.pieces = o.offset+front.sent, nil
	if front.sent < size {
		o.pieces = [][]byte{buffer[front.sent:]}
	}
	return func() { c.opts.Pool.Put(buffer) }, nil
}

// unsent is where the sending at the front has ended: behind these bytes, and with these pieces taken and not sent.
type unsent struct {
	sent   int64
	pieces [][]byte
}

// sendFront sends from the front until nothing is left in the middle. Whoever sends the rest meets an error again.
func (c *Client) sendFront(ctx context.Context, o *outgoing, m *middle) (u unsent) {
	for {
		now, size := m.takeFront(frontStep)
		if size == 0 {
			return u
		}
		if err := o.send(ctx, c, o.offset+u.sent, now); err != nil {
			u.pieces = now
			return u
		}
		u.sent += size
	}
}

// middle is what is neither sent nor copied yet.
type middle struct {
	mu struct {
		sync.Mutex
		pieces [][]byte
	}
}

// takeFront takes up to limit bytes.
func (m *middle) takeFront(limit int64) (taken [][]byte, size int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(m.mu.pieces) > 0 && size < limit {
		p := m.mu.pieces[0]
		n := min(int64(len(p)), limit-size)
		taken, size = append(taken, p[:n]), size+n
		if m.mu.pieces[0] = p[n:]; len(p[n:]) == 0 {
			m.mu.pieces = m.mu.pieces[1:]
		}
	}
	return taken, size
}

// takeBack takes the last bytes, at most limit, which are together; none when nothing is left.
func (m *middle) takeBack(limit int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := len(m.mu.pieces) - 1
	if last < 0 {
		return nil
	}
	p := m.mu.pieces[last]
	from := max(len(p)-limit, 0)
	if m.mu.pieces[last] = p[:from]; from == 0 {
		m.mu.pieces = m.mu.pieces[:last]
	}
	return p[from:]
}

// copyBack copies everything from the end on, to the end of a buffer.
func (m *middle) copyBack(buffer []byte) {
	at := len(buffer)
	for p := m.takeBack(asideStep); p != nil; p = m.takeBack(asideStep) {
		at -= len(p)
		copy(buffer[at:], p)
	}
}
