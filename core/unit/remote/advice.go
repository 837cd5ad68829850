package remote

import (
	"slices"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/wire"
)

// A unit that has to move cells asks its controller what their samples are needed for. It cannot send requests, so one of the
// controller lies at it; its answer is the question, and the next one brings what the controller says.

// advicePatience is how long a unit waits for advice. Writers wait for the room that it makes, so it moves what was touched
// longest ago then.
const advicePatience = time.Second

// advice is what a life knows of the question that is open. Guarded by life.mu.
type advice struct {
	standing *request // nil: the controller has not asked to be asked
	asked    uint64
	answer   chan []byte
}

// Advise lets somebody say what samples are needed for, when the unit has to move cells. It is called on goroutines of its own.
func (u *Unit) Advise(a store.Advisor) {
	u.state.Lock()
	u.state.advisor = a
	tiered := u.state.stats.DiskLimit > 0
	u.state.Unlock()
	if tiered {
		u.expect(0, nil)
	}
}

// expect lets the unit ask, and answers what it has asked before.
func (u *Unit) expect(question uint64, uses []byte) {
	a := &answer{u: u, done: make(chan struct{}), asks: true}
	u.postAs(a, 0, wire.OpUnitAdvise, &wire.UnitAdviseRequest{Question: question, Uses: uses}, nil)
}

// asked answers a question of the unit.
func (u *Unit) asked(q *wire.UnitQuestion) {
	u.state.Lock()
	advise := u.state.advisor
	u.state.Unlock()
	guard.Go("advice for unit "+u.at.Name, func() {
		var said []byte
		if samples, err := samplesOf(&q.Samples); err == nil {
			uses := slices.Repeat([]store.Use{store.Wanted}, len(samples))
			advise(q.Partition, samples, uses)
			said = make([]byte, len(uses))
			for i, use := range uses {
				said[i] = byte(use)
			}
		}
		u.expect(q.Number, said)
	})
}

// advise takes the answer to the last question and keeps the request for the next one.
func (l *life) advise(r *request) (*wire.UnitReply, error) {
	var req wire.UnitAdviseRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.ended {
		return nil, errGone
	}
	a := &l.mu.advice
	if req.Question == a.asked && a.answer != nil {
		a.answer <- req.Uses // has room for one
		a.answer = nil
	}
	before := a.standing
	a.standing = r
	if before != nil { // of a controller that has asked twice
		l.answer(before, nil, errGone)
	}
	return nil, errLater
}

// ask fills in what samples are needed for, if the controller says that in time.
func (l *life) ask(partition string, samples []schema.Sample, uses []store.Use) {
	answer := make(chan []byte, 1)
	l.mu.Lock()
	a := &l.mu.advice
	r := a.standing
	if r == nil || l.mu.ended {
		l.mu.Unlock()
		return
	}
	a.asked++
	number := a.asked
	a.standing, a.answer = nil, answer
	l.mu.Unlock()
	l.answer(r, &wire.UnitReply{Question: &wire.UnitQuestion{Number: number, Partition: partition, Samples: wireSamples(samples)}}, nil)
	timer := time.NewTimer(advicePatience)
	defer timer.Stop()
	select {
	case said := <-answer:
		for i := range min(len(said), len(uses)) {
			uses[i] = min(store.Use(said[i]), store.Wanted)
		}
	case <-timer.C:
	case <-l.gone:
	}
}

// advise asks the controller that is connected. It takes no lock that is held while a store closes, which waits for it.
func (s *Server) advise(partition string, samples []schema.Sample, uses []store.Use) {
	if l := s.current.Load(); l != nil {
		l.ask(partition, samples, uses)
	}
}
