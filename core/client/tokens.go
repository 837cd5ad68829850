package client

import "sync"

// held names the memory that results keep alive. One table serves all clients of the process, because results outlive the
// session they came from. Releasing never blocks for long: what takes time is handed to a goroutine by free itself.
var held = struct {
	mu   sync.Mutex
	next uint64
	live map[uint64]*memory
}{next: 1, live: map[uint64]*memory{}}

// memory is a buffer with as many holders as tokens point to it.
type memory struct {
	data    []byte
	holders int
	free    func()
}

// hold adds a holder and returns its token.
func hold(m *memory) uint64 {
	held.mu.Lock()
	defer held.mu.Unlock()
	token := held.next
	held.next++
	m.holders++
	held.live[token] = m
	return token
}

// Release ends one holder; the memory goes back with the last. An unknown token is ignored.
func Release(token uint64) {
	held.mu.Lock()
	m := held.live[token]
	delete(held.live, token)
	last := false
	if m != nil {
		m.holders--
		last = m.holders == 0
	}
	held.mu.Unlock()
	if last {
		m.free()
	}
}

// Held returns how many results are held in this process.
func Held() int {
	held.mu.Lock()
	defer held.mu.Unlock()
	return len(held.live)
}
