//go:build zmq

package session_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/wire"
)

// BenchmarkRemote does the requests of the targets in turns, so that what else the machine does hits all of them: 256 MiB
// dense beside a plain stream, one row, and 1024 rows of a kilobyte.
func BenchmarkRemote(b *testing.B) {
	for name, elsewhere := range map[string]bool{"units here": false, "units elsewhere": true} {
		b.Run(name, func(b *testing.B) { benchmarkRemote(b, elsewhere, "token") })
	}
	b.Run("units here, curve", func(b *testing.B) { benchmarkRemote(b, false, "curve") })
}

func benchmarkRemote(b *testing.B, elsewhere bool, security string) {
	cfg := &session.Config{
		Mode: "own", Dir: b.TempDir(), Namespace: "n", TimeoutMS: 5000, Units: 2, Listen: "tcp://127.0.0.1:0", Token: token,
		Security: security, KeyFile: filepath.Join(b.TempDir(), "key"),
	}
	var units []*process
	if elsewhere {
		first, second := spawn(b, asUnit(cfg, "unit-a")), spawn(b, asUnit(cfg, "unit-b"))
		cfg.Units, units = -1, []*process{first(), second()}
	}
	owner, err := session.Open(context.Background(), cfg)
	require.NoError(b, err)
	require.NoError(b, join(owner, units...))
	b.Cleanup(func() { require.NoError(b, owner.Close(time.Second)) })
	given := zmq.Credentials{Token: token, Key: owner.Info.Key}
	s, err := session.Open(context.Background(), &session.Config{Address: owner.Info.Address, Token: given.Text(), TimeoutMS: 5000})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close(time.Second)) })
	c := &caller{b: b, s: s, done: make(chan *client.Result, 1)}
	var others []int
	for _, u := range units {
		others = append(others, u.cmd.Process.Pid)
	}
	benchmarkDense(b, c, others)
	for _, shape := range []struct {
		name string
		rows int
		row  int64 // elements
	}{{"row", 1, 8}, {"1024x1KiB", 1024, 128}} {
		b.Run(shape.name, func(b *testing.B) {
			c.b = b
			put, get := remoteRequests(b, shape.name, shape.rows, shape.row)
			read := func() { c.release(c.do(get)) }
			steps := map[string]func(){"put": func() { c.do(put) }, "get": read}
			spent := map[string][]time.Duration{}
			for range 3 {
				c.do(put)
				read()
			}
			for b.Loop() {
				for name, step := range steps {
					began := time.Now()
					step()
					spent[name] = append(spent[name], time.Since(began))
				}
			}
			for name, list := range spent {
				b.ReportMetric(float64(median(list).Microseconds()), name+"-us")
			}
		})
	}
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}

// remoteRequests are a put of rows of one field, as a caller that waits sends it, and a get of them.
func remoteRequests(b *testing.B, partition string, rows int, elements int64) (put, get *client.Request) {
	mem := foreigntest.New(b, rows*int(elements)*8+1<<20)
	keys := keysOf(rows)
	column := mem.Ints([]int64{elements}, make([]int64, int64(rows)*elements)...)
	put = &client.Request{Op: wire.OpPut, Rows: rows, Waits: true, Columns: []foreign.Raw{column}, Body: marshal(b, &putBody{
		Partition: partition, Keys: keys, Fields: wire.Strings{"x"},
	})}
	get = &client.Request{Op: wire.OpGet, Waits: true, Body: marshal(b, &wire.GetRequest{Partition: partition, Keys: keys, Inline: client.InlineLimit})}
	return put, get
}

func keysOf(rows int) wire.Strings {
	keys := make(wire.Strings, rows)
	for i := range keys {
		keys[i] = fmt.Sprintf("key-%d", i)
	}
	return keys
}
