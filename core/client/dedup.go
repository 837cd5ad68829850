package client

import (
	"slices"

	"transferqueue/core/foreign"
	"transferqueue/core/internal/alike"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// dedup finds equal rows of the fields, so that they are sent and stored once. Where the values are computed, the unit does
// that.
func dedup(put *putRequest, fields []string, inputs []*foreign.Input) error {
	for _, field := range fields {
		k := slices.IndexFunc(inputs, func(in *foreign.Input) bool { return in.Column.Field == field })
		if k < 0 {
			return tqerr.New(tqerr.InvalidArgument, "dedup: field %q is not among those that are put", field)
		}
		if len(put.Callable) > 0 || sharedRows(put, k) != nil {
			continue
		}
		if first := alike.Rows(&inputs[k].Column, inputs[k].Row); first != nil {
			put.Shared = append(put.Shared, wire.Sharing{Column: k, Rows: first})
		}
	}
	if len(put.Callable) > 0 {
		put.Dedup = fields
	}
	return nil
}

// sharedRows says which rows of a column are stored once; nil: each is.
func sharedRows(put *putRequest, column int) []int64 {
	for i := range put.Shared {
		if put.Shared[i].Column == column {
			return put.Shared[i].Rows
		}
	}
	return nil
}
