//go:build go1.25

package controller_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

const wideBytes = wide * 8

// spread stores "a" on one unit and the larger "b" on another, each with fields x and y, and tags on "a".
func (s *system) spread(t *testing.T) *user {
	t.Helper()
	u := s.user()
	for i, key := range []string{"a", "b"} {
		row := make([]int64, wide*(1+2*i))
		for k := range row {
			row[k] = int64(k + i)
		}
		b := batch{write: write{Partition: "p", Keys: []string{key}, Fields: []string{"x", "y"}}}
		b.columns = []foreign.Raw{s.mem.Ints([]int64{int64(len(row))}, row...), s.mem.Objects(1, []byte(key))}
		u.put(b)
	}
	u.put(batch{write: write{Partition: "p", Keys: []string{"a"}, Tags: wire.List{[]byte("\x81\xa1t\x01")}}})
	require.Positive(t, s.units[0].Stats().Cells)
	require.Positive(t, s.units[1].Stats().Cells)
	u.fetch("task", 1, 0).indexes(t)
	return u
}

func (s *system) both(column foreign.Raw) batch {
	return batch{write: write{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"x"}}, columns: []foreign.Raw{column}}
}

// longer is a value for "a" and one for "b", the latter n times as long as the first.
func (s *system) longer(n int) foreign.Raw {
	return s.mem.Ragged(make([]int64, wide), make([]int64, n*wide))
}

func TestAFailedWriteChangesNothing(t *testing.T) {
	// The limit leaves room for another "a" and not for another "b" of the same size.
	const limit = 5 * wideBytes
	cases := map[string]struct {
		make func(s *system) batch
		code tqerr.Code
		text string
	}{
		"no memory on one unit": {func(s *system) batch { return s.both(s.longer(3)) }, tqerr.ResourceExhausted, "used"},
		"no memory for a new key beside": {func(s *system) batch {
			b := s.both(s.mem.Ragged(make([]int64, wide), make([]int64, 3*wide), make([]int64, 10)))
			b.Keys = append(b.Keys, "c")
			b.Tags = wire.List{[]byte("\x80"), []byte("\x80"), []byte("\x81\xa1t\x02")}
			return b
		}, tqerr.ResourceExhausted, "used"},
		"another dtype": {func(s *system) batch {
			c := s.longer(1)
			c.DType = uint8(schema.Float64)
			b := s.both(c)
			b.Keys[1] = "new"
			return b
		}, tqerr.SchemaMismatch, `field "x"`},
		"tensor to object": {func(s *system) batch {
			b := s.both(s.mem.Objects(1, []byte("1"), []byte("2")))
			b.Keys[1] = "new"
			return b
		}, tqerr.SchemaMismatch, `field "x"`},
		"second field of another kind": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Fields, b.columns = []string{"x", "y"}, append(b.columns, s.same(1, 1, 2))
			b.Keys[1] = "new"
			return b
		}, tqerr.SchemaMismatch, `field "y"`},
		"duplicate keys":  {func(s *system) batch { b := s.both(s.longer(1)); b.Keys[1] = "a"; return b }, tqerr.InvalidArgument, `"a"`},
		"duplicate field": {func(s *system) batch { b := s.both(s.longer(1)); return twice(b) }, tqerr.InvalidArgument, `"x"`},
		"no keys":         {func(s *system) batch { b := s.both(s.longer(1)); b.Keys = nil; return b }, tqerr.InvalidArgument, ""},
		"tags of another number": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Tags = wire.List{[]byte("\x80")}
			return b
		}, tqerr.InvalidArgument, "tags"},
		"a sample that was cleared": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Keys, b.Samples = nil, &wire.Samples{Indexes: wire.Ints{0, 1}, Generations: wire.Ints{1, 7}}
			return b
		}, tqerr.SampleGone, ""},
		"update of an unknown key": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Update, b.Merge, b.Keys[1] = true, "replace", "c"
			return b
		}, tqerr.NotFound, `"c"`},
		"update of an unknown field": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Update, b.Merge, b.Fields[0] = true, "replace", "z"
			return b
		}, tqerr.InvalidArgument, `"z"`},
		"update of an unknown partition": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Update, b.Merge, b.Partition = true, "replace", "q"
			return b
		}, tqerr.NotFound, `"q"`},
		"merge of an unknown name": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Update, b.Merge = true, "divide"
			return b
		}, tqerr.InvalidArgument, `"divide"`},
		"native merge fails for one row": {func(s *system) batch {
			b := s.both(s.longer(1))
			b.Update, b.Merge = true, "add"
			return b
		}, tqerr.Failed, `"b"`},
		"native merge of another dtype": {func(s *system) batch {
			c := s.mem.Ragged([]int64{1}, []int64{1, 2})
			c.DType = uint8(schema.Float64)
			b := s.both(c)
			b.Update, b.Merge = true, "replace"
			return b
		}, tqerr.Failed, "keep dtype"},
		"no memory for a merged row": {func(s *system) batch {
			b := s.both(s.mem.Ragged([]int64{1}, []int64{1}))
			b.Update, b.Merge = true, "concat"
			return b
		}, tqerr.ResourceExhausted, "used"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 2, limit: limit}, func(t *testing.T, s *system) {
				u := s.spread(t)
				err := s.unchanged(t, func() error {
					_, err := u.tryPut(c.make(s))
					return err
				})
				require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
				require.ErrorContains(t, err, "put")
				require.ErrorContains(t, err, c.text)
			})
		})
	}
}

func twice(b batch) batch {
	b.Fields, b.columns = append(b.Fields, b.Fields...), append(b.columns, b.columns...)
	return b
}

// A callable that fails on the second unit, after the first has staged its result.
func TestAFailedCallableChangesNothing(t *testing.T) {
	type work = func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error)
	same := func(job *jobs.Job, mem *foreigntest.Memory) foreign.Raw {
		return mem.Ints(job.Columns[0].Column.Shape, elements(job.Columns[0].Bytes)...)
	}
	cases := map[string]struct {
		onB  work
		code tqerr.Code
		text string
	}{
		"it raises": {func(*jobs.Job, *foreigntest.Memory) ([]foreign.Raw, error) {
			return nil, tqerr.New(tqerr.Failed, "ValueError: no")
		}, tqerr.Failed, "ValueError: no"},
		"another dtype": {func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			c := same(job, mem)
			c.DType = uint8(schema.Float64)
			return []foreign.Raw{c}, nil
		}, tqerr.Failed, "keep dtype"},
		"an object": {func(_ *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			return []foreign.Raw{mem.Objects(1, []byte("?"))}, nil
		}, tqerr.Failed, "must remain tensor"},
		"no column": {func(*jobs.Job, *foreigntest.Memory) ([]foreign.Raw, error) { return nil, nil }, tqerr.Internal, "columns"},
		"two columns": {func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			return []foreign.Raw{same(job, mem), same(job, mem)}, nil
		}, tqerr.Internal, "columns"},
		"a column that cannot be": {func(_ *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			return []foreign.Raw{mem.Ints([]int64{-1})}, nil
		}, tqerr.InvalidArgument, "negative"},
		"it is too large": {func(_ *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			return []foreign.Raw{mem.Ints([]int64{6 * wide}, make([]int64, 6*wide)...)}, nil
		}, tqerr.ResourceExhausted, "used"},
	}
	for name, c := range cases {
		for _, size := range []int{narrow, wide} {
			t.Run(name, func(t *testing.T) {
				with(t, setup{units: 2, limit: 6 * wideBytes}, func(t *testing.T, s *system) {
					s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
						if slices.Contains(job.Keys, "b") {
							return c.onB(job, mem)
						}
						return []foreign.Raw{same(job, mem)}, nil
					})
					u := s.spread(t)
					err := s.unchanged(t, func() error {
						b := s.both(s.same(size, 1, 1))
						b.Update, b.Callable = true, []byte("f")
						_, err := u.tryPut(b)
						return err
					})
					require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
					require.ErrorContains(t, err, c.text)
				})
			})
		}
	}
}

// Results with another number of rows than the job has.
func TestACallableWithTooFewRowsChangesNothing(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		go func() {
			job, err := s.jobs.Next(0)
			for tqerr.CodeOf(err) == tqerr.DeadlineExceeded {
				job, err = s.jobs.Next(1)
			}
			s.giveBack(job, []foreign.Raw{s.mem.Ints([]int64{narrow}, 1, 1, 1, 1)}, 1)
		}()
		b := s.add(narrow, []string{"a", "b"}, 1, 1)
		b.Merge, b.Callable = "", []byte("f")
		_, err := u.tryPut(b)
		require.ErrorContains(t, err, "1 result rows of 2")
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

func TestAParserThatRaisesStoresNothing(t *testing.T) {
	for _, size := range []int{narrow, wide} {
		with(t, setup{units: 2}, func(t *testing.T, s *system) {
			s.python(func(*jobs.Job, *foreigntest.Memory) ([]foreign.Raw, error) {
				return nil, tqerr.New(tqerr.Failed, "data_parser must return a dict")
			})
			u := s.spread(t)
			err := s.unchanged(t, func() error {
				b := s.both(s.same(size, 1, 1))
				b.Keys, b.Callable = []string{"b", "c"}, []byte("f")
				_, err := u.tryPut(b)
				return err
			})
			require.Equal(t, tqerr.Failed, tqerr.CodeOf(err))
		})
	}
}

// An update that works changes what it should and nothing else, also when its rows lie on two units.
func TestAnUpdateOverUnits(t *testing.T) {
	for _, how := range []string{"concat", "callable"} {
		t.Run(how, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
					old, added := elements(job.Columns[0].Bytes), elements(job.Columns[1].Bytes)
					return []foreign.Raw{mem.Ints([]int64{int64(len(old) + len(added))}, append(old, added...)...)}, nil
				})
				u := s.spread(t)
				before := s.dump()
				b := s.both(s.mem.Ragged([]int64{7}, []int64{8, 9}))
				b.Keys = []string{"b", "a"}
				b.Update = true
				if how == "concat" {
					b.Merge = how
				} else {
					b.Callable = []byte("f")
				}
				result := u.put(b)
				require.Equal(t, wire.Ints{1, 0}, result.Indexes)
				require.Equal(t, wire.Strings{"x", "y"}, result.Fields)
				column := schema.Column(result.Columns[0])
				require.Equal(t, []int64{3*wide + 1}, column.RowShape(0))
				require.Equal(t, []int64{wide + 2}, column.RowShape(1))

				after := s.dump()
				want := before.cells
				want["p/b"]["x"] = append(want["p/b"]["x"], 7)
				want["p/a"]["x"] = append(want["p/a"]["x"], 8, 9)
				require.Equal(t, want, after.cells)
				require.Equal(t, before.list, after.list)
				require.Equal(t, before.status, after.status)
				require.Equal(t, before.stats.MemoryUsed+3*8, after.stats.MemoryUsed)
			})
		})
	}
}
