//go:build go1.25

package controller_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/store"
	"transferqueue/core/wire"
)

// dump is everything that a client can see, and what the units hold.
type dump struct {
	list   wire.ListReply
	status []wire.PartitionSummary
	meta   map[string]string
	cells  map[string]map[string][]int64
	stats  store.Stats
}

func (s *system) dump() *dump {
	s.t.Helper()
	u := s.user()
	defer u.Close()
	out := &dump{meta: map[string]string{}, cells: map[string]map[string][]int64{}, stats: s.stats()}
	u.ask(wire.OpList, &wire.ListRequest{}, &out.list)
	var status wire.StatusSummary
	u.ask(wire.OpStatus, nil, &status)
	out.status = status.Partitions
	for _, p := range out.list.Partitions {
		for _, key := range p.Keys {
			var meta wire.MetaReply
			u.ask(wire.OpRetrieveMeta, &wire.RetrieveMetaRequest{Partition: p.Name, Keys: []string{key}}, &meta)
			name := p.Name + "/" + key
			out.meta[name] = fmt.Sprint(meta)
			got, err := u.tryGet(&wire.GetRequest{Partition: p.Name, Keys: []string{key}}, 0)
			require.NoError(s.t, err)
			out.cells[name] = map[string][]int64{}
			for field, rows := range got.ints {
				out.cells[name][field] = rows[0]
			}
			for field, rows := range got.bytes {
				out.cells[name][field] = []int64{int64(len(rows[0]))}
			}
		}
	}
	require.Equal(s.t, out.stats, s.stats(), "a dump leaves nothing")
	return out
}

// unchanged runs something that fails and checks that nothing can tell.
func (s *system) unchanged(t *testing.T, do func() error) error {
	t.Helper()
	before := s.dump()
	err := do()
	require.Error(t, err)
	require.Equal(t, before, s.dump())
	s.check()
	return err
}
