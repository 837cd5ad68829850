package controller

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
)

// absent is a unit that an earlier life of the controller had and this one has not found again. Its samples count, and can be
// cleared.
type absent struct {
	was unitRecord
	why error
}

var _ node = absent{}

// missed reports that a unit may have lived on while it was not found: what it has in memory is as good as ever.
func missed(n node) bool {
	if n == nil {
		return false
	}
	_, is := unmetered(n).(absent)
	return is
}

func (n absent) ID() uint32                 { return n.was.ID }
func (n absent) Name() string               { return n.was.Name }
func (n absent) Host() string               { return n.was.Host }
func (n absent) Machine() string            { return n.was.Machine }
func (n absent) away() *remote.Unit         { return nil }
func (n absent) SampleLimit() int64         { return n.was.SampleLimit }
func (n absent) Stats() store.Stats         { return store.Stats{} }
func (n absent) Counters() store.Counters   { return store.Counters{} }
func (n absent) OnFree(func())              {}
func (n absent) waits() bool                { return true }
func (n absent) sync(context.Context) error { return n.Lost() }
func (n absent) disconnect()                {}
func (n absent) close()                     {}
func (n absent) descriptors() []int         { return nil }
func (n absent) Durable() bool              { return false }

// Lost implements node.
func (n absent) Lost() error {
	return tqerr.Wrap(tqerr.Unavailable, n.why, "unit %q was not found again when the controller was started anew", n.was.Name)
}

func (n absent) Segment(uint32) (int, int64, error) { return -1, 0, n.Lost() }
func (n absent) Bytes(store.Block) ([]byte, error)  { return nil, n.Lost() }
func (n absent) Read(*unit.Query) unit.Reading      { return &reading{err: n.Lost()} }
func (n absent) Update(context.Context, *unit.UpdateSpec) (*unit.Transformed, error) {
	return nil, n.Lost()
}
func (n absent) Parse(context.Context, *unit.ParseSpec) (*unit.Transformed, error) {
	return nil, n.Lost()
}
func (n absent) Stage(context.Context, string, []schema.Column, []byte) (store.Staged, error) {
	return nil, n.Lost()
}
func (n absent) Piece(context.Context, store.Lease, int, int64, uint32, []byte) (uint32, error) {
	return 0, n.Lost()
}
func (n absent) StageOnDisk(context.Context, string, []schema.Column) (store.Staged, error) {
	return nil, n.Lost()
}
func (n absent) Inventory(context.Context) ([]schema.Stock, error)              { return nil, n.Lost() }
func (n absent) Discard(context.Context) error                                  { return n.Lost() }
func (n absent) Delete(string, []string, []schema.Sample, uint64) unit.Deleting { return nil }
