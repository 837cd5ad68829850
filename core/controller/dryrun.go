package controller

import (
	"context"
	"errors"
	"math"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/schema"
	"transferqueue/core/wire"
)

// dryRun says what would be moved, and for how much of it there is room. Each sample goes as a whole to the unit with most room, as the
// job would lay it. Values that several samples share count for each.
func (d *draining) dryRun(ctx context.Context, held *drain.Held) (any, error) {
	rooms := d.planRooms()
	var fits drain.Moved
	blocked := int64(0)
	for at, end := (catalog.Cursor{}), false; !end; {
		var b drain.Batch
		b, at, end = d.List(at, planSamples)
		err := d.look(ctx, b.Partition, b.Samples, func(g *leasedGroup) {
			for _, need := range g.byTier() {
				if d.planSample(rooms, &need) {
					fits.Add(&drain.Moved{Counted: need})
				} else {
					blocked++
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	reply := d.reply(drain.New(d, d.options(), held).Status())
	for t, tier := range []*wire.JobTier{&reply.Memory, &reply.Disk} {
		tier.CellsFit, tier.BytesFit = fits.Cells[t], fits.Bytes[t]
	}
	if blocked > 0 {
		reply.Blocked = []wire.JobBlocked{{Reason: drain.NoCapacity, Count: blocked}}
	}
	return reply, nil
}

// planSamples is how many samples are looked at in one step.
const planSamples = 256

// look hands out the leased cells of those of the samples that are on the unit. Who has cells that cannot be leased is passed over.
func (d *draining) look(ctx context.Context, partition string, samples []schema.Sample, each func(g *leasedGroup)) (err error) {
	var groups []leasedGroup
	d.s.mu.RLock()
	for _, g := range d.s.mu.cat.GroupsOn(d.from.ID(), partition, samples) {
		groups = append(groups, leasedGroup{Group: g, unit: d.from})
		groups[len(groups)-1].read()
	}
	d.s.mu.RUnlock()
	for i := range groups {
		g := &groups[i]
		var cell *drain.CellError
		if err == nil {
			err = d.lease(ctx, g)
		}
		switch {
		case err == nil:
			each(g)
		case errors.As(err, &cell):
			err = nil
		}
		g.giveUp()
	}
	return err
}

// byTier counts the cells of each row by the tier in which they lie.
func (g *leasedGroup) byTier() []drain.Counted {
	out := make([]drain.Counted, len(g.Samples))
	if g.cells == nil {
		return out
	}
	for k := range g.cells.Columns {
		c := &g.cells.Columns[k]
		offsets, mask := c.Column.Offsets(), tierMask(c, len(out))
		for row := range out {
			out[row].Cells[mask[row]]++
			out[row].Bytes[mask[row]] += offsets[row+1] - offsets[row]
		}
	}
	return out
}

// planRoom is what a unit could take still; math.MaxInt64: no limit.
type planRoom struct{ memory, disk, samples int64 }

// planRooms is the room of the units that may take samples.
func (d *draining) planRooms() (out []*planRoom) {
	d.s.mu.RLock()
	defer d.s.mu.RUnlock()
	for _, n := range d.s.nodes.Load().order {
		if n.ID() == d.from.ID() || n.Lost() != nil || d.s.mu.cat.Duty(n.ID()) != catalog.Active ||
			d.targets != nil && !slices.Contains(d.targets, n.Name()) {
			continue
		}
		st := n.Stats()
		r := &planRoom{math.MaxInt64, max(st.DiskLimit-st.DiskUsed, 0), d.s.mu.cat.MoreSamples(n.ID())}
		if st.MemoryLimit > 0 {
			r.memory = max(st.MemoryLimit-st.MemoryUsed-st.Staging, 0)
		}
		out = append(out, r)
	}
	return out
}

// room is how many bytes fit into memory, if need be because others move to disk.
func (r *planRoom) room() int64 { return r.memory + min(r.disk, math.MaxInt64-r.memory) }

// planSample takes room for the cells of a sample on the unit that has most; false: none has enough.
func (d *draining) planSample(rooms []*planRoom, c *drain.Counted) bool {
	var need [drain.NumTiers]int64
	onDisk := false
	for t := range drain.NumTiers {
		to := d.tierFor(t)
		need[to] += c.Bytes[t]
		onDisk = onDisk || to == drain.LocalDisk && c.Cells[t] > 0
	}
	memory, disk := need[drain.Memory], need[drain.LocalDisk]
	var best *planRoom
	for _, r := range rooms {
		fits := r.samples > 0 && disk <= r.disk && memory <= r.room()-disk && (!onDisk || r.disk > 0)
		if fits && (best == nil || r.room() > best.room()) {
			best = r
		}
	}
	if best == nil {
		return false
	}
	best.samples--
	spilled := max(memory-best.memory, 0)
	best.memory -= memory - spilled
	best.disk -= disk + spilled
	return true
}
