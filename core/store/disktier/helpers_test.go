package disktier

import (
	"context"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/store"
)

func samples(from int64, count int) []schema.Sample {
	out := make([]schema.Sample, count)
	for i := range out {
		out[i] = schema.Sample{Index: from + int64(i), Generation: 1}
	}
	return out
}

// bytesColumn is count uint8 rows of a size.
func bytesColumn(field string, count int, size int64) schema.Column {
	return schema.Column{
		Field: field, Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: count, Form: schema.Uniform, Shape: []int64{size},
	}
}

// value is the bytes of a row, which depend on its seed.
func value(seed uint64, size int64) []byte {
	out := make([]byte, size)
	rnd := rand.New(rand.NewPCG(seed, 7))
	at := min(len(out), 256) // as in the golden folder
	for i := range out[:at] {
		out[i] = byte(rnd.Uint32())
	}
	for ; at+8 <= len(out); at += 8 {
		order.PutUint64(out[at:], rnd.Uint64())
	}
	for ; at < len(out); at++ {
		out[at] = byte(rnd.Uint32())
	}
	return out
}

// stage fills a staged write of one column "x" whose rows have the values of seeds from, from+1, ….
func stage(t testing.TB, s store.Store, from int64, count int, size int64) store.Staged {
	t.Helper()
	tx, err := s.Stage("p", []schema.Column{bytesColumn("x", count, size)})
	require.NoError(t, err)
	to := s.Bytes(tx.Blocks()[0])
	for i := range count {
		copy(to[int64(i)*size:], value(uint64(from)+uint64(i), size))
	}
	return tx
}

func put(t testing.TB, s store.Store, from int64, count int, size int64) {
	t.Helper()
	tx := stage(t, s, from, count, size)
	require.NoError(t, store.Prepare(context.Background(), tx))
	tx.Commit(samples(from, count))
}

// bytesOf copies a leased column out.
func bytesOf(s store.Store, l store.Lease) (out []byte) {
	for _, run := range l.Columns()[0].Runs {
		out = append(out, s.Bytes(run.Block)...)
	}
	return out
}

func requireValue(t testing.TB, s store.Store, index, size int64) {
	t.Helper()
	l, err := s.Read("p", []string{"x"}, samples(index, 1))
	require.NoError(t, err)
	require.Equal(t, value(uint64(index), size), bytesOf(s, l))
	l.Release()
}

func samplesOf(index int64) schema.Sample { return schema.Sample{Index: index, Generation: 1} }

func crcOf(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
