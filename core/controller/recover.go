package controller

import (
	"context"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// Open is New for a server that may have a journal: it goes on where an earlier life has ended. Units in processes of their
// own that live are found again. An error means that nothing has changed, and that the journal is closed.
func Open(ctx context.Context, o Options) (*Server, error) {
	if o.Journal == nil {
		return New(o), nil
	}
	s := blank(o)
	s.opts.Units = o.Units
	s.journal = &journaling{log: o.Journal, opening: true, turning: make(chan struct{}, 1)}
	s.journal.turning <- struct{}{}
	s.mu.outcomes = map[uint64]map[uint64]outcome{}
	if err := s.recover(ctx); err != nil {
		s.Close()
		return nil, err
	}
	s.await()
	if s.journal.restored {
		s.journal.start("controller clients of an earlier life", s.stopAwaiting)
	}
	for _, cl := range s.mu.cat.Unfinished() {
		s.clearAgain(cl)
	}
	s.drainAgain()
	return s, nil
}

// recover reads the journal, finds the units, and writes down what came of it before anything else can be.
func (s *Server) recover(ctx context.Context) error {
	r := &recovering{s: s, dir: s.journal.log.Dir()}
	found, err := s.journal.log.Recover(r.record)
	if err == nil {
		err = r.ready()
	}
	if err != nil {
		return err
	}
	s.journal.restored = found
	s.number = sessionNumber(s.opts.Session)
	for _, u := range s.opts.Units {
		if err := u.Own(remote.SessionName(s.number)); err != nil {
			return err
		}
		if !found {
			s.addLocked(inside{u, u.ID(), s.sampleLimit(), s.opts.Machine}, nil)
		}
	}
	if found {
		if err := r.findUnits(ctx); err != nil {
			return err
		}
	}
	s.mu.drains.moves = 0 // what they have left behind is gone
	s.journal.opening = false
	s.record(s.mu.sampler)
	if err := s.turn(ctx); err != nil { // nothing can be appended before
		return err
	}
	for _, u := range s.opts.Units {
		u.Follow(s.journal.log)
	}
	return nil
}

// Session is the identity of the session: that of Options, or that of the journal.
func (s *Server) Session() string { return s.opts.Session }

// Secret is that of Options, or that of the journal.
func (s *Server) Secret() []byte { return s.opts.Secret }

// Config is the configuration of the session, as it was stored last.
func (s *Server) Config() []byte { return *s.blob.Load() }

// Restored reports that the session goes on where an earlier life of the controller has ended.
func (s *Server) Restored() bool { return s.journal != nil && s.journal.restored }

// recovering is an earlier life of a server that is being read.
type recovering struct {
	s        *Server
	dir      string
	state    []byte
	clearing []clearingRecord
	places   *placesRecord
	built    bool // the catalog is there
	memory   *memoryRecord
	units    []unitRecord
	changes  []change
	last     []byte // the last record when it is a write that a unit of this process may not have executed, and its number
	number   uint64
}

// record takes one record of the journal.
func (r *recovering) record(number uint64, record []byte) error {
	if err := r.finishLast(); err != nil {
		return err
	}
	if len(record) == 0 {
		return tqerr.New(tqerr.Corruption, "an empty record")
	}
	if take := kept[record[0]]; take != nil {
		return take(r, record)
	}
	if record[0] == recordUnit {
		return r.unit(number, record)
	}
	if err := r.build(); err != nil {
		return err
	}
	again, known := redo[record[0]]
	if !known {
		return tqerr.New(tqerr.VersionMismatch, "a record of kind %d, which this program does not know", record[0])
	}
	return again(r, number, record)
}

// kept takes what a state consists of, by the kind of its record. Some of it may be replaced later.
var kept = map[byte]func(r *recovering, record []byte) error{
	recordSession: (*recovering).session,
	recordSampler: (*recovering).sampler,
	recordOutcome: (*recovering).outcome,
	recordConfig: func(r *recovering, record []byte) error {
		var x configRecord
		err := decodeRecord(record, &x)
		r.s.blob.Store(&x.Config)
		return err
	},
	recordMemory: func(r *recovering, record []byte) error {
		r.memory = &memoryRecord{}
		return decodeRecord(record, r.memory)
	},
	recordState: func(r *recovering, record []byte) error {
		var x stateRecord
		err := decodeRecord(record, &x)
		r.state = append(r.state, x.Piece...)
		return err
	},
	recordClearing: func(r *recovering, record []byte) error {
		var x clearingRecord
		err := decodeRecord(record, &x)
		r.clearing = append(r.clearing, x)
		return err
	},
	recordPlaces: func(r *recovering, record []byte) error {
		r.places = &placesRecord{}
		return decodeRecord(record, r.places)
	},
}

func (r *recovering) session(record []byte) error {
	var x sessionRecord
	err := decodeRecord(record, &x)
	r.s.opts.Session, r.s.opts.Secret = x.Session, x.Secret
	return err
}

// build makes the catalog of the state, which is complete when the first change comes.
func (r *recovering) build() (err error) {
	if r.built {
		return nil
	}
	r.built = true
	s := r.s
	o := catalog.Options{PreAllocate: max(s.opts.PreAllocate, 1), SampleLimitPerUnit: s.sampleLimit()}
	if r.places != nil {
		s.mu.cat, err = catalogOf(o, r.dir, r.state, r.places, r.clearing)
		r.state, r.clearing = nil, nil
	}
	if err == nil && r.memory != nil {
		err = r.remember(r.memory)
	}
	return err
}

// ready makes sure that the server is as it was.
func (r *recovering) ready() error {
	if err := r.build(); err != nil || r.last == nil {
		return err
	}
	return r.decideLast()
}

// remember gives the sampler what it remembered, unless the session has another one by now.
func (r *recovering) remember(m *memoryRecord) error {
	picks := r.s.mu.sampler
	if picks == nil || picks.Name() != m.Name || len(m.State) == 0 {
		return nil
	}
	if p, isPython := picks.(*sampler.Python); isPython {
		p.Restore(m.State)
		r.s.mu.memory = m.State
		return nil
	}
	return picks.Load(m.State)
}

func (r *recovering) sampler(record []byte) error {
	x := &samplerRecord{}
	if err := decodeRecord(record, x); err != nil {
		return err
	}
	fresh, err := sampler.Make(x.spec(), r.s.opts.Python, r.s.opts.SamplerTime)
	if err != nil {
		return err
	}
	r.s.mu.sampler, r.s.mu.registered, r.s.mu.memory = fresh, x, nil
	return nil
}

func (r *recovering) outcome(record []byte) error {
	var x outcomeRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	r.s.keepLocked(x.Origin, outcome{sequence: x.Origin.Sequence, reply: &wire.Reply{Code: tqerr.Code(x.Code), Body: x.Body}})
	return nil
}
