package controller

import "sync"

// roomSignal tells everybody who waits that memory was freed somewhere.
type roomSignal struct {
	mu   sync.Mutex
	next chan struct{}
	used bool
}

func (r *roomSignal) init() { r.next = make(chan struct{}) }

// wait returns a channel that is closed at the next signal. Take it before looking for room, or a signal may be missed.
func (r *roomSignal) wait() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used = true
	return r.next
}

func (r *roomSignal) signal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used {
		close(r.next)
		r.next, r.used = make(chan struct{}), false
	}
}
