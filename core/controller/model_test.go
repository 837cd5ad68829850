//go:build go1.25

package controller_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Several clients work at random in one partition over a network that loses, repeats and cuts, in units that are too small
// for all of them. Each has keys and fields of its own, and keeps maps of what it has written; that is what it must read.

type modelRow struct {
	x        []int64 // nil: not written
	y        []byte
	tag      byte // 0: none
	consumed bool
}

type modelUser struct {
	*user
	rng  *rand.Rand
	mem  *foreigntest.Memory
	name string
	keys map[string]*modelRow
	bare map[schema.Sample]*modelRow // without a key
	full int                         // writes that found no room
}

func TestRandomOperationsAgainstANaiveModel(t *testing.T) {
	againstAModel(t, 3, 4, setup{units: 3, limit: 12 << 10, putWait: 5 * time.Second}, func(_ *system, full int) {
		require.Positive(t, full, "the units are too small for all")
	})
}

// The same with disks below memory that is so small that cells move all the time, and disks that are full now and then.
func TestRandomOperationsOverTiersAgainstANaiveModel(t *testing.T) {
	for name, disk := range map[string]unit.Disk{"spill": {}, "threshold": {Threshold: 2000}, "a small disk": {Threshold: 2000, Limit: 48 << 10}} {
		t.Run(name, func(t *testing.T) {
			o := setup{units: 2, limit: 8 << 10, putWait: 5 * time.Second, disk: &disk}
			againstAModel(t, 1, 8, o, func(s *system, full int) {
				moved, limited := int64(0), disk.Limit > 0
				for _, u := range s.units {
					moved += u.Counters().SpilledCells
				}
				require.Positive(t, moved, "memory is too small for all")
				require.True(t, full > 0 || !limited, "the disk is too small for all")
			})
		})
	}
}

// againstAModel lets users do random things, over a network that fails, and compares all that they see.
func againstAModel(t *testing.T, rounds uint64, count int, o setup, check func(s *system, full int)) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	for round := range rounds {
		with(t, o, func(t *testing.T, s *system) {
			s.python(sums)
			s.python(sums)
			for _, do := range []memnet.Action{memnet.DropReply, memnet.DropRequest, memnet.Duplicate, memnet.DelayRequest, memnet.DelayReply,
				memnet.CutBefore, memnet.CutAfter} {
				remove := s.net.Inject(memnet.Fault{Do: do, Delay: 200 * time.Millisecond, Grace: time.Hour, Chance: 0.01})
				defer remove()
			}
			users := make([]*modelUser, count)
			for i := range users {
				users[i] = &modelUser{
					user: s.user(resending, redialing), rng: rand.New(rand.NewPCG(seed, round<<8|uint64(i))), name: fmt.Sprintf("u%d", i),
					mem: foreigntest.New(t, 1<<20), keys: map[string]*modelRow{}, bare: map[schema.Sample]*modelRow{},
				}
			}
			var all sync.WaitGroup
			for _, u := range users {
				all.Go(func() {
					for range 150 {
						u.step()
						u.mem.Reset()
					}
				})
			}
			if o.drains {
				stop, ended := make(chan struct{}), make(chan int)
				go func() {
					rng := rand.New(rand.NewPCG(seed, round<<8|255))
					ended <- s.user(resending, redialing).drainAtRandom(rng, stop)
				}()
				all.Wait()
				close(stop)
				require.Positive(t, <-ended, "some drains succeed")
			}
			all.Wait()
			waited := 0
			for _, u := range users {
				u.compare()
				waited += u.full
			}
			s.check()
			check(s, waited)
			defer time.Sleep(2 * time.Hour) // clients that were cut off are given up
		})
	}
}

func (u *modelUser) step() {
	steps := []func(){u.write, u.write, u.write, u.update, u.update, u.insert, u.overwrite, u.clearKeys, u.clearFields, u.clearSamples,
		u.tags, u.fetchSome, u.reset, u.read, u.read, u.list}
	steps[u.rng.IntN(len(steps))]()
}

// ok reports whether a write has happened; one that found no room has not, and neither has one whose time was over before its
// unit had answered, or its values were on disk: to the server the time of a request is that until the client sends it again.
func (u *modelUser) ok(err error) bool {
	if tqerr.CodeOf(err) == tqerr.DeadlineExceeded && (len(u.s.hosts) > 0 || u.s.folder != "") {
		return false
	}
	if tqerr.CodeOf(err) == tqerr.ResourceExhausted {
		u.full++
		return false
	}
	if err != nil {
		u.t.Errorf("%s: %s", u.name, err)
	}
	return err == nil
}

func (u *modelUser) someKeys() []string {
	var out []string
	for _, i := range u.rng.Perm(6)[:1+u.rng.IntN(4)] {
		out = append(out, fmt.Sprintf("%s/%d", u.name, i))
	}
	return out
}

// value makes a tensor row; lengths repeat often, so that columns are uniform now and then.
func (u *modelUser) value() []int64 {
	out := make([]int64, []int{0, 1, 3, 3, 3, 200, 700}[u.rng.IntN(7)])
	for i := range out {
		out[i] = u.rng.Int64N(1000)
	}
	return out
}

func (u *modelUser) object() []byte {
	return bytes.Repeat([]byte{byte(u.rng.Uint32())}, []int{0, 1, 40, 3000}[u.rng.IntN(4)])
}

// columns makes new values for n rows: of x, of y, or of both. apply puts them into the model.
func (u *modelUser) columns(b *batch, n int) (apply func(rows []*modelRow)) {
	which := 1 + u.rng.IntN(3)
	xs, ys := make([][]int64, n), make([][]byte, n)
	for i := range n {
		xs[i], ys[i] = u.value(), u.object()
	}
	if u.rng.IntN(3) == 0 { // some are alike, and stored once
		for i := range n {
			k := u.rng.IntN(i + 1)
			xs[i], ys[i] = xs[k], ys[k]
		}
		b.Dedup = []wire.Strings{nil, {"x" + u.name}, {"y" + u.name}, {"x" + u.name, "y" + u.name}}[which]
	}
	if which&1 != 0 {
		b.Fields, b.columns = append(b.Fields, "x"+u.name), append(b.columns, u.mem.Ragged(xs...))
	}
	if which&2 != 0 {
		b.Fields, b.columns = append(b.Fields, "y"+u.name), append(b.columns, u.mem.Objects(3, ys...))
	}
	return func(rows []*modelRow) {
		for i, r := range rows {
			if which&1 != 0 {
				r.x = xs[i]
			}
			if which&2 != 0 {
				r.y = ys[i]
			}
		}
	}
}

func (u *modelUser) row(key string) *modelRow {
	if u.keys[key] == nil {
		u.keys[key] = &modelRow{}
	}
	return u.keys[key]
}

func (u *modelUser) write() {
	b := batch{write: write{Partition: "p", Keys: u.someKeys()}}
	apply := u.columns(&b, len(b.Keys))
	if _, err := u.tryPut(b); u.ok(err) {
		var rows []*modelRow
		for _, key := range b.Keys {
			rows = append(rows, u.row(key))
		}
		apply(rows)
	}
}

func (u *modelUser) tags() {
	b := batch{write: write{Partition: "p", Keys: u.someKeys()}}
	tag := byte(1 + u.rng.IntN(100))
	for range b.Keys {
		b.Tags = append(b.Tags, []byte{0x81, 0xa1, 't', tag})
	}
	if _, err := u.tryPut(b); u.ok(err) {
		for _, key := range b.Keys {
			u.row(key).tag = tag
		}
	}
}

// update merges into x, which must exist for all keys.
func (u *modelUser) update() {
	keys := u.someKeys()
	b := batch{write: write{Partition: "p", Keys: keys, Fields: []string{"x" + u.name}, Update: true}}
	known, have := true, true
	var added, want [][]int64
	how := []string{"add", "concat", "replace", "callable"}[u.rng.IntN(4)]
	for _, key := range keys {
		r := u.keys[key]
		if known = known && r != nil; !known {
			have = false
			break
		}
		have = have && r.x != nil
		value := u.value()
		if how == "add" || how == "callable" {
			value = make([]int64, len(r.x))
			for i := range value {
				value[i] = u.rng.Int64N(9)
			}
		}
		result := value
		switch how {
		case "concat":
			result = append(slices.Clone(r.x), value...)
		case "add", "callable":
			result = make([]int64, len(value))
			for i := range value {
				result[i] = r.x[i] + value[i]
			}
		}
		added, want = append(added, value), append(want, result)
	}
	if !have {
		added = make([][]int64, len(keys))
	}
	b.columns = []foreign.Raw{u.mem.Ragged(added...)}
	if how == "callable" {
		b.Callable = []byte("sum")
	} else {
		b.Merge = how
	}
	_, err := u.tryPut(b)
	switch {
	case !known:
		u.refused(err, tqerr.NotFound)
	case !have:
		u.refused(err, tqerr.InvalidArgument)
	case u.ok(err):
		for i, key := range keys {
			u.keys[key].x = want[i]
		}
	}
}

func (u *modelUser) refused(err error, code tqerr.Code) {
	if tqerr.CodeOf(err) != code {
		u.t.Errorf("%s: %v, want %s", u.name, err, code)
	}
}

func (u *modelUser) insert() {
	b := batch{write: write{Partition: "p", Insert: 1 + u.rng.IntN(3)}}
	apply := u.columns(&b, b.Insert)
	result, err := u.tryPut(b)
	if !u.ok(err) {
		return
	}
	var rows []*modelRow
	for i, index := range result.Indexes {
		sample := schema.Sample{Index: index, Generation: uint32(result.Generations[i])}
		if u.bare[sample] != nil {
			u.t.Errorf("%s: sample %v was given out twice", u.name, sample)
		}
		u.bare[sample] = &modelRow{}
		rows = append(rows, u.bare[sample])
	}
	apply(rows)
}

// someSamples picks samples without a key.
func (u *modelUser) someSamples() (list []schema.Sample, names wire.Samples) {
	list = slices.SortedFunc(maps.Keys(u.bare), func(a, b schema.Sample) int { return int(a.Index - b.Index) })
	u.rng.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	list = list[:min(len(list), 1+u.rng.IntN(3))]
	for _, s := range list {
		names.Indexes, names.Generations = append(names.Indexes, s.Index), append(names.Generations, int64(s.Generation))
	}
	return list, names
}

func (u *modelUser) overwrite() {
	list, names := u.someSamples()
	if len(list) == 0 {
		return
	}
	b := batch{write: write{Partition: "p", Samples: &names}}
	apply := u.columns(&b, len(list))
	if _, err := u.tryPut(b); u.ok(err) {
		var rows []*modelRow
		for _, s := range list {
			rows = append(rows, u.bare[s])
		}
		apply(rows)
	}
}

func (u *modelUser) clearKeys() {
	keys := append(u.someKeys(), u.someKeys()...)
	u.ok(u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys}, nil))
	for _, key := range keys {
		delete(u.keys, key)
	}
}

func (u *modelUser) clearSamples() {
	list, names := u.someSamples()
	u.ok(u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Samples: &names}, nil))
	for _, s := range list {
		delete(u.bare, s)
	}
}

func (u *modelUser) clearFields() {
	keys := u.someKeys()
	u.ok(u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys, Fields: []string{"x" + u.name, "nothing"}}, nil))
	for _, key := range keys {
		if u.keys[key] != nil {
			u.keys[key].x = nil
		}
	}
}

// ready counts what the user's task may fetch.
func (u *modelUser) ready() (n int) {
	for _, r := range slices.Concat(slices.Collect(maps.Values(u.keys)), slices.Collect(maps.Values(u.bare))) {
		if r.x != nil && !r.consumed {
			n++
		}
	}
	return n
}

func (u *modelUser) fetchSome() {
	n := 1 + u.rng.IntN(4)
	ready := u.ready()
	p := u.begin(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x" + u.name}, BatchSize: n, Task: u.name}, time.Second)
	var meta wire.MetaReply
	err := decode(p.wait(), &meta)
	if ready < n {
		u.refused(err, tqerr.DeadlineExceeded)
		return
	}
	if !u.ok(err) || len(meta.Indexes) != n {
		u.t.Errorf("%s: %d samples, want %d", u.name, len(meta.Indexes), n)
		return
	}
	var keys wire.KeysReply
	u.ok(u.try(wire.OpRetrieveKeys, &wire.IndexesRequest{Partition: "p", Indexes: meta.Indexes}, &keys))
	for i, index := range meta.Indexes {
		r := u.bare[schema.Sample{Index: index, Generation: uint32(meta.Generations[i])}]
		if keys.Known[i] == 1 {
			r = u.keys[keys.Keys[i]]
		}
		if r == nil || r.x == nil || r.consumed {
			u.t.Errorf("%s: fetched sample %d is %+v", u.name, index, r)
			return
		}
		r.consumed = true
	}
}

func (u *modelUser) reset() {
	u.ok(u.try(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: u.name}, nil))
	for _, r := range u.keys {
		r.consumed = false
	}
	for _, r := range u.bare {
		r.consumed = false
	}
}

// read reads a few keys, some of them twice, and compares.
func (u *modelUser) read() {
	keys := append(u.someKeys(), u.someKeys()...)
	flags := client.Flags(u.rng.IntN(4))
	got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: keys}, flags)
	var rows []*modelRow
	for _, key := range keys {
		if r := u.keys[key]; r != nil {
			rows = append(rows, r)
		}
	}
	if len(rows) == 0 {
		u.refused(err, tqerr.NotFound)
		return
	}
	u.same(got, err, rows)
}

// same checks what was read of rows: the fields that all of them have, or an error when there is none.
func (u *modelUser) same(got *read, err error, rows []*modelRow) {
	all := func(has func(*modelRow) bool) bool {
		return !slices.ContainsFunc(rows, func(r *modelRow) bool { return !has(r) })
	}
	var want []string
	if all(func(r *modelRow) bool { return r.x != nil }) {
		want = append(want, "x"+u.name)
	}
	if all(func(r *modelRow) bool { return r.y != nil }) {
		want = append(want, "y"+u.name)
	}
	if want == nil {
		u.refused(err, tqerr.InvalidArgument)
		return
	}
	if !u.ok(err) {
		return
	}
	if !slices.Equal(got.names, want) {
		u.t.Errorf("%s: fields %v, want %v", u.name, got.names, want)
		return
	}
	for i, r := range rows {
		if slices.Contains(want, "x"+u.name) && !slices.Equal(got.ints["x"+u.name][i], r.x) {
			u.t.Errorf("%s: row %d: x is another value", u.name, i)
		}
		if slices.Contains(want, "y"+u.name) && !bytes.Equal(got.bytes["y"+u.name][i], r.y) {
			u.t.Errorf("%s: row %d: y is another value", u.name, i)
		}
	}
}

func (u *modelUser) list() {
	var reply wire.ListReply
	p := "p"
	u.ok(u.try(wire.OpList, &wire.ListRequest{Partition: &p, Prefix: u.name + "/"}, &reply))
	got := map[string]byte{}
	for _, l := range reply.Partitions {
		for i, key := range l.Keys {
			got[key] = l.Tags[i][len(l.Tags[i])-1] &^ 0x80
		}
	}
	want := map[string]byte{}
	for key, r := range u.keys {
		want[key] = r.tag
	}
	if !maps.Equal(got, want) {
		u.t.Errorf("%s: keys and tags %v, want %v", u.name, got, want)
	}
}

// compare reads everything.
func (u *modelUser) compare() {
	u.list()
	for key, r := range u.keys {
		got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}}, 0)
		u.same(got, err, []*modelRow{r})
	}
	for s, r := range u.bare {
		got, err := u.tryGet(&wire.GetRequest{Partition: "p", Samples: &wire.Samples{Indexes: wire.Ints{s.Index}, Generations: wire.Ints{int64(s.Generation)}}}, 0)
		u.same(got, err, []*modelRow{r})
	}
	for range 5 {
		u.fetchSome()
	}
}
