package controller

import (
	"bytes"
	"maps"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/snapshot"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// image is everything that a server knows at one moment, for a state of the journal.
type image struct {
	session  sessionRecord
	sampler  *samplerRecord
	memory   memoryRecord
	units    []unitRecord
	config   []byte
	catalog  *catalog.Image
	outcomes map[origin]outcome
	drains   []*drainRecord
	moves    int
}

// imageLocked takes the image. It shares memory with the server, which does not change it.
func (s *Server) imageLocked(name string, memory []byte) *image {
	m := &image{
		session: sessionRecord{s.opts.Session, s.opts.Secret}, sampler: s.mu.registered, memory: memoryRecord{name, memory}, config: *s.blob.Load(),
		catalog: s.mu.cat.Image(), outcomes: map[origin]outcome{},
	}
	m.drains, m.moves = s.mu.drains.records(), s.mu.drains.moves
	for _, n := range s.nodes.Load().order {
		m.units = append(m.units, recordOf(n))
	}
	for client, lanes := range s.mu.outcomes {
		for _, out := range lanes {
			m.outcomes[origin{client, out.sequence}] = out
		}
	}
	return m
}

// recordOf describes a unit, so that a later life of the controller finds it.
func recordOf(n node) unitRecord {
	r := unitRecord{ID: n.ID(), Name: n.Name(), Host: n.Host(), Machine: n.Machine(), SampleLimit: n.SampleLimit()}
	switch n := unmetered(n).(type) {
	case inside:
		r.Inside = true
	case outside:
		at := n.Address()
		r.Socket, r.Secret, r.Address, r.Key, r.Incarnation = at.Socket, at.Secret, at.Address, at.Key, n.Incarnation()
	case absent:
		r = n.was
	}
	return r
}

// pieceOfState is how many bytes of the catalog's state one record has.
const pieceOfState = 1 << 20

// write writes the records of a state.
func (m *image) write(put func(record []byte) error) error {
	emit := func(kind byte, message any) error {
		record, err := encodeRecord(kind, message)
		if err == nil {
			err = put(record)
		}
		return err
	}
	if err := emit(recordSession, &m.session); err != nil {
		return err
	}
	if m.sampler != nil {
		if err := emit(recordSampler, m.sampler); err != nil {
			return err
		}
	}
	if err := emit(recordMemory, &m.memory); err != nil {
		return err
	}
	for i := range m.units {
		if err := emit(recordUnit, &m.units[i]); err != nil {
			return err
		}
	}
	if err := emit(recordConfig, &configRecord{m.config}); err != nil {
		return err
	}
	if err := m.writeCatalog(emit); err != nil {
		return err
	}
	if m.moves > 0 {
		if err := emit(recordMoving, &movingRecord{m.moves}); err != nil {
			return err
		}
	}
	for _, d := range m.drains {
		if err := emit(recordDrain, d); err != nil {
			return err
		}
	}
	for _, o := range slices.SortedFunc(maps.Keys(m.outcomes), compareOrigins) {
		out := m.outcomes[o]
		reply := out.reply
		if reply == nil {
			reply = (&call{req: &wire.Request{}}).makeReply(out.result, nil)
		}
		if err := emit(recordOutcome, &outcomeRecord{Origin: o, Code: uint32(reply.Code), Body: reply.Body}); err != nil {
			return err
		}
	}
	return nil
}

func compareOrigins(a, b origin) int {
	switch {
	case a.Client != b.Client && a.Client < b.Client, a.Client == b.Client && a.Sequence < b.Sequence:
		return -1
	case a == b:
		return 0
	}
	return 1
}

func (m *image) writeCatalog(emit func(kind byte, message any) error) error {
	var state bytes.Buffer
	if err := snapshot.EncodeState(&state, m.catalog.State); err != nil {
		return err
	}
	for piece := range slices.Chunk(state.Bytes(), pieceOfState) {
		if err := emit(recordState, &stateRecord{piece}); err != nil {
			return err
		}
	}
	places := &placesRecord{Epoch: m.catalog.Epoch}
	for _, u := range m.catalog.Units {
		places.Units = append(places.Units, placesUnit{ID: u.ID, Host: u.Host, Slots: u.Slots, Turn: u.Turn, Limit: u.Limit, Duty: uint8(u.Duty)})
	}
	for k, slots := range m.catalog.Slots {
		places.Slots = append(places.Slots, placesPartition{Slots: slots, Leaving: m.catalog.Leaving[k]})
	}
	for _, c := range m.catalog.Clearing {
		record := &clearingRecord{Partition: c.Partition, Samples: *wireSamples(c.Samples), Slots: c.Slots, Keys: c.Keys, Keyed: c.Keyed}
		if err := emit(recordClearing, record); err != nil {
			return err
		}
	}
	return emit(recordPlaces, places) // last of the catalog's: it is complete then
}

// catalogOf puts a catalog together from its records.
func catalogOf(o catalog.Options, dir string, state []byte, places *placesRecord, clearing []clearingRecord) (*catalog.Catalog, error) {
	read, err := snapshot.DecodeState(dir, state)
	if err != nil {
		return nil, err
	}
	m := &catalog.Image{State: read, Epoch: places.Epoch}
	for _, u := range places.Units {
		m.Units = append(m.Units, catalog.UnitState{ID: u.ID, Host: u.Host, Slots: u.Slots, Turn: u.Turn, Limit: u.Limit, Duty: catalog.Duty(u.Duty)})
	}
	for _, p := range places.Slots {
		m.Slots, m.Leaving = append(m.Slots, p.Slots), append(m.Leaving, p.Leaving)
	}
	for i := range clearing {
		c := &clearing[i]
		if len(c.Samples.Indexes) != len(c.Samples.Generations) {
			return nil, tqerr.New(tqerr.Corruption, "partition %q: samples that are being cleared", c.Partition)
		}
		m.Clearing = append(m.Clearing, catalog.ClearingState{
			Partition: c.Partition, Samples: samplesOf(&c.Samples), Slots: c.Slots, Keys: c.Keys, Keyed: c.Keyed,
		})
	}
	return catalog.Restore(o, m)
}
