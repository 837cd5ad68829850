package controller

import "transferqueue/core/internal/vfs"

// Verify checks the catalog and that nobody waits for a write that is not there.
func (s *Server) Verify() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.cat.Verify()
}

// Parked counts what waits or watches: requests for changes, writes in order, watches.
func (s *Server) Parked() (waiters, writes, watches int) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, list := range s.mu.waiters {
		waiters += len(list)
	}
	for _, list := range s.mu.watches {
		watches += len(list)
	}
	return waiters, len(s.mu.writes.list), watches
}

// Clients returns how many clients are known and how many outcomes are kept for them.
func (s *Server) Clients() (clients, outcomes int) {
	s.clients.Lock()
	defer s.clients.Unlock()
	for _, c := range s.clients.byID {
		c.mu.Lock()
		outcomes += len(c.mu.lanes)
		c.mu.Unlock()
	}
	return len(s.clients.byID), outcomes
}

// MaxReplyEvents is the most events of one reply.
const MaxReplyEvents = maxReplyEvents

// SetMaxWatchEvents changes how many events a watch keeps, and returns what changes it back.
func SetMaxWatchEvents(n int) (restore func()) {
	before := maxWatchEvents
	maxWatchEvents = n
	return func() { maxWatchEvents = before }
}

// SetFS replaces the file system.
func (s *Server) SetFS(fs vfs.FS) { s.opts.FS = fs }

// Saves counts the saves in progress.
func (s *Server) Saves() int {
	s.saves.Lock()
	defer s.saves.Unlock()
	return len(s.saves.open)
}

// Waiting counts the writers in line.
func (s *Server) Waiting() int {
	_, writes, _ := s.Parked()
	return writes
}
