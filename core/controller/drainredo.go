package controller

import (
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (r *recovering) move(_ uint64, record []byte) error {
	var x moveRecord
	err := decodeRecord(record, &x)
	if err == nil {
		err = r.s.mu.cat.Relocate(x.Partition, samplesOf(&x.Samples), x.From, x.To)
	}
	if err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "samples that have moved cannot be moved again")
	}
	return nil
}

func (r *recovering) duty(_ uint64, record []byte) error {
	var x dutyRecord
	err := decodeRecord(record, &x)
	if err == nil && x.Duty > uint8(catalog.Drained) {
		err = tqerr.New(tqerr.Corruption, "unit %d: duty %d", x.Unit, x.Duty)
	}
	if err == nil {
		r.s.mu.cat.SetDuty(x.Unit, catalog.Duty(x.Duty))
		r.s.doneLocked(x.Origin, nil)
	}
	return err
}

// drainAgain lets the jobs go on that an earlier life has begun.
func (s *Server) drainAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cordonedLocked()
	for _, d := range s.mu.drains.byID {
		if d.ended != nil {
			continue
		}
		again := s.newDraining(&d.request)
		d.mover = again.mover
		d.job = drain.New(d, d.options(), nil)
		d.runLocked()
	}
}

// drain takes a job: one that has not ended goes on when everything is in its place.
func (r *recovering) drain(number uint64, record []byte) error {
	var x drainRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	s := r.s
	spent := time.Duration(x.SpentMS) * time.Millisecond
	d := &draining{id: x.Status.Job, request: x.Request, began: time.Now().Add(-spent)}
	duty := catalog.Draining
	if x.Status.State != "" {
		status := x.Status
		d.ended = &status
		duty = catalog.Cordoned
		if status.State == string(drain.Succeeded) {
			duty = catalog.Drained
		}
	}
	s.mu.drains.add(d)
	if x.Origin.Sequence != 0 {
		s.doneLocked(x.Origin, &wire.JobReply{Job: d.id, Unit: x.Request.Unit, State: string(drain.Pending), ETAMS: -1})
	}
	for _, u := range r.units {
		if number > 0 && u.Name == x.Request.Unit { // else the state has it
			s.mu.cat.SetDuty(u.ID, duty)
		}
	}
	return nil
}

func (r *recovering) moving(_ uint64, record []byte) error {
	var x movingRecord
	err := decodeRecord(record, &x)
	r.s.mu.drains.moves = x.Moves
	return err
}
