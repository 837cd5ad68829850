package client

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/guard"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// silent is a connection on which nobody asks for anything.
type silent struct{ transport.Conn }

func (silent) Notify(*wire.Request) error { return nil }

func getReply(columns ...wire.GetColumn) *wire.GetReply {
	rows := 0
	if len(columns) > 0 {
		rows = columns[0].Column.Rows
	}
	return &wire.GetReply{Rows: rows, Columns: columns}
}

func replyColumn(rows int, shape ...int64) wire.GetColumn {
	c := wire.Column{Field: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape}
	return wire.GetColumn{Column: c}
}

func varyingColumn(ragged uint8, lengths ...int64) wire.GetColumn {
	c := wire.Column{
		Field: "x", Kind: schema.Tensor, DType: schema.Int16, Ragged: ragged, Rows: len(lengths), Form: schema.Varying,
		Shape: []int64{2, 2}, Vary: ragged - 1, Lengths: lengths,
	}
	c.Shape[ragged-1] = 0
	return wire.GetColumn{Column: c}
}

// FuzzGot gives a client arbitrary bytes as the reply to a get: it makes columns whose memory is as large as they say, or an
// error, and never more memory than the reply has bytes.
func FuzzGot(f *testing.F) {
	seed := func(reply *wire.GetReply, payload int) {
		raw, err := wire.Marshal(reply)
		require.NoError(f, err)
		f.Add(raw, make([]byte, payload), uint8(0))
		f.Add(raw, make([]byte, payload), uint8(DenseLayout))
	}
	seed(getReply(replyColumn(2, 3)), 48)
	seed(getReply(varyingColumn(1, 2, 3)), 20)
	seed(getReply(varyingColumn(2, 2, 3), varyingColumn(2, 2, 3)), 40)
	seed(getReply(), 0)
	seed(getReply(replyColumn(2, 3)), 47)
	seed(getReply(replyColumn(1<<20, 1<<20)), 1)
	f.Fuzz(func(t *testing.T, body, payload []byte, flags uint8) {
		if payload == nil {
			payload = []byte{}
		}
		c := New(Options{Conn: silent{}, Pool: bufpool.New()})
		defer c.opts.Pool.Close()
		r := c.got(t.Context(), Flags(flags)&DenseLayout, &wire.Reply{Body: body, Payload: payload}, nil)
		require.NoError(t, guard.Poisoned())
		if r.Err != nil {
			require.Contains(t, []tqerr.Code{tqerr.InvalidArgument, tqerr.Corruption}, tqerr.CodeOf(r.Err), "%v", r.Err)
			return
		}
		total := 0
		for i := range r.Columns {
			col := &r.Columns[i]
			require.Equal(t, r.Rows, col.Column.Rows)
			require.Equal(t, col.Column.Bytes(), int64(len(col.Data)))
			total += len(col.Data)
			Release(col.Token)
			Release(col.OffsetsToken)
		}
		require.Equal(t, len(payload), total)
	})
}

// FuzzCheckGrant gives a put arbitrary grants: those that pass name every row once, and the bytes of the blocks are theirs.
func FuzzCheckGrant(f *testing.F) {
	seed := func(reply *wire.PutReply) {
		raw, err := wire.Marshal(reply)
		require.NoError(f, err)
		f.Add(raw)
	}
	seed(&wire.PutReply{Txn: 1, Parts: []wire.Part{{Rows: wire.Ints{0, 3}, Blocks: []wire.Block{{Size: 48}}}}})
	seed(&wire.PutReply{Txn: 1, Parts: []wire.Part{
		{Rows: wire.Ints{0, 1, 2, 3}, Blocks: []wire.Block{{Size: 32}}}, {Unit: 1, Rows: wire.Ints{1, 2}, Blocks: []wire.Block{{Size: 16}}},
	}})
	seed(&wire.PutReply{Txn: 1, Parts: []wire.Part{{Rows: wire.Ints{0, 3}, Blocks: []wire.Block{{Size: 32}}}},
		Shared: []wire.PartRows{{Rows: wire.Ints{0, 2}}}})
	seed(&wire.PutReply{Txn: 1, Parts: []wire.Part{{Rows: wire.Ints{0, 3, 5}, Blocks: []wire.Block{{Size: 1 << 62, Offset: -1}}}}})
	f.Fuzz(func(t *testing.T, body []byte) {
		var reply wire.PutReply
		if wire.Unmarshal(body, &reply) != nil {
			return
		}
		mem := foreigntest.New(t, 4096)
		raw := mem.Ints([]int64{2}, 1, 2, 3, 4, 5, 6)
		in, err := foreign.New("x", 3, &raw)
		require.NoError(t, err)
		inputs := []*foreign.Input{in}
		for stored, put := range map[int64]*putRequest{3: {}, 2: {Shared: []wire.Sharing{{Rows: wire.Ints{0, 1, 0}}}}} {
			if err := checkGrant(&reply, put, inputs); err != nil {
				require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
				continue
			}
			o := &outgoing{}
			for i := range reply.Parts {
				o.pieces = appendPieces(o.pieces, &reply, i, inputs)
			}
			require.LessOrEqual(t, 16*stored, o.left(), "rows that are the same are sent once for each part")
			require.LessOrEqual(t, o.left(), int64(48))
		}
	})
}

func TestRunsThatDoNotFit(t *testing.T) {
	column := replyColumn(2, 2)
	for name, runs := range map[string][]wire.Run{
		"none": nil, "too little": {{Block: wire.Block{Size: 31}}}, "too much": {{Block: wire.Block{Size: 33}}},
		"negative": {{Block: wire.Block{Size: -1}}, {Block: wire.Block{Size: 33}}}, "before": {{Block: wire.Block{Size: 32, Offset: -1}}},
		"twice": {{Block: wire.Block{Size: 32}}, {Block: wire.Block{Size: 32}}}, "overflow": {{Block: wire.Block{Size: 1 << 62}}, {Block: wire.Block{Size: 1 << 62}}},
	} {
		column.Runs = runs
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(checkGet(getReply(column), nil, true)), name)
	}
	column.Runs = []wire.Run{{Block: wire.Block{Size: 16}}, {Block: wire.Block{Size: 16, Offset: 64}}}
	require.NoError(t, checkGet(getReply(column), nil, true))
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(checkGet(getReply(column), nil, false)), "neither runs nor payload nor lease")

	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(fd)) }()
	require.NoError(t, unix.Ftruncate(fd, 8192))
	m, err := arena.Map(fd, 8192)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	require.NoError(t, checkBlock(m, wire.Block{Offset: 8000, Size: 192}))
	for _, b := range []wire.Block{{Offset: 8000, Size: 193}, {Offset: -1, Size: 1}, {Size: -1}, {Offset: 1 << 62, Size: 1 << 62}, {Offset: 9000}} {
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(checkBlock(m, b)), "%+v", b)
	}
}
