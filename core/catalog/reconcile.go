package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
)

// Cells names cells of one field.
type Cells struct {
	Partition, Field string
	Samples          []schema.Sample
}

// Reconciled is what a comparison of the catalog with a unit has found.
type Reconciled struct {
	Kept    int     // cells that both have, those included that were lost before
	Lost    []Cells // the catalog had them on the unit, which has not; they are not produced any more
	Unknown []Cells // the unit has them, the catalog not; the unit must delete them before anybody reads from it
	Changed []string
	Events  map[string][]Event // by partition
}

// Reconcile makes the catalog agree with a unit that has come back, or that has been kept while the controller was not there.
// stock is everything that the unit has.
//
// Both sides know a cell by partition, field, index and generation, which is enough to tell versions apart: a unit has
// executed an overwrite or a clear, and has recorded that it did, before the writer is answered. So a cell that the unit has
// is the version that the catalog means, or the one before a write that nobody was told the success of, or one that the
// catalog does not have at all. The first two are kept, with the type and the shapes that the unit says; the last is Unknown.
//
// A cell that is lost is like one that was never written, but reading it is an error that says so, until it is written again,
// or its field or its sample is cleared. One that was lost and turns up after all, unchanged since, is found.
func (c *Catalog) Reconcile(unit uint32, stock []schema.Stock) *Reconciled {
	r := &reconciling{c: c, unit: unit, out: &Reconciled{Events: map[string][]Event{}}, has: map[*field]*bitset.Set{}}
	kept := map[*field][]schema.Stock{}
	for i := range stock {
		r.sort(&stock[i], kept)
	}
	for _, p := range c.order {
		r.partition(p, kept)
	}
	return r.out
}

type reconciling struct {
	c    *Catalog
	unit uint32
	out  *Reconciled
	has  map[*field]*bitset.Set // indexes whose cells the unit has
}

// sort divides cells of a unit into those that the catalog has, or has lost, and the others.
func (r *reconciling) sort(s *schema.Stock, kept map[*field][]schema.Stock) {
	p := r.c.partitions[s.Partition]
	var f *field
	if p != nil {
		f = p.fields[s.Column.Field]
	}
	if f != nil && r.has[f] == nil {
		r.has[f] = &bitset.Set{}
	}
	known := make([]bool, len(s.Samples))
	for i, x := range s.Samples {
		known[i] = f != nil && r.c.owns(p, x) && p.active.Has(x.Index) && r.c.home(x.Index).id == r.unit &&
			(f.has.Has(x.Index) || f.lost.Has(x.Index)) && r.has[f].Add(x.Index)
	}
	for from := 0; from < len(s.Samples); {
		to := from + 1
		for to < len(s.Samples) && known[to] == known[from] {
			to++
		}
		part := schema.Stock{Partition: s.Partition, Column: s.Column.Slice(from, to), Samples: s.Samples[from:to]}
		if known[from] {
			kept[f] = append(kept[f], part)
		} else {
			r.unknown(&part)
		}
		from = to
	}
}

func (r *reconciling) unknown(s *schema.Stock) {
	r.out.Unknown = append(r.out.Unknown, Cells{s.Partition, s.Column.Field, s.Samples})
}

// partition takes the fields from the samples on the unit that it has not, and describes the others as the unit does.
func (r *reconciling) partition(p *partition, kept map[*field][]schema.Stock) {
	lost := map[int64][]string{}
	changed := false
	for _, f := range p.ordered {
		r.settleType(f, kept[f])
		for _, s := range kept[f] {
			changed = r.keep(p, f, &s) || changed
		}
		gone := slices.DeleteFunc(f.has.Members(nil), func(i int64) bool {
			return r.c.home(i).id != r.unit || r.has[f] != nil && r.has[f].Has(i)
		})
		if len(gone) == 0 {
			continue
		}
		rows := bitset.NewMask(gone)
		f.erase(rows)
		f.lost.AddAll(rows)
		r.out.Lost = append(r.out.Lost, Cells{p.name, f.name, r.c.Samples(gone)})
		for _, i := range gone {
			lost[i] = append(lost[i], f.name)
		}
	}
	for i := range lost {
		if key, ok := r.c.keyOf(p, i); ok {
			r.out.Events[p.name] = append(r.out.Events[p.name], Event{Kind: EventLost, Key: key, Fields: lost[i]})
		}
	}
	slices.SortFunc(r.out.Events[p.name], func(a, b Event) int { return slices.Compare([]byte(a.Key), []byte(b.Key)) })
	if changed || len(lost) > 0 {
		r.out.Changed = append(r.out.Changed, p.name)
	}
}

// settleType forgets the type of a field when the unit has all cells of it, so that it is what the unit says: a write that
// nobody was told the success of may have changed it.
func (r *reconciling) settleType(f *field, kept []schema.Stock) {
	if len(kept) == 0 || f.has.Count() == 0 || f.kind == kept[0].Column.Kind && f.dtype == kept[0].Column.DType {
		return
	}
	if all := f.has.Members(nil); !slices.ContainsFunc(all, func(i int64) bool { return !r.has[f].Has(i) }) {
		rows := bitset.NewMask(all)
		f.erase(rows)
		f.lost.AddAll(rows)
	}
}

// keep lets samples have the cells that the unit has. Those of another type than the cells of other units cannot stay. It
// reports whether some were lost before.
func (r *reconciling) keep(p *partition, f *field, s *schema.Stock) (found bool) {
	indexes := make([]int64, len(s.Samples))
	for k, x := range s.Samples {
		indexes[k] = x.Index
	}
	rows := bitset.NewMask(indexes)
	if f.admits(p.name, &s.Column, rows) != nil {
		for _, i := range indexes {
			r.has[f].Remove(i)
		}
		r.unknown(s)
		return false
	}
	found = f.lost.HasAny(rows)
	f.write(&s.Column, indexes, rows)
	r.out.Kept += len(indexes)
	return found
}
