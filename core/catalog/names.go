package catalog

import (
	"fmt"
	"strconv"
	"strings"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

const (
	// fewNames is how many names of a long list an error message shows.
	fewNames = 5
	// allNames bounds the messages that promise to show every name.
	allNames = 1000
)

// quoted lists names for a message, at most limit of them.
func quoted(names []string, limit int) string {
	var b strings.Builder
	for i, name := range names {
		if i == limit {
			fmt.Fprintf(&b, " ... %d more", len(names)-limit)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.Quote(name))
	}
	return b.String()
}

// indexList lists the indexes of samples for a message.
func indexList(samples []schema.Sample) string {
	var b strings.Builder
	for i, s := range samples {
		if i == fewNames {
			fmt.Fprintf(&b, " ... %d more", len(samples)-fewNames)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.FormatInt(s.Index, 10))
	}
	return b.String()
}

// typeName names the type of a column as messages do; beside the other kind a tensor says that it is one.
func typeName(kind schema.Kind, dtype schema.DType, other schema.Kind) string {
	switch {
	case kind != schema.Tensor:
		return kind.String()
	case other == schema.Tensor:
		return "dtype " + dtype.String()
	default:
		return dtype.String() + " tensor"
	}
}

// gone is the error for a sample that was cleared or whose index belongs to another sample.
func gone(partition string, s schema.Sample, key string, known bool) error {
	if known {
		return tqerr.New(tqerr.SampleGone, "partition %q: sample %d (key %q) was cleared", partition, s.Index, key)
	}
	return tqerr.New(tqerr.SampleGone, "partition %q: sample %d was cleared", partition, s.Index)
}
