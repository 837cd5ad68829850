package transport

import "sync"

// Loans are the streams that use memory which its owner may need back: that of one write, or all that one life has leased.
// Nobody begins one after Recall: what it is for has left the tables of its owner before. The zero value is ready.
type Loans struct {
	mu    sync.Mutex
	stops map[*byte]func()
	idle  sync.Cond
}

// Begin counts a stream until done is called, which must happen; see Lender.
func (l *Loans) Begin(stop func()) (done func()) {
	key := new(byte)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stops == nil {
		l.stops = map[*byte]func(){}
		l.idle.L = &l.mu
	}
	l.stops[key] = stop
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.stops, key)
		l.idle.Broadcast()
	}
}

// Recall stops the streams and returns when none touches the memory any more. A client that commits has none; one that has
// given a stream up may have sent its bytes again before the end of that stream was seen here.
func (l *Loans) Recall() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, stop := range l.stops {
		stop()
	}
	for len(l.stops) > 0 {
		l.idle.Wait()
	}
}
