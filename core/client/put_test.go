package client

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/wire"
)

// What is passed on without a look into it arrives as the lists that it is.
func TestPutRequestIsThatOfTheWire(t *testing.T) {
	want := &wire.PutRequest{
		Partition: "p", Keys: wire.Strings{"a", "é"}, Samples: &wire.Samples{Indexes: wire.Ints{3}, Generations: wire.Ints{1}}, Insert: 2,
		Columns: []wire.Column{wire.Column(tensor(2, 0, 4))}, Tags: wire.List{{0x80}, {0x81, 0xa1, 'k', 1}}, Update: true, Merge: "add",
		Callable: []byte("f"), Inline: true, Last: true, Shared: []wire.Sharing{{Column: 0, Rows: wire.Ints{0, 0}}},
		Dedup: wire.Strings{"x"}, Brief: true,
	}
	wanted, err := wire.Marshal(want)
	require.NoError(t, err)
	var put putRequest
	require.NoError(t, wire.Unmarshal(wanted, &put))
	sent, err := wire.Marshal(&put)
	require.NoError(t, err)
	require.Equal(t, wanted, sent)

	wanted, err = wire.Marshal(&wire.PutRequest{Partition: "p", Insert: 1})
	require.NoError(t, err)
	sent, err = wire.Marshal(&putRequest{Partition: "p", Insert: 1})
	require.NoError(t, err)
	require.Equal(t, wanted, sent, "what is not given")
}
