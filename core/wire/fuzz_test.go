package wire

import (
	"bytes"
	"io"
	"reflect"
	"testing"

	"transferqueue/core/tqerr"
)

// FuzzUnmarshal reads arbitrary bytes as every message: it may refuse them with InvalidArgument, and what it accepts it
// must write and read again without a change.
func FuzzUnmarshal(f *testing.F) {
	messages := samples()
	for i, message := range messages {
		raw, err := Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), raw)
	}
	f.Add(uint8(0), []byte{0x91, 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, which uint8, raw []byte) {
		kind := reflect.TypeOf(messages[int(which)%len(messages)]).Elem()
		first := reflect.New(kind).Interface()
		if err := Unmarshal(raw, first); err != nil {
			if tqerr.CodeOf(err) != tqerr.InvalidArgument {
				t.Fatalf("%s: %v", kind, err)
			}
			return
		}
		again, err := Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		second := reflect.New(kind).Interface()
		if err := Unmarshal(again, second); err != nil {
			t.Fatalf("%s: what was read cannot be read again: %v", kind, err)
		}
		if !reflect.DeepEqual(first, second) {
			t.Fatalf("%s: %+v became %+v", kind, first, second)
		}
	})
}

// FuzzSplitArray joins what was split and must get the same bytes behind the header.
func FuzzSplitArray(f *testing.F) {
	f.Add([]byte{0x93, 1, 0xa1, 'x', 0x81, 1, 2})
	f.Add([]byte{0xc0})
	f.Add([]byte{0xdc, 0, 1, 0xc7, 1, 2, 3})
	f.Fuzz(func(t *testing.T, raw []byte) {
		items, err := splitArray(raw)
		if err != nil {
			return
		}
		if joined := bytes.Join(items, nil); !bytes.HasSuffix(raw, joined) || len(raw)-len(joined) > 5 {
			t.Fatalf("%x was split into %x", raw, items)
		}
	})
}

// FuzzReadFrame reads a stream of frames until it ends or is refused, and writes each frame back as it was.
func FuzzReadFrame(f *testing.F) {
	f.Add(full().Append(nil))
	f.Add(Hello(1, []byte("secret")).Append((&Frame{Type: FrameReply}).Append(nil)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := bytes.NewReader(raw)
		var frame Frame
		for {
			at := len(raw) - r.Len()
			err := ReadFrame(r, &frame)
			if err == io.EOF {
				return
			}
			if err != nil {
				if tqerr.CodeOf(err) != tqerr.Corruption {
					t.Fatal(err)
				}
				return
			}
			if back := frame.Append(nil); !bytes.Equal(back, raw[at:len(raw)-r.Len()]) {
				t.Fatalf("%x became %x", raw[at:len(raw)-r.Len()], back)
			}
		}
	})
}

// FuzzParseFrame reads a message as one frame, and writes it back as it was.
func FuzzParseFrame(f *testing.F) {
	f.Add(full().Append(nil))
	f.Add(Hello(1, []byte("secret")).Append(nil))
	f.Add((&Frame{Type: FrameReply}).Append([]byte{1}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var frame Frame
		if err := ParseFrame(raw, &frame); err != nil {
			if tqerr.CodeOf(err) != tqerr.Corruption {
				t.Fatal(err)
			}
			return
		}
		if back := frame.Append(nil); !bytes.Equal(back, raw) {
			t.Fatalf("%x became %x", raw, back)
		}
	})
}
