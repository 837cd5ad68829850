package session

import (
	"fmt"

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
}

// of is the disk of a unit in a run; nil: it has none.
func (d *Disk) of(run string, number int) *unit.Disk {
	if !d.Enabled {
		return nil
	}
	return &unit.Disk{
		Path: d.Path, Run: run, Unit: fmt.Sprintf("unit-%d", number), Limit: d.Limit, Threshold: d.Threshold,
		HighWatermark: d.HighWatermark, LowWatermark: d.LowWatermark,
	}
}
