package merge

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

// BenchmarkApply merges 1024 rows of 1 KiB. Bytes are those of the result; an add moves three times as many.
func BenchmarkApply(b *testing.B) {
	for _, name := range []string{"add", "max", "concat", "replace"} {
		for _, dtype := range []schema.DType{
			schema.Bool, schema.Int8, schema.Float8E4M3FN, schema.Float16, schema.BFloat16, schema.Float32, schema.Int64,
		} {
			for _, tight := range []bool{true, false} {
				b.Run(fmt.Sprintf("%s/%s/tight=%t", name, dtype, tight), func(b *testing.B) { benchmarkApply(b, name, dtype, tight) })
			}
		}
	}
}

func benchmarkApply(b *testing.B, name string, dtype schema.DType, tight bool) {
	c := uniform(dtype, 1024, 1024/dtype.Size())
	old, added := make([]byte, c.Bytes()), make([]byte, c.Bytes())
	m := lookup(b, name)
	result, err := m.Plan(&c, &c, key)
	require.NoError(b, err)
	out := make([]byte, result.Bytes())
	rows := func(data []byte) Rows {
		if tight {
			return rowsOf(&c, data)
		}
		return func(i int) []byte { return data[i*1024 : (i+1)*1024] }
	}
	b.SetBytes(result.Bytes())
	for b.Loop() {
		m.Apply(&result, out, &c, rows(old), &c, rows(added))
	}
}
