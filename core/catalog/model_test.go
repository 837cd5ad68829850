package catalog

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// The model keeps maps of maps and takes every shortcut there is. After each operation the catalog must hold its
// invariants and show the same samples, keys, tags, fields, shapes and consumption.

type modelSample struct {
	key      string // "" for none
	tags     map[string]any
	shapes   map[string][]int64
	consumed map[string]bool
	unit     uint32
}

type modelPartition struct {
	samples  map[schema.Sample]*modelSample
	reserved []int64
	order    []string
	born     []schema.Sample // all that ever came to be
	fields   []string
	types    map[string]schema.DType
}

// modelCleared is a sample that is being cleared.
type modelCleared struct{ partition, key string }

type modelRun struct {
	t        *testing.T
	rng      *rand.Rand
	c        *Catalog
	parts    map[string]*modelPartition
	clearing map[schema.Sample]modelCleared
	open     []*Clearing
	given    map[schema.Sample]bool // samples that ever were
	saved    *modelSave
}

const modelReserve, modelLimit = 2, 40

func TestRandomOperationsAgainstANaiveModel(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	for round := range uint64(6) {
		m := &modelRun{t: t, rng: rand.New(rand.NewPCG(seed, round)), parts: map[string]*modelPartition{}, clearing: map[schema.Sample]modelCleared{}, given: map[schema.Sample]bool{}}
		m.c = New(Options{PreAllocate: modelReserve, SampleLimitPerUnit: modelLimit})
		for id := range uint32(3) {
			m.c.AddUnit(id, "h")
		}
		steps := []func(){m.writeKeys, m.writeKeys, m.writeKeys, m.insert, m.overwrite, m.fetch, m.fetch, m.clearKeys, m.clearSamples,
			m.clearFields, m.clearPartition, m.finish, m.finish, m.reset, m.setTags, m.save, m.load}
		for range 250 {
			steps[m.rng.IntN(len(steps))]()
			require.NoError(t, m.c.Verify())
			m.compare()
		}
	}
}

func (m *modelRun) name() string  { return fmt.Sprint("p", m.rng.IntN(3)) }
func (m *modelRun) field() string { return string(rune('a' + m.rng.IntN(4))) }

func (m *modelRun) keys(most int) []string {
	var out []string
	for _, i := range m.rng.Perm(30)[:1+m.rng.IntN(most)] {
		out = append(out, fmt.Sprint("k", i))
	}
	return out
}

// columns makes random columns; most are int64, so that some are refused.
func (m *modelRun) columns(rows int) []schema.Column {
	var out []schema.Column
	for _, i := range m.rng.Perm(4)[:m.rng.IntN(4)] {
		col := ragged(string(rune('a'+i)), make([]int64, rows)...)
		for k := range col.Lengths {
			col.Lengths[k] = int64(m.rng.IntN(3))
		}
		if m.rng.IntN(2) == 0 {
			col = columns(rows, schema.Int64, []int64{int64(m.rng.IntN(3))}, col.Field)[0]
		}
		if m.rng.IntN(12) == 0 {
			col.DType = schema.Float32
		}
		out = append(out, col)
	}
	return out
}

func (m *modelRun) tags(rows int) (raw [][]byte, plain []map[string]any) {
	plain = make([]map[string]any, rows)
	if m.rng.IntN(2) == 0 {
		return nil, plain
	}
	for i := range rows {
		plain[i] = map[string]any{fmt.Sprint("t", m.rng.IntN(3)): int8(m.rng.IntN(9))}
		raw = append(raw, pack(m.t, plain[i]))
	}
	return raw, plain
}

func (m *modelRun) writeKeys() {
	keys := m.keys(6)
	m.write(&Write{Partition: m.name(), Keys: keys}, len(keys))
}

func (m *modelRun) insert() {
	n := 1 + m.rng.IntN(4)
	m.write(&Write{Partition: m.name(), Insert: n}, n)
}

// overwrite writes known samples, one of which may be gone, in random order.
func (m *modelRun) overwrite() {
	name := m.name()
	p := m.parts[name]
	if p == nil || len(p.samples) == 0 {
		return
	}
	samples := m.some(p)
	if m.rng.IntN(5) == 0 {
		samples[0].Generation++
		_, err := m.c.Check(&Write{Partition: name, Samples: samples})
		require.Equal(m.t, tqerr.SampleGone, tqerr.CodeOf(err))
		return
	}
	m.write(&Write{Partition: name, Samples: samples, Update: m.rng.IntN(4) == 0}, len(samples))
}

func (m *modelRun) some(p *modelPartition) []schema.Sample {
	var all []schema.Sample
	for s := range p.samples {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b schema.Sample) int { return int(a.Index - b.Index) })
	m.rng.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	return all[:1+m.rng.IntN(min(5, len(all)))]
}

func (m *modelRun) write(w *Write, rows int) {
	w.Columns = m.columns(rows)
	raw, plain := m.tags(rows)
	w.Tags = raw
	want := m.refusal(w)
	units, err := m.c.Check(w)
	if err == nil {
		var rooms []Room
		for id := range uint32(3) {
			rooms = append(rooms, Room{Unit: id, Free: int64(m.rng.IntN(40)), Used: 0})
		}
		err = m.c.Place(units, "h", func(int) int64 { return 8 }, rooms)
	}
	var a *Applied
	if err == nil {
		a, err = m.c.Apply(w, units)
	}
	require.Equal(m.t, want, tqerr.CodeOf(err), "%v", err)
	if err == nil {
		m.record(w, a, units, plain)
	}
}

// refusal says how a write must end.
func (m *modelRun) refusal(w *Write) tqerr.Code {
	p := m.parts[w.Partition]
	written, fresh := map[*modelSample]bool{}, w.Insert
	for _, key := range w.Keys {
		if s := p.byKey(key); s != nil {
			written[s] = true
		} else {
			fresh++
		}
	}
	for _, s := range w.Samples {
		written[p.samples[s]] = true
	}
	for _, col := range w.Columns {
		for s := range written {
			if w.Update && s.shapes[col.Field] == nil {
				return tqerr.InvalidArgument
			}
		}
	}
	if p != nil {
		for _, col := range w.Columns {
			for _, s := range p.samples {
				if s.shapes[col.Field] != nil && !written[s] && p.types[col.Field] != col.DType {
					return tqerr.SchemaMismatch
				}
			}
		}
	}
	if fresh > 3*modelLimit-m.stored() {
		return tqerr.CapacityExceeded
	}
	return tqerr.OK
}

func (m *modelRun) stored() int {
	n := len(m.clearing)
	for _, p := range m.parts {
		n += len(p.samples)
	}
	return n
}

func (p *modelPartition) byKey(key string) *modelSample {
	if p == nil {
		return nil
	}
	for _, s := range p.samples {
		if s.key == key && key != "" {
			return s
		}
	}
	return nil
}

func (m *modelRun) record(w *Write, a *Applied, units []uint32, tags []map[string]any) {
	p := m.parts[w.Partition]
	if p == nil {
		p = &modelPartition{samples: map[schema.Sample]*modelSample{}, types: map[string]schema.DType{}}
		p.reserved = m.smallestFree(modelReserve)
		m.parts[w.Partition] = p
	}
	m.recordNew(w, p, a)
	for i, s := range a.Samples {
		row := p.samples[s]
		if row.shapes == nil {
			*row = modelSample{key: row.key, tags: map[string]any{}, shapes: map[string][]int64{}, consumed: map[string]bool{}, unit: units[i]}
		}
		for k, v := range tags[i] {
			row.tags[k] = v
		}
		for k := range w.Columns {
			row.shapes[w.Columns[k].Field] = slices.Clone(w.Columns[k].RowShape(i))
		}
	}
	for _, col := range w.Columns {
		p.types[col.Field] = col.DType
		if !slices.Contains(p.fields, col.Field) {
			p.fields = append(p.fields, col.Field)
		}
	}
}

// recordNew checks which indexes new samples got.
func (m *modelRun) recordNew(w *Write, p *modelPartition, a *Applied) {
	var got []int64
	for i, s := range a.Samples {
		if p.samples[s] != nil {
			if w.Keys != nil {
				require.Equal(m.t, w.Keys[i], p.samples[s].key)
			}
			continue
		}
		got = append(got, s.Index)
	}
	n := min(len(got), len(p.reserved))
	want := append(slices.Clone(p.reserved[:n]), m.smallestFree(len(got)-n)...)
	p.reserved = p.reserved[n:]
	slices.Sort(want)
	require.Equal(m.t, want, append([]int64{}, got...))
	for i, s := range a.Samples {
		if p.samples[s] == nil {
			require.False(m.t, m.given[s], "%v was another sample once", s)
			m.given[s] = true
			p.samples[s] = &modelSample{}
			p.born = append(p.born, s)
			if w.Keys != nil {
				p.samples[s].key = w.Keys[i]
				p.order = append(p.order, w.Keys[i])
			}
		}
	}
}

func (m *modelRun) smallestFree(n int) []int64 {
	used := map[int64]bool{}
	for s := range m.clearing {
		used[s.Index] = true
	}
	for _, p := range m.parts {
		for _, i := range p.reserved {
			used[i] = true
		}
		for s := range p.samples {
			used[s.Index] = true
		}
	}
	out := []int64{}
	for i := int64(0); len(out) < n; i++ {
		if !used[i] {
			out = append(out, i)
		}
	}
	return out
}

func (m *modelRun) fetch() {
	name, task, n := m.name(), fmt.Sprint("task", m.rng.IntN(2)), 1+m.rng.IntN(4)
	fields := []string{m.field(), m.field()}
	d, err := m.c.Fetch(FetchRequest{Partition: name, Fields: fields, N: n, Task: task}, &first{})
	require.NoError(m.t, err)
	var ready []int64
	rows := map[int64]*modelSample{}
	if p := m.parts[name]; p != nil {
		for s, row := range p.samples {
			if row.shapes[fields[0]] != nil && row.shapes[fields[1]] != nil && !row.consumed[task] {
				ready = append(ready, s.Index)
				rows[s.Index] = row
			}
		}
	}
	slices.Sort(ready)
	if len(ready) < n {
		require.Nil(m.t, d)
		return
	}
	require.Equal(m.t, ready[:n], indexes(d.Samples))
	for k, i := range ready[:n] {
		rows[i].consumed[task] = true
		for _, col := range d.Columns {
			require.Equal(m.t, rows[i].shapes[col.Field], col.RowShape(k))
		}
	}
}

// hide moves samples to the clearing ones and checks that a clear names exactly these.
func (m *modelRun) hide(name string, cl *Clearing, chosen map[schema.Sample]bool) {
	require.Len(m.t, cl.Samples, len(chosen))
	for i, s := range cl.Samples {
		require.True(m.t, chosen[s], "%v", s)
		if row := m.parts[name].samples[s]; row != nil {
			require.Equal(m.t, row.unit, cl.Units[i])
			m.forgetKey(m.parts[name], row.key)
			delete(m.parts[name].samples, s)
			m.clearing[s] = modelCleared{name, row.key}
		}
	}
	m.open = append(m.open, cl)
}

func (m *modelRun) forgetKey(p *modelPartition, key string) {
	p.order = slices.DeleteFunc(p.order, func(k string) bool { return k == key && key != "" })
}

func (m *modelRun) clearKeys() {
	name := m.name()
	keys, chosen := m.keys(4), map[schema.Sample]bool{}
	if p := m.parts[name]; p != nil {
		for s, row := range p.samples {
			if slices.Contains(keys, row.key) {
				chosen[s] = true
			}
		}
	}
	for s, was := range m.clearing { // what was started and not finished is found again
		if was.partition == name && slices.Contains(keys, was.key) {
			chosen[s] = true
		}
	}
	m.hide(name, m.c.StartClearKeys(name, keys), chosen)
}

func (m *modelRun) clearSamples() {
	name := m.name()
	p := m.parts[name]
	if p == nil || len(p.samples) == 0 {
		return
	}
	samples, chosen := m.some(p), map[schema.Sample]bool{}
	for _, s := range samples {
		chosen[s] = true
	}
	stale := schema.Sample{Index: samples[0].Index, Generation: samples[0].Generation + 1}
	m.hide(name, m.c.StartClearSamples(name, append(samples, stale, samples[0])), chosen)
}

func (m *modelRun) clearPartition() {
	if m.rng.IntN(4) > 0 {
		return
	}
	name := m.name()
	chosen := map[schema.Sample]bool{}
	if p := m.parts[name]; p != nil {
		for s := range p.samples {
			chosen[s] = true
		}
		p.fields = nil
	}
	for s, was := range m.clearing {
		if was.partition == name {
			chosen[s] = true
		}
	}
	m.hide(name, m.c.StartClearPartition(name), chosen)
}

// finish ends a clear that was started, perhaps twice, perhaps long ago; or forgets it, as when a unit failed.
func (m *modelRun) finish() {
	if len(m.open) == 0 {
		return
	}
	at := m.rng.IntN(len(m.open))
	cl := m.open[at]
	m.open = slices.Delete(m.open, at, at+1)
	if m.rng.IntN(6) == 0 {
		return
	}
	m.c.FinishClear(cl)
	for _, s := range cl.Samples {
		delete(m.clearing, s)
	}
	p := m.parts[cl.Partition]
	if !cl.whole || p == nil || len(p.samples) > 0 {
		return
	}
	for _, was := range m.clearing {
		if was.partition == cl.Partition {
			return
		}
	}
	delete(m.parts, cl.Partition)
}

func (m *modelRun) clearFields() {
	name, keys, field := m.name(), m.keys(4), m.field()
	cl := m.c.ClearFields(name, keys, nil, []string{field})
	n := 0
	if p := m.parts[name]; p != nil {
		for _, row := range p.samples {
			if slices.Contains(keys, row.key) && row.shapes[field] != nil {
				delete(row.shapes, field)
				n++
			}
		}
	}
	require.Len(m.t, cl.Samples, n)
	require.Len(m.t, cl.Events, n)
}

func (m *modelRun) reset() {
	name, task := m.name(), []string{"", "task0", "task1"}[m.rng.IntN(3)]
	require.Equal(m.t, m.parts[name] != nil, m.c.ResetConsumption(name, task))
	if p := m.parts[name]; p != nil {
		for _, row := range p.samples {
			if task == "" {
				clear(row.consumed)
			}
			delete(row.consumed, task)
		}
	}
}

func (m *modelRun) setTags() {
	name := m.name()
	p := m.parts[name]
	if p == nil || len(p.samples) == 0 {
		return
	}
	samples := m.some(p)
	raw, plain := m.tags(len(samples))
	if raw == nil {
		return
	}
	_, err := m.c.SetTags(name, samples, raw)
	require.NoError(m.t, err)
	for i, s := range samples {
		p.samples[s].tags = plain[i]
	}
}

// compare reads everything back.
func (m *modelRun) compare() {
	require.Len(m.t, m.c.Partitions(), len(m.parts))
	listed, err := m.c.List(ListFilter{})
	require.NoError(m.t, err)
	for _, l := range listed {
		p := m.parts[l.Name]
		require.Equal(m.t, append([]string{}, p.order...), l.Keys)
		for i, key := range l.Keys {
			var got map[string]any
			require.NoError(m.t, msgpack.Unmarshal(l.Tags[i], &got))
			require.Equal(m.t, p.byKey(key).tags, got)
		}
		m.compareBirths(l.Name, p)
		m.compareStatus(l.Name, p)
		m.compareRows(l.Name, p)
	}
}

func (m *modelRun) compareBirths(name string, p *modelPartition) {
	var want []int64
	for _, s := range p.born {
		if p.samples[s] != nil {
			want = append(want, s.Index)
		}
	}
	require.Equal(m.t, want, slices.Collect(m.c.ready(m.c.partitions[name], nil, "").Born()))
}

func (m *modelRun) compareStatus(name string, p *modelPartition) {
	owned := slices.Clone(p.reserved)
	rows := map[int64]*modelSample{}
	for s, row := range p.samples {
		owned = append(owned, s.Index)
		rows[s.Index] = row
	}
	slices.Sort(owned)
	status := m.c.Production(name, p.fields)
	if len(p.fields) == 0 {
		require.Nil(m.t, status)
	} else {
		require.Equal(m.t, append([]int64{}, owned...), status.Indexes)
		for k, i := range owned {
			for f, field := range p.fields {
				has := rows[i] != nil && rows[i].shapes[field] != nil
				require.Equal(m.t, has, status.Cells[k*len(p.fields)+f] == 1)
			}
		}
	}
	for _, task := range []string{"task0", "task1"} {
		for k, done := range m.c.Consumption(name, task).Cells {
			require.Equal(m.t, rows[owned[k]] != nil && rows[owned[k]].consumed[task], done == 1)
		}
	}
}

func (m *modelRun) compareRows(name string, p *modelPartition) {
	for s, row := range p.samples {
		sel, err := m.c.SelectSamples([]schema.Sample{s}, name, nil)
		require.NoError(m.t, err)
		require.Equal(m.t, []uint32{row.unit}, sel.Units)
		require.Len(m.t, sel.Fields, len(row.shapes))
		d, err := m.c.Describe(name, []schema.Sample{s}, nil)
		require.NoError(m.t, err)
		for _, col := range d.Columns {
			require.Equal(m.t, row.shapes[col.Field], col.RowShape(0))
			require.Equal(m.t, p.types[col.Field], col.DType)
		}
		if row.key != "" {
			byKey, err := m.c.SelectKeys(name, []string{row.key}, nil, false)
			if len(row.shapes) == 0 {
				require.Equal(m.t, tqerr.InvalidArgument, tqerr.CodeOf(err))
				continue
			}
			require.NoError(m.t, err)
			require.Equal(m.t, []schema.Sample{s}, byKey.Samples)
			require.Equal(m.t, sel.Fields, byKey.Fields)
		}
	}
}
