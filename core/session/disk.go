package session

import (
	"context"
	"fmt"
	"time"

	"transferqueue/core/unit"
)

// Disk says whether and how units use the disk of their host.
type Disk struct {
	Enabled       bool    `msgpack:"enabled"`
	Path          string  `msgpack:"path"`
	Limit         int64   `msgpack:"limit_bytes"` // per unit, 0: none
	Threshold     int64   `msgpack:"threshold_bytes"`
	HighWatermark float64 `msgpack:"high_watermark"` // shares of the memory limit
	LowWatermark  float64 `msgpack:"low_watermark"`
	Durability    string  `msgpack:"durability"` // "none", "relaxed", "strict"; "": none
}

// of is the disk of a unit in a run; nil: it has none. What is durable lies where the unit of this name finds it again.
func (d *Disk) of(run, namespace, name string, number int) (*unit.Disk, error) {
	durability, err := unit.ParseDurability(d.Durability)
	if err != nil || !d.Enabled {
		return nil, err
	}
	return &unit.Disk{
		Path: d.Path, Run: run, Unit: fmt.Sprintf("unit-%d", number), Durability: durability, Namespace: namespace, Name: name,
		Limit: d.Limit, Threshold: d.Threshold, HighWatermark: d.HighWatermark, LowWatermark: d.LowWatermark,
	}, nil
}

// discardOutside lets durable units in other processes drop what only this session knows. One that does not answer in time keeps
// it, and says so to the next session.
func (s *Session) discardOutside(timeout time.Duration) error {
	if !s.final {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return s.server.Discard(ctx)
}
