package session_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/wire"
)

// bench opens an owner and an attached session in this process: the one talks to the server by calls, the other over the
// unix socket. The unit is here, but that of "unit" is a process of its own, behind an owner that is one.
func bench(b *testing.B) map[string]*session.Session {
	b.Helper()
	cfg := &session.Config{Mode: "auto", Dir: b.TempDir(), Namespace: "n", TimeoutMS: 5000}
	out := map[string]*session.Session{}
	for _, name := range []string{"inproc", "local"} {
		s, err := session.Open(context.Background(), cfg)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close(time.Second)) })
		out[name] = s
	}
	cfg = &session.Config{Mode: "own", Dir: cfg.Dir, Namespace: "u", TimeoutMS: 5000, Units: -1}
	s, err := session.Open(context.Background(), cfg)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close(time.Second)) })
	unit := spawn(b, &session.Config{Mode: "unit", Dir: cfg.Dir, Namespace: "u", Name: "unit-0"})()
	require.NoError(b, join(s, unit))
	out["unit"] = s
	return out
}

// caller does one request after the other and waits for each as a Python thread does.
type caller struct {
	b    *testing.B
	s    *session.Session
	done chan *client.Result
}

func (c *caller) do(req *client.Request) *client.Result {
	if _, err := c.s.Client.Start(req, func(r *client.Result) { c.done <- r }); err != nil {
		c.b.Fatal(err)
	}
	r := <-c.done
	if r.Err != nil {
		c.b.Fatal(r.Err)
	}
	return r
}

func marshal(b *testing.B, v any) []byte {
	b.Helper()
	body, err := wire.Marshal(v)
	require.NoError(b, err)
	return body
}

type putBody struct {
	Partition string
	Keys      wire.Strings
	Samples   *wire.Samples
	Insert    int
	Fields    wire.Strings
	Tags      wire.List
	Update    bool
	Merge     string
	Callable  []byte
	Last      bool
	Dedup     wire.Strings
}

// requests are a put of rows times fields of float64 elements, the same as an update, and a get of them.
func requests(b *testing.B, partition string, rows, fields int, elements int64) (put, update, get *client.Request, size int64) {
	mem := foreigntest.New(b, 64<<20)
	names, keys := make(wire.Strings, fields), make(wire.Strings, rows)
	for i := range keys {
		keys[i] = fmt.Sprintf("key-%d", i)
	}
	var columns []foreign.Raw
	values := make([]int64, int64(rows)*elements)
	for i := range names {
		names[i] = fmt.Sprintf("field-%d", i)
		columns = append(columns, mem.Ints([]int64{elements}, values...))
		size += int64(len(values)) * 8
	}
	body := putBody{Partition: partition, Keys: keys, Fields: names}
	put = &client.Request{Op: wire.OpPut, Body: marshal(b, &body), Columns: columns, Rows: rows}
	body.Update, body.Merge = true, "add"
	update = &client.Request{Op: wire.OpPut, Body: marshal(b, &body), Columns: columns, Rows: rows}
	get = &client.Request{Op: wire.OpGet, Body: marshal(b, &wire.GetRequest{Partition: partition, Keys: keys, Inline: client.InlineLimit})}
	return put, update, get, size
}

func BenchmarkRequests(b *testing.B) {
	shapes := []struct {
		name         string
		rows, fields int
		elements     int64
	}{
		{"row", 1, 1, 8},           // the smallest there is: 64 bytes
		{"batch", 1024, 8, 1},      // descriptions and keys, hardly any bytes: 64 KiB, inline
		{"staged", 1024, 8, 2},     // the same through unit memory: 128 KiB
		{"large", 1, 1, 1 << 17},   // 1 MiB
		{"dense", 1024, 8, 1 << 9}, // 32 MiB
	}
	for transport, s := range bench(b) {
		for _, shape := range shapes {
			put, update, get, size := requests(b, transport+shape.name, shape.rows, shape.fields, shape.elements)
			c := &caller{b: b, s: s, done: make(chan *client.Result, 1)}
			run := func(name string, do func()) {
				b.Run(fmt.Sprintf("%s/%s/%s", transport, shape.name, name), func(b *testing.B) {
					c.b = b
					c.do(put)
					b.SetBytes(size)
					b.ReportAllocs()
					for b.Loop() {
						do()
					}
				})
			}
			run("put", func() { c.do(put) })
			run("update", func() { c.do(update) })
			run("get", func() {
				r := c.do(get)
				for i := range r.Columns {
					client.Release(r.Columns[i].Token)
					client.Release(r.Columns[i].OffsetsToken)
				}
			})
		}
	}
}
