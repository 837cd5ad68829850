package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// plain compares frames without their scratch.
func plain(f *Frame) Frame {
	out := *f
	out.head = [HeaderSize]byte{}
	return out
}

func full() *Frame {
	return &Frame{Type: FrameRequest, Op: uint16(OpGet), ID: 7, Sequence: 1 << 40, Ack: 3, Timeout: 1500 * time.Millisecond,
		Body: []byte("body"), Payload: []byte("payload")}
}

func TestFramesComeBackAsTheyWere(t *testing.T) {
	var stream bytes.Buffer
	frames := []*Frame{
		full(), {Type: FrameReply}, {Type: FrameCancel, ID: 1<<64 - 1}, Hello(9, []byte("secret")),
		{Type: FrameNotify, Body: bytes.Repeat([]byte("b"), coalesceLimit)},
		{Type: FrameSegment, Payload: bytes.Repeat([]byte("p"), trustedLength*3+1)},
	}
	for _, f := range frames {
		require.NoError(t, WriteFrame(&stream, f))
	}
	var got Frame
	for _, want := range frames {
		require.NoError(t, ReadFrame(&stream, &got))
		require.Equal(t, plain(want), plain(&got))
	}
	require.Equal(t, io.EOF, ReadFrame(&stream, &got))
}

// writes counts the calls of Write.
type writes struct{ n int }

func (w *writes) Write(p []byte) (int, error) {
	w.n++
	return len(p), nil
}

func TestSmallFramesAreOneWrite(t *testing.T) {
	var w writes
	require.NoError(t, WriteFrame(&w, full()))
	require.Equal(t, 1, w.n)
}

func TestTornStreams(t *testing.T) {
	var stream bytes.Buffer
	require.NoError(t, WriteFrame(&stream, full()))
	whole := stream.Bytes()
	var f Frame
	require.Equal(t, io.EOF, ReadFrame(bytes.NewReader(nil), &f))
	for n := 1; n < len(whole); n++ {
		err := ReadFrame(bytes.NewReader(whole[:n]), &f)
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err), "%d bytes", n)
		require.ErrorContains(t, err, "torn")
	}
	broken := errors.New("EIO")
	require.Equal(t, broken, ReadFrame(io.MultiReader(bytes.NewReader(whole[:50]), failing{broken}), &f))
}

type failing struct{ err error }

func (r failing) Read([]byte) (int, error) { return 0, r.err }

func TestFramesThatAreRefused(t *testing.T) {
	cases := map[string]struct {
		at    int
		bytes []byte
		text  string
	}{
		"magic":         {0, []byte("HTTP"), "frame starts with 50545448, want 46315154"},
		"type 0":        {4, []byte{0}, "unknown type 0"},
		"unknown type":  {4, []byte{byte(endOfFrameTypes)}, "unknown type 10"},
		"reserved":      {5, []byte{2}, "unknown type 1.2"},
		"body":          {36, []byte{1, 0, 0, 0x10}, "body of 268435457 bytes, limit 268435456"},
		"payload":       {40, []byte{1, 0, 0, 0x40}, "payload of 1073741825 bytes, limit 1073741824"},
		"payload high":  {40, bytes.Repeat([]byte{0xff}, 8), "payload of 18446744073709551615 bytes"},
		"long greeting": {4, []byte{byte(FrameHello), 0, 0, 0}, "body of 600 bytes, limit 512"},
	}
	for name, c := range cases {
		f := full()
		f.Body = make([]byte, 600)
		raw := f.Append(nil)
		copy(raw[c.at:], c.bytes)
		err := ReadFrame(bytes.NewReader(raw), f)
		require.ErrorContains(t, err, c.text, name)
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err), name)
	}
}

func TestALengthAloneDoesNotAllocate(t *testing.T) {
	f := &Frame{Type: FrameRequest}
	raw := f.AppendHeader(nil)
	copy(raw[40:], []byte{0, 0, 0, 0x40}) // 1 GiB of payload that never comes
	allocated := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			if ReadFrame(bytes.NewReader(raw), new(Frame)) == nil {
				b.Fatal("a torn frame was accepted")
			}
		}
	}).AllocedBytesPerOp()
	require.Less(t, allocated, int64(2*trustedLength))
}

func TestFramesBeyondTheLimitsAreNotWritten(t *testing.T) {
	var w writes
	for _, f := range []*Frame{{Type: FrameReply, Body: make([]byte, MaxBody+1)}, {Type: FrameReply, Payload: make([]byte, MaxPayload+1)}} {
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(WriteFrame(&w, f)))
	}
	require.Zero(t, w.n)
}

func TestTimeoutIsRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]uint32{
		0: 0, -time.Second: 0, 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2, time.Second: 1000, 1 << 62: 1<<32 - 1,
	} {
		require.Equal(t, want, milliseconds(d), "%s", d)
	}
}

func TestCheckVersion(t *testing.T) {
	require.NoError(t, CheckVersion(Version))
	err := CheckVersion(Version + 1)
	require.Equal(t, tqerr.VersionMismatch, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "version 3, this side version 2")
}

// Bytes that were written once stay readable for ever: these texts never change.
func TestGoldenBytes(t *testing.T) {
	golden := map[string]struct {
		hex  string
		make func() ([]byte, error) // nil: a message that had fewer fields then
		read func([]byte) (any, error)
		want any
	}{
		"frame": {
			"54513146" + "01000400" + "0700000000000000" + "0000000000010000" + "0300000000000000" + "dc050000" + "04000000" +
				"0700000000000000" + "626f6479" + "7061796c6f6164",
			func() ([]byte, error) { return full().Append(nil), nil },
			func(b []byte) (any, error) {
				var f Frame
				err := ReadFrame(bytes.NewReader(b), &f)
				return plain(&f), err
			},
			*full(),
		},
		"PutRequest without shared rows": {
			"9ba170c40692a16ba2c3bcc000919d010c010201a3696473c408040000000000000000c0c0c0c0c0c403928080c2a3616464" +
				"c40101c3c3",
			nil,
			func(b []byte) (any, error) { var m PutRequest; err := Unmarshal(b, &m); return m, err },
			put(),
		},
		"PutRequest without a word on its result": {
			"9da170c40692a16ba2c3bcc000919d010c010201a3696473c408040000000000000000c0c0c0c0c0c403928080c2a3616464" +
				"c40101c3c3c0c0",
			nil,
			func(b []byte) (any, error) { var m PutRequest; err := Unmarshal(b, &m); return m, err },
			put(),
		},
		"PutRequest": {
			"9ea170c40692a16ba2c3bcc000919d010c010201a3696473c408040000000000000000c0c0c0c0c0c403928080c2a3616464" +
				"c40101c3c3c0c0c2",
			func() ([]byte, error) { return Marshal(put()) },
			func(b []byte) (any, error) { var m PutRequest; err := Unmarshal(b, &m); return m, err },
			put(),
		},
		"GetReply": {
			"940291939d0200000204a474657874c000c0c0c0c4020102c4100300000000000000f401000000000000919302019303ce00" +
				"100000cd01f70009c0",
			func() ([]byte, error) { return Marshal(got()) },
			func(b []byte) (any, error) { var m GetReply; err := Unmarshal(b, &m); return m, err },
			got(),
		},
	}
	for name, g := range golden {
		if g.make != nil {
			raw, err := g.make()
			require.NoError(t, err)
			require.Equal(t, g.hex, hex.EncodeToString(raw), name)
		}
		old, err := hex.DecodeString(g.hex)
		require.NoError(t, err)
		back, err := g.read(old)
		require.NoError(t, err, name)
		require.Equal(t, g.want, back, name)
	}
}

func put() PutRequest {
	return PutRequest{Partition: "p", Keys: Strings{"k", "ü"}, Columns: []Column{uniform("ids", 2, 4)}, Tags: List{{0x80}, {0x80}},
		Merge: "add", Callable: []byte{1}, Inline: true, Last: true}
}

func got() GetReply {
	objects := Column{Field: "text", Kind: schema.Object, Rows: 2, Form: schema.Objects, Codecs: []schema.Codec{1, 2}, Sizes: []int64{3, 500}}
	return GetReply{Rows: 2, Columns: []GetColumn{{Column: objects, Runs: []Run{{Rows: 2, Unit: 1, Block: Block{Segment: 3, Offset: 1 << 20, Size: 503}}}}}, Lease: 9}
}
