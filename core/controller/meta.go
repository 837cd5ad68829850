package controller

import (
	"context"
	"slices"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func metaReply(d *catalog.Described) *wire.MetaReply {
	reply := &wire.MetaReply{}
	if d == nil {
		return reply
	}
	reply.Indexes, reply.Generations = indexLists(d.Samples)
	reply.Status, reply.Tags, reply.End = d.Status, d.Tags, d.End
	for i := range d.Columns {
		reply.Columns = append(reply.Columns, wire.Column(d.Columns[i]))
	}
	return reply
}

func (c *call) meta() (any, error) {
	var r wire.MetaRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	switch r.Mode {
	case "insert":
		return c.insert(&r)
	case "fetch":
		return c.fetch(&r)
	case "force_fetch":
		c.s.mu.RLock()
		defer c.s.mu.RUnlock()
		d, err := c.s.mu.cat.ForceFetch(r.Partition, r.Fields)
		return metaReply(d), err
	}
	return nil, tqerr.New(tqerr.InvalidArgument, "mode %q: want \"insert\", \"fetch\" or \"force_fetch\"", r.Mode)
}

// register creates samples without fields, by key or not, for a client of a machine. answer makes what the request is answered
// with; nil: something else.
func (s *Server) register(o origin, w *catalog.Write, from string, answer func(*catalog.Applied) any, fields []string) (*catalog.Applied, error) {
	rooms := s.rooms()
	s.mu.Lock()
	defer s.mu.Unlock()
	units, err := s.mu.cat.Check(w)
	if err == nil {
		err = s.mu.cat.Place(units, from, rowSizes(nil), rooms)
	}
	if err != nil {
		return nil, s.explain(err)
	}
	if s.journal != nil {
		record := newPutRecord(o, w, units, replyNothing)
		if answer != nil {
			record.Reply, record.Fields = replyInserted, fields
		}
		if _, err := s.noteLocked(false, recordPut, record); err != nil {
			return nil, err
		}
	}
	applied, err := s.mu.cat.Apply(w, units)
	if err != nil {
		return nil, s.noted(err)
	}
	if answer != nil {
		s.doneLocked(o, answer(applied))
	}
	s.changed(w.Partition, applied.Events)
	return applied, nil
}

func (c *call) insert(r *wire.MetaRequest) (any, error) {
	if r.BatchSize <= 0 || r.BatchSize > wire.MaxRows {
		return nil, tqerr.New(tqerr.InvalidArgument, "batch_size %d: want 1 to %d", r.BatchSize, wire.MaxRows)
	}
	answer := func(applied *catalog.Applied) any { return inserted(applied, r.Fields) }
	applied, err := c.s.register(c.origin(), &catalog.Write{Partition: r.Partition, Insert: r.BatchSize}, c.machine(), answer, r.Fields)
	if err != nil {
		return nil, err
	}
	return answer(applied), nil
}

// inserted describes new samples that have none of the fields yet.
func inserted(applied *catalog.Applied, fields []string) *wire.MetaReply {
	rows := len(applied.Samples)
	d := &catalog.Described{Samples: applied.Samples, Status: make([]byte, rows), Tags: applied.Tags}
	for _, f := range fields {
		d.Columns = append(d.Columns, schema.Column{Field: f, Rows: rows})
	}
	return metaReply(d)
}

func (c *call) retrieveMeta() (any, error) {
	var r wire.RetrieveMetaRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if r.Create {
		if _, err := c.s.register(origin{}, &catalog.Write{Partition: r.Partition, Keys: r.Keys}, c.machine(), nil, nil); err != nil {
			return nil, err
		}
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	return metaReply(c.s.mu.cat.Lookup(r.Partition, r.Keys)), nil
}

func (c *call) retrieveKeys() (any, error) {
	var r wire.IndexesRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	keys, known, err := c.s.mu.cat.KeysOf(r.Partition, r.Indexes)
	if err != nil {
		return nil, err
	}
	reply := &wire.KeysReply{Keys: keys, Known: make([]byte, len(known))}
	for i, k := range known {
		if k {
			reply.Known[i] = 1
		}
	}
	return reply, nil
}

func (c *call) setTags() (any, error) {
	var r wire.SetTagsRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.identify(r.Partition, &r.Samples)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	samples := samplesOf(&r.Samples)
	if err := c.s.mu.cat.CheckTags(samples, r.Tags); err != nil {
		return nil, err
	}
	record := &tagsRecord{Origin: c.origin(), Partition: r.Partition, Samples: r.Samples, Tags: r.Tags}
	if _, err := c.s.noteLocked(false, recordTags, record); err != nil {
		return nil, err
	}
	events, err := c.s.mu.cat.SetTags(r.Partition, samples, r.Tags)
	c.s.doneLocked(record.Origin, nil)
	c.s.changed(r.Partition, events)
	return nil, err
}

func statusReply(st *catalog.Status) *wire.StatusReply {
	if st == nil {
		return &wire.StatusReply{}
	}
	return &wire.StatusReply{Known: true, Indexes: st.Indexes, Width: st.Width, Status: st.Cells}
}

func (c *call) consumption() (any, error) {
	var r wire.TaskRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	return statusReply(c.s.mu.cat.Consumption(r.Partition, r.Task)), nil
}

func (c *call) resetConsumption() (any, error) {
	var r wire.TaskRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	record := &resetRecord{Origin: c.origin(), Partition: r.Partition, Task: r.Task}
	if _, err := c.s.noteLocked(false, recordReset, record); err != nil {
		return nil, err
	}
	c.s.doneLocked(record.Origin, nil)
	c.s.mu.cat.ResetConsumption(r.Partition, r.Task)
	c.s.mu.sampler.Reset(r.Partition, r.Task)
	c.s.changed(r.Partition, nil)
	return nil, nil
}

func (c *call) production() (any, error) {
	var r wire.ProductionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	return statusReply(c.s.mu.cat.Production(r.Partition, r.Fields)), nil
}

func (c *call) partitions() (any, error) {
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	return &wire.NamesReply{Names: c.s.mu.cat.Partitions()}, nil
}

// freshness is how long a listing waits for units to tell what they hold now.
const freshness = 250 * time.Millisecond

// listUnits tells what the units hold, as of now; of a unit that does not answer, what it has told last.
func (c *call) listUnits() (any, error) {
	return c.fresh(func() (any, error) {
		_, infos := c.s.unitInfos()
		return &wire.UnitsReply{Units: infos}, nil
	})
}

// fresh answers when the units have told what they hold.
func (c *call) fresh(answer func() (any, error)) (any, error) {
	all := c.s.nodes.Load().order
	if !slices.ContainsFunc(all, node.waits) {
		return answer()
	}
	return c.later(func(ctx context.Context) (any, error) {
		asking, cancel := context.WithTimeout(ctx, freshness)
		defer cancel()
		for _, n := range all {
			if n.Lost() == nil {
				_ = n.sync(asking) // the last counts are good enough
			}
		}
		return answer()
	})
}

// unitInfos describes the units. One that was drained and has ended is no unit any more, but for what it would be if it joined again.
func (s *Server) unitInfos() (of []node, out []wire.UnitInfo) {
	all := s.nodes.Load().order
	s.mu.RLock()
	lost, samples, duties := s.mu.cat.LostOn(), make([]int64, len(all)), make([]catalog.Duty, len(all))
	for i, n := range all {
		samples[i], duties[i] = s.mu.cat.SamplesOn(n.ID()), s.mu.cat.Duty(n.ID())
	}
	s.mu.RUnlock()
	for i, n := range all {
		st, state := n.Stats(), duties[i].String()
		if n.Lost() != nil {
			if duties[i] == catalog.Drained && samples[i] == 0 {
				continue
			}
			state = "UNAVAILABLE"
		}
		info := wire.UnitInfo{
			ID: n.Name(), State: state, Host: n.Host(), MemoryUsed: st.MemoryUsed + st.Staging, MemoryLimit: st.MemoryLimit,
			DiskUsed: st.DiskUsed, DiskLimit: unlimited(st.DiskLimit), Samples: samples[i], SampleLimit: n.SampleLimit(), Cells: st.Cells,
			Leases: st.Leases, Staged: st.Staged, LostCells: lost[n.ID()], Number: n.ID(),
		}
		countTiers(n, &info)
		of, out = append(of, n), append(out, info)
	}
	return of, out
}

func (c *call) config() (any, error) {
	o := &c.s.opts
	reply := &wire.ConfigReply{Config: *c.s.blob.Load(), Session: o.Session, PID: o.PID, Host: o.Host}
	if c.s.journal != nil {
		reply.RestartMS = o.RestartWait.Milliseconds()
	}
	return reply, nil
}

func (c *call) storeConfig() (any, error) {
	var r wire.StoreConfigRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if _, err := c.s.noteLocked(false, recordConfig, &configRecord{r.Config}); err != nil {
		return nil, err
	}
	c.s.blob.Store(&r.Config)
	return nil, nil
}

func (c *call) createPartition() (any, error) {
	var r wire.PartitionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if _, err := c.s.noteLocked(false, recordPartition, &partitionRecord{r.Partition}); err != nil {
		return nil, err
	}
	return &wire.CreatedReply{Created: c.s.mu.cat.EnsurePartition(r.Partition)}, nil
}

func (c *call) status() (any, error) { return c.fresh(c.summary) }

func (c *call) summary() (any, error) {
	s := c.s
	s.clients.Lock()
	clients := len(s.clients.byID)
	s.clients.Unlock()
	reply := &wire.StatusSummary{Version: s.opts.Version, PID: s.opts.PID, Uptime: int64(time.Since(s.started).Seconds()), Clients: clients}
	s.mu.RLock()
	for _, p := range s.mu.cat.Summary() {
		reply.Partitions = append(reply.Partitions, wire.PartitionSummary{
			Name: p.Name, Samples: p.Samples, Keys: p.Keys, Fields: p.Fields, Tasks: p.Tasks, Consumed: p.Consumed,
		})
	}
	s.mu.RUnlock()
	_, reply.Units = s.unitInfos()
	return reply, nil
}
