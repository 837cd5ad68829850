//go:build go1.25

package controller_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/wire"
)

// watching is a watch of partition "p".
type watching struct {
	u      *user
	number uint64
	events []wire.Event
}

func (u *user) watch() *watching {
	u.t.Helper()
	var reply wire.WatchReply
	u.ask(wire.OpWatchOpen, &wire.PartitionRequest{Partition: "p"}, &reply)
	return &watching{u: u, number: reply.Watch}
}

func (w *watching) next(timeout time.Duration) error {
	var reply wire.EventsReply
	err := decode(w.u.begin(wire.OpWatchNext, &wire.WatchRequest{Watch: w.number}, timeout).wait(), &reply)
	w.events = append(w.events, reply.Events...)
	return err
}

// take returns the next n events as text, and fails when more came with them.
func (w *watching) take(n int) (texts []string) {
	w.u.t.Helper()
	for len(w.events) < n {
		require.NoError(w.u.t, w.next(time.Minute))
	}
	require.Len(w.u.t, w.events, n)
	for _, e := range w.events {
		texts = append(texts, e.Kind+" "+e.Key)
	}
	w.events = nil
	return texts
}

// fetching is a get_meta in fetch mode.
type fetching struct{ *pending }

func (u *user) fetch(task string, n int, timeout time.Duration) *fetching {
	return &fetching{u.begin(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x"}, BatchSize: n, Task: task}, timeout)}
}

func (f *fetching) try() (wire.Ints, error) {
	var reply wire.MetaReply
	err := decode(f.wait(), &reply)
	return reply.Indexes, err
}

func (f *fetching) indexes(t *testing.T) wire.Ints {
	t.Helper()
	got, err := f.try()
	require.NoError(t, err)
	return got
}

// production lists the samples that own an index and have a field.
func (u *user) production(field string) (indexes []int64) {
	u.t.Helper()
	var reply wire.StatusReply
	u.ask(wire.OpProduction, &wire.ProductionRequest{Partition: "p", Fields: []string{field}}, &reply)
	for i, index := range reply.Indexes {
		if reply.Status[i] == 1 {
			indexes = append(indexes, index)
		}
	}
	return indexes
}
