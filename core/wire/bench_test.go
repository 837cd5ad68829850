package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func benchDecode[T any](b *testing.B, message *T) {
	raw, err := Marshal(message)
	require.NoError(b, err)
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		var out T
		if err := Unmarshal(raw, &out); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	tags := make(List, 1024)
	for i := range tags {
		tags[i] = []byte{0x82, 0xa1, 'a', 1, 0xa1, 'b', 0xa3, 'x', 'y', 'z'}
	}
	columns := make([]Column, 8)
	for i := range columns {
		columns[i] = uniform("field", 1024, 512)
	}
	b.Run("GetRequest/keys=1024", func(b *testing.B) { benchDecode(b, &GetRequest{Partition: "p", Keys: keys(1024)}) })
	b.Run("PutRequest/keys=1024,columns=8", func(b *testing.B) {
		benchDecode(b, &PutRequest{Partition: "p", Keys: keys(1024), Columns: columns})
	})
	b.Run("PutRequest/keys=1024,columns=8,tags", func(b *testing.B) {
		benchDecode(b, &PutRequest{Partition: "p", Keys: keys(1024), Columns: columns, Tags: tags})
	})
}

func BenchmarkGetReplyBothWays(b *testing.B) {
	reply := GetReply{Rows: 1024, Lease: 1}
	for range 8 {
		reply.Columns = append(reply.Columns, GetColumn{Column: uniform("field", 1024, 512), Runs: []Run{{Rows: 1024, Block: Block{Size: 1 << 21}}}})
	}
	b.ReportAllocs()
	for b.Loop() {
		raw, err := Marshal(&reply)
		if err != nil {
			b.Fatal(err)
		}
		var out GetReply
		if err := Unmarshal(raw, &out); err != nil {
			b.Fatal(err)
		}
	}
}
