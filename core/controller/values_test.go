//go:build go1.25

package controller_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// stored is a column as a get returns it.
type stored struct {
	form    client.Form
	ragged  uint8
	dims    []int64
	offsets []int64
	data    []int64
	shared  uint64 // number of its offsets
}

func (u *user) columns(keys []string, flags client.Flags, fields ...string) map[string]stored {
	u.t.Helper()
	body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keys, Fields: fields, Views: flags&client.Views != 0, Inline: client.InlineLimit})
	require.NoError(u.t, err)
	r := u.start(&client.Request{Op: wire.OpGet, Flags: flags, Body: body}).wait()
	require.NoError(u.t, r.Err)
	out := map[string]stored{}
	for i := range r.Columns {
		c := &r.Columns[i]
		out[c.Column.Field] = stored{
			form: c.Form, ragged: c.Ragged, dims: append([]int64(nil), c.Dims...), offsets: append([]int64(nil), c.Offsets...),
			data: elements(append([]byte(nil), c.Data...)), shared: c.OffsetsID,
		}
		client.Release(c.Token)
		client.Release(c.OffsetsToken)
	}
	return out
}

// Every kind of column comes back as it was put, whether it travels inline or through unit memory, from one unit or from
// two, in the order asked for.
func TestColumnsComeBackAsTheyWere(t *testing.T) {
	for _, scale := range []int64{1, 4 << 10} {
		for _, units := range []int{1, 2} {
			t.Run(fmt.Sprintf("scale %d, units %d", scale, units), func(t *testing.T) {
				with(t, setup{units: units}, func(t *testing.T, s *system) {
					u := s.user()
					if units == 2 { // so that "a" and "b" lie apart
						u.put(s.rows(narrow, []string{"a"}, 1))
						u.put(s.rows(wide, []string{"b"}, 1))
						require.NotZero(t, s.units[1].Stats().Cells)
					}
					count := func(from, n int64) (out []int64) {
						for i := range n {
							out = append(out, from+i)
						}
						return out
					}
					two := s.mem.Ints([]int64{2, scale}, count(0, 4*scale)...)
					ragged := s.mem.Ragged(count(0, scale), count(100, 2*scale))
					second := s.mem.Ints([]int64{2, 3 * scale}, count(0, 12*scale)...)
					second.Ragged = 2
					b := batch{write: write{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"two", "ragged", "ragged2", "second", "scalar", "empty"}}}
					b.columns = []foreign.Raw{two, ragged, ragged, second, s.mem.Ints(nil, 5, 6), s.mem.Ints([]int64{0, 3})}
					u.put(b)

					for _, flags := range []client.Flags{0, client.Views} {
						got := u.columns([]string{"b", "a"}, flags)
						require.Equal(t, stored{form: client.Jagged, ragged: 1, dims: []int64{4, scale}, offsets: []int64{0, 2, 4}, shared: got["two"].shared,
							data: append(count(2*scale, 2*scale), count(0, 2*scale)...)}, got["two"])
						require.Equal(t, append(count(100, 2*scale), count(0, scale)...), got["ragged"].data)
						require.Equal(t, []int64{0, 2 * scale, 3 * scale}, got["ragged"].offsets)
						require.Equal(t, got["ragged"].shared, got["ragged2"].shared, "equal lengths share their offsets")
						require.NotEqual(t, got["ragged"].shared, got["two"].shared)
						require.EqualValues(t, 2, got["second"].ragged)
						require.Equal(t, []int64{2, 6 * scale}, got["second"].dims)
						require.Equal(t, append(append(count(6*scale, 3*scale), count(0, 3*scale)...), append(count(9*scale, 3*scale), count(3*scale, 3*scale)...)...), got["second"].data)
						require.Equal(t, stored{form: client.Dense, data: []int64{6, 5}}, got["scalar"])
						require.Equal(t, client.Jagged, got["empty"].form)
						require.Equal(t, []int64{0, 3}, got["empty"].dims)
					}
					dense := u.columns([]string{"b", "a", "b"}, client.DenseLayout, "two", "ragged")
					require.Equal(t, client.Dense, dense["two"].form)
					require.Equal(t, append(append(count(2*scale, 2*scale), count(0, 2*scale)...), count(2*scale, 2*scale)...), dense["two"].data)
					require.Equal(t, client.Jagged, dense["ragged"].form)
				})
			})
		}
	}
}

// Nothing, an empty value, and a value of no bytes are different things.
func TestEmptyIsNotAbsent(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		b := batch{write: write{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"none", "bytes"}}}
		b.columns = []foreign.Raw{s.mem.Ints([]int64{0}), s.mem.Objects(4, nil, []byte("x"))}
		u.put(b)
		u.put(s.rows(narrow, []string{"b"}, 1))
		got := u.get("a", "b")
		require.Equal(t, []string{"bytes", "none"}, got.names, "x is not common")
		require.Equal(t, [][]int64{{}, {}}, got.ints["none"])
		require.Equal(t, [][]byte{{}, []byte("x")}, got.bytes["bytes"])
		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"x"}, Strict: true}, 0)
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
		require.ErrorContains(t, err, `"x"`)
	})
}

// A put whose unit is full goes on by itself with copies: the caller may reuse its memory as soon as Start returns.
func TestAPutThatWaitsHasItsOwnCopy(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Hour}, func(t *testing.T, s *system) {
		u := full(t, s)
		mem := foreigntest.New(t, 1<<20)
		column := mem.Ints([]int64{wide}, fill(wide, 7)...)
		p := u.beginPut(batch{write: write{Partition: "p", Keys: []string{"new"}, Fields: []string{"x"}}, columns: []foreign.Raw{column}})
		clear(foreign.Bytes(uintptr(column.Base), wideBytes))
		u.clear("a")
		require.NoError(t, p.wait().Err)
		require.Equal(t, []int64{7}, u.values("new"))
	})
}

func TestAPutOfABadColumnFailsBeforeAnythingIsSent(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		for name, change := range map[string]func(b *batch){
			"no address":          func(b *batch) { b.columns[0].Base = 0 },
			"a negative size":     func(b *batch) { b.columns[0].Dims = foreigntest.Lend(s.mem, int64(-1)) },
			"an unknown dtype":    func(b *batch) { b.columns[0].DType = 250 },
			"a field too many":    func(b *batch) { b.Fields = append(b.Fields, "y") },
			"a column too many":   func(b *batch) { b.columns = append(b.columns, b.columns[0]) },
			"a kind of no column": func(b *batch) { b.columns[0].Kind = uint8(schema.Object) },
		} {
			b := s.rows(narrow, []string{"a"}, 1)
			change(&b)
			_, err := u.tryPut(b)
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
		}
		clients, _ := s.server.Clients()
		require.Zero(t, clients, "the server has heard nothing")
	})
}

// Tags that the client has itself are not sent back to it.
func TestABriefResultHasTheTagsThatDifferFromThoseSent(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		put := func(brief bool, tags ...[]byte) *wire.PutResult {
			return u.put(batch{write: write{Partition: "p", Keys: []string{"a", "b"}[:len(tags)], Tags: tags, Brief: brief}})
		}
		x, y, both := []byte{0x81, 0xa1, 'x', 1}, []byte{0x81, 0xa1, 'y', 2}, []byte{0x82, 0xa1, 'x', 1, 0xa1, 'y', 2}
		for range 2 {
			first := put(true, x, y)
			require.True(t, first.AsSent)
			require.Nil(t, first.Tags)
		}
		plain := put(false, x, y)
		require.False(t, plain.AsSent)
		require.Equal(t, wire.List{x, y}, plain.Tags)
		merged := put(true, y, y)
		require.False(t, merged.AsSent)
		require.Equal(t, wire.List{both, y}, merged.Tags)
		twice := put(true, []byte{0x82, 0xa1, 'z', 1, 0xa1, 'z', 2})
		require.False(t, twice.AsSent)
	})
}
