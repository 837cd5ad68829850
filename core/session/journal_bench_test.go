package session_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/wire"
)

// journaled opens an owner whose journal has a durability.
func journaled(b *testing.B, durability string) (*session.Config, *session.Session) {
	dir := b.TempDir()
	cfg := &session.Config{Mode: "own", Dir: dir, Namespace: "n", TimeoutMS: 5000, Keep: true}
	cfg.Journal = session.Journal{Durability: durability, Path: dir}
	s, err := session.Open(context.Background(), cfg)
	require.NoError(b, err)
	return cfg, s
}

// rowPut is a put of one row of 64 bytes, of which each caller overwrites its own.
func rowPut(b *testing.B, mem *foreigntest.Memory, key string) *client.Request {
	body := putBody{Partition: "p", Keys: wire.Strings{key}, Fields: wire.Strings{"x"}}
	columns := []foreign.Raw{mem.Ints([]int64{8}, make([]int64, 8)...)}
	return &client.Request{Op: wire.OpPut, Body: marshal(b, &body), Columns: columns, Rows: 1}
}

// BenchmarkJournal makes puts of one row with 1 to 16 clients at once, each over a connection of its own, which waits for each.
func BenchmarkJournal(b *testing.B) {
	for _, clients := range []int{1, 4, 16} {
		for _, durability := range []string{"none", "relaxed", "strict"} {
			b.Run(fmt.Sprintf("%d/%s", clients, durability), func(b *testing.B) {
				cfg, owner := journaled(b, durability)
				defer func() { require.NoError(b, owner.Close(time.Second)) }()
				callers, puts := make([]*caller, clients), make([]*client.Request, clients)
				mem := foreigntest.New(b, 1<<20)
				for i := range callers {
					s, err := session.Open(context.Background(), &session.Config{Mode: "attach", Dir: cfg.Dir, Namespace: "n", TimeoutMS: 5000})
					require.NoError(b, err)
					defer func() { require.NoError(b, s.Close(time.Second)) }()
					callers[i] = &caller{b: b, s: s, done: make(chan *client.Result, 1)}
					puts[i] = rowPut(b, mem, fmt.Sprint("k", i))
					callers[i].do(puts[i])
				}
				var left atomic.Int64
				left.Store(int64(b.N))
				b.ResetTimer()
				var all sync.WaitGroup
				for i, c := range callers {
					all.Add(1)
					go func() {
						defer all.Done()
						for left.Add(-1) >= 0 {
							c.do(puts[i])
						}
					}()
				}
				all.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "puts/s")
			})
		}
	}
}

// BenchmarkJournalRecovery opens a session again that a million puts of one new row each have made. The journal writes its state
// anew from time to time, so that it holds fewer commands.
func BenchmarkJournalRecovery(b *testing.B) {
	const puts, atOnce = 1_000_000, 64
	cfg, owner := journaled(b, "relaxed")
	mem, began := foreigntest.New(b, 1<<20), time.Now()
	column := mem.Ints([]int64{8}, make([]int64, 8)...)
	var all sync.WaitGroup
	for k := range atOnce {
		all.Add(1)
		go func() {
			defer all.Done()
			c := &caller{b: b, s: owner, done: make(chan *client.Result, 1)}
			for i := k; i < puts; i += atOnce {
				body := putBody{Partition: "p", Keys: wire.Strings{fmt.Sprint("key-", i)}, Fields: wire.Strings{"x"}}
				c.do(&client.Request{Op: wire.OpPut, Body: marshal(b, &body), Columns: []foreign.Raw{column}, Rows: 1})
			}
		}()
	}
	all.Wait()
	b.Logf("%d puts in %s", puts, time.Since(began))
	require.NoError(b, owner.Close(time.Second))
	sizes := map[string]int64{}
	require.NoError(b, filepath.Walk(cfg.Journal.Path, func(name string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			sizes[filepath.Base(name)] = info.Size()
		}
		return err
	}))
	b.Log("bytes of the journal:", sizes)
	for b.Loop() {
		again, err := session.Open(context.Background(), cfg)
		require.NoError(b, err)
		b.StopTimer()
		require.NoError(b, again.Close(time.Second))
		b.StartTimer()
	}
}
