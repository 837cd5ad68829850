// Package roster counts the connections of each peer, so that a server hears exactly once that a peer is gone.
//
// A peer is present from its first Join until the handler's Gone has returned. Somebody who joins under the same id
// while Gone runs waits for its end: what the server still does for the old life cannot hit the new one.
package roster

import (
	"sync"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/transport"
)

// Roster is the peers of one server. Its methods may be called from any goroutine.
type Roster struct {
	gone func(transport.Peer)
	mu   struct {
		sync.Mutex
		peers map[uint64]*entry
	}
}

type entry struct {
	peer  transport.Peer
	conns int
	// timer runs while a peer without connections may still come back.
	timer *time.Timer
	// left is closed when Gone has returned; nil before it is called.
	left chan struct{}
}

// New makes an empty roster that reports peers to gone, which is called without any lock held.
func New(gone func(transport.Peer)) *Roster {
	r := &Roster{gone: gone}
	r.mu.peers = map[uint64]*entry{}
	return r
}

// Join counts a connection of a peer. It waits while an earlier life of the peer is being ended.
func (r *Roster) Join(peer transport.Peer) {
	for {
		r.mu.Lock()
		e := r.mu.peers[peer.ID]
		if e == nil {
			e = &entry{peer: peer}
			r.mu.peers[peer.ID] = e
		}
		if e.left == nil {
			e.conns++
			if e.timer != nil {
				e.timer.Stop()
				e.timer = nil
			}
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		<-e.left
	}
}

// Leave ends a connection. After the last one the peer is gone: at once with grace 0, otherwise when it has not joined
// again within grace, and with a negative grace only at End.
func (r *Roster) Leave(peer transport.Peer, grace time.Duration) {
	r.mu.Lock()
	e := r.mu.peers[peer.ID]
	e.conns--
	if e.conns > 0 || grace < 0 {
		r.mu.Unlock()
		return
	}
	if grace > 0 {
		var timer *time.Timer
		timer = time.AfterFunc(grace, func() {
			r.mu.Lock()
			if e.timer != timer {
				r.mu.Unlock()
				return
			}
			r.endLocked(e)
		})
		e.timer = timer
		r.mu.Unlock()
		return
	}
	r.endLocked(e)
}

// endLocked reports the peer and forgets it; it releases the lock.
func (r *Roster) endLocked(e *entry) {
	e.timer = nil
	e.left = make(chan struct{})
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.mu.peers, e.peer.ID)
		r.mu.Unlock()
		close(e.left)
	}()
	// Gone may run on a timer's goroutine, where nobody else would recover.
	var err error
	defer guard.Recover(&err)
	r.gone(e.peer)
}

// End reports all peers that have no connection but were still expected back.
func (r *Roster) End() {
	for {
		r.mu.Lock()
		var found *entry
		for _, e := range r.mu.peers {
			if e.conns == 0 && e.left == nil {
				found = e
				break
			}
		}
		if found == nil {
			r.mu.Unlock()
			return
		}
		if found.timer != nil {
			found.timer.Stop()
		}
		r.endLocked(found)
	}
}
