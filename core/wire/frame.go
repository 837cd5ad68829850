// A frame is one message on a connection, all numbers little-endian:
//
//	 0      4      5      6      8      16         24      32        36      40        48
//	+------+------+------+------+------+----------+-------+---------+-------+---------+------+---------+
//	| TQ1F | type | due  | op   | id   | sequence | ack   | timeout | body  | payload | body | payload |
//	|      | u8   | u8   | u16  | u64  | u64      | u64   | ms, u32 | u32   | u64     |      |         |
//	+------+------+------+------+------+----------+-------+---------+-------+---------+------+---------+
//
// What the numbers mean depends on the type:
//
//	request  op: Op   id: chosen by the client, returned in the reply   sequence, ack, timeout: see Request
//	reply    op: tqerr.Code   id: of the request
//	cancel   id: of the request that nobody waits for any more
//	notify   op: Op   a request without a reply
//	hello    op: Version   id: the client's peer id   body: the secret of the session
//	welcome  op: tqerr.Code   id: the server's session id   sequence: Version   body: text of a refusal
//	segment  op: tqerr.Code in the answer   id: unit   sequence: segment   ack: size of the segment   body: as of a reply
//	ticket   id: as of a request   asks for a ticket of a payload stream, which is the body of the reply
//	credit   sequence: the bytes of all frames that the sender of this one has taken so far
//
// The timeout counts from the arrival of a frame when due is 0. When it is 1 the timeout is a point of time, in milliseconds of the
// host's clock since its start, of which it has the lower 32 bits: a request that has lain in a socket until then is too late.
//
// Hello and welcome keep this layout in every version, so that peers of different versions can still tell each other.
package wire

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
)

// FrameType says what a frame is.
type FrameType uint8

// The types of frames. Numbers are wire format.
const (
	FrameRequest FrameType = iota + 1
	FrameReply
	FrameCancel
	FrameNotify
	FrameHello
	FrameWelcome
	FrameSegment
	FrameTicket
	FrameCredit
	endOfFrameTypes
)

// Limits of a frame. They are far above what a sane peer sends and low enough that a length can be trusted.
const (
	HeaderSize = 48
	MaxBody    = 256 << 20
	MaxPayload = 1 << 30
	// MaxGreeting bounds the body of a hello and of a welcome, which come from a peer that has not proved itself.
	MaxGreeting = 512

	magic = 'T' | 'Q'<<8 | '1'<<16 | 'F'<<24
	// Frames up to this size are copied into one buffer: one write of it is cheaper than a vector.
	coalesceLimit = 16 << 10
	// Bigger parts are read in growing steps, so that a length alone does not make us allocate.
	trustedLength = 4 << 20
)

// Frame is a message with its header. The zero value may be read into and written again and again; each read makes new
// Body and Payload (nil when empty), which belong to the reader.
type Frame struct {
	Type     FrameType
	Op       uint16
	ID       uint64
	Sequence uint64
	Ack      uint64
	Timeout  time.Duration // whole milliseconds on the wire, rounded up; 0: none, negative: over when the frame was read
	Due      bool          // to be written: the timeout counts from now, by a clock that both sides have
	Body     []byte
	Payload  []byte

	head [HeaderSize]byte
}

// Size returns the bytes of the frame on the wire.
func (f *Frame) Size() int { return HeaderSize + len(f.Body) + len(f.Payload) }

// Check refuses a frame that is larger than a reader accepts.
func (f *Frame) Check() error {
	if len(f.Body) > MaxBody {
		return tqerr.New(tqerr.InvalidArgument, "body of %d bytes, limit %d", len(f.Body), MaxBody)
	}
	if len(f.Payload) > MaxPayload {
		return tqerr.New(tqerr.InvalidArgument, "payload of %d bytes, limit %d", len(f.Payload), MaxPayload)
	}
	return nil
}

// AppendHeader appends the header.
func (f *Frame) AppendHeader(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, magic)
	timeout, due := milliseconds(f.Timeout), byte(0)
	if f.Due && f.Timeout > 0 && f.Timeout < mostDue {
		timeout, due = timeout+clock(), 1
	}
	b = append(b, byte(f.Type), due)
	b = binary.LittleEndian.AppendUint16(b, f.Op)
	b = binary.LittleEndian.AppendUint64(b, f.ID)
	b = binary.LittleEndian.AppendUint64(b, f.Sequence)
	b = binary.LittleEndian.AppendUint64(b, f.Ack)
	b = binary.LittleEndian.AppendUint32(b, timeout)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(f.Body)))
	return binary.LittleEndian.AppendUint64(b, uint64(len(f.Payload)))
}

// milliseconds rounds up, because 0 would mean that there is no timeout; a timeout beyond 49 days becomes 49 days.
func milliseconds(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	ms := uint64((d-1)/time.Millisecond) + 1
	return uint32(min(ms, 1<<32-1))
}

// mostDue bounds a timeout that is told as a point of time: half of what its 32 bits go round.
const mostDue = (1<<31 - 1) * time.Millisecond

// began is a moment of this process, by its own clock and by that of the host since its start.
var began, sinceBoot = time.Now(), monotonic()

func monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // cannot fail: every Linux has it
	return time.Duration(now.Nano())
}

// clock is the time since the start of the host as frames have it.
func clock() uint32 { return uint32((sinceBoot + time.Since(began)).Milliseconds()) }

// late is how much later than its timeout a request may arrive: whoever made it waits longer than that for an answer.
const late = 100 * time.Millisecond

// left is how long a point of time is away, negative when it is over.
func left(due uint32) time.Duration {
	if d := time.Duration(int32(due-clock())) * time.Millisecond; d > -late {
		return max(d, time.Millisecond)
	}
	return -1
}

// parseHeader fills the frame from its head and returns the sizes of what follows.
func (f *Frame) parseHeader() (body, payload int, err error) {
	h := f.head[:]
	if got := binary.LittleEndian.Uint32(h); got != magic {
		return 0, 0, tqerr.New(tqerr.Corruption, "frame starts with %08x, want %08x", got, uint32(magic))
	}
	f.Type = FrameType(h[4])
	if f.Type == 0 || f.Type >= endOfFrameTypes || h[5] > 1 {
		return 0, 0, tqerr.New(tqerr.Corruption, "frame of unknown type %d.%d", h[4], h[5])
	}
	f.Op = binary.LittleEndian.Uint16(h[6:])
	f.ID = binary.LittleEndian.Uint64(h[8:])
	f.Sequence = binary.LittleEndian.Uint64(h[16:])
	f.Ack = binary.LittleEndian.Uint64(h[24:])
	f.Timeout = time.Duration(binary.LittleEndian.Uint32(h[32:])) * time.Millisecond
	if h[5] == 1 {
		f.Timeout = left(binary.LittleEndian.Uint32(h[32:]))
	}
	bodySize, payloadSize := binary.LittleEndian.Uint32(h[36:]), binary.LittleEndian.Uint64(h[40:])
	f.Body, f.Payload = nil, nil
	limit := uint32(MaxBody)
	if f.Type == FrameHello || f.Type == FrameWelcome {
		limit = MaxGreeting
	}
	if bodySize > limit {
		return 0, 0, tqerr.New(tqerr.Corruption, "frame with a body of %d bytes, limit %d", bodySize, limit)
	}
	if payloadSize > MaxPayload {
		return 0, 0, tqerr.New(tqerr.Corruption, "frame with a payload of %d bytes, limit %d", payloadSize, MaxPayload)
	}
	return int(bodySize), int(payloadSize), nil
}

// ReadFrame reads one frame. A stream that ends between frames gives io.EOF itself; one that ends inside a frame, another
// magic, an unknown type and a length beyond the limits are Corruption. Other errors of r are returned as they are.
func ReadFrame(r io.Reader, f *Frame) error {
	if n, err := io.ReadFull(r, f.head[:]); err != nil {
		return torn(err, "header", n, HeaderSize)
	}
	body, payload, err := f.parseHeader()
	if err != nil {
		return err
	}
	if f.Body, err = readPart(r, "body", body); err != nil {
		return err
	}
	f.Payload, err = readPart(r, "payload", payload)
	return err
}

// torn turns the end of the stream inside a frame into Corruption.
func torn(err error, part string, got, want int) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || (errors.Is(err, io.EOF) && part != "header") {
		return tqerr.New(tqerr.Corruption, "frame is torn: %d of %d bytes of its %s", got, want, part)
	}
	return err
}

func readPart(r io.Reader, part string, size int) ([]byte, error) {
	if size == 0 {
		return nil, nil
	}
	buf := make([]byte, min(size, trustedLength))
	got := 0
	for {
		n, err := io.ReadFull(r, buf[got:])
		got += n
		if err != nil {
			return nil, torn(err, part, got, size)
		}
		if got == size {
			return buf, nil
		}
		grown := make([]byte, min(size, 4*len(buf)))
		copy(grown, buf)
		buf = grown
	}
}

var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, coalesceLimit); return &b }}

// WriteFrame writes one frame: a small one with one Write, a large one with one writev where w has it. A frame beyond
// the limits is refused and nothing is written.
func WriteFrame(w io.Writer, f *Frame) error {
	if err := f.Check(); err != nil {
		return err
	}
	if f.Small() {
		buf := frameBuffers.Get().(*[]byte)
		*buf = f.Append((*buf)[:0])
		_, err := w.Write(*buf)
		frameBuffers.Put(buf)
		return err
	}
	buffers := f.Buffers()
	_, err := buffers.WriteTo(w)
	return err
}

// Small tells whether the frame is better copied into one buffer than written as a vector.
func (f *Frame) Small() bool { return f.Size() <= coalesceLimit }

// Append appends the whole frame.
func (f *Frame) Append(b []byte) []byte {
	return append(append(f.AppendHeader(b), f.Body...), f.Payload...)
}

// Buffers returns header, body and payload without copying the latter; the header lives in f.
func (f *Frame) Buffers() net.Buffers {
	parts := net.Buffers{f.AppendHeader(f.head[:0])}
	for _, p := range [...][]byte{f.Body, f.Payload} {
		if len(p) > 0 {
			parts = append(parts, p)
		}
	}
	return parts
}

// Hello makes the first frame of a connection.
func Hello(peer uint64, secret []byte) *Frame {
	return &Frame{Type: FrameHello, Op: Version, ID: peer, Body: secret}
}

// CheckVersion compares the version of the other side with ours.
func CheckVersion(theirs uint64) error {
	if theirs != Version {
		return tqerr.New(tqerr.VersionMismatch, "the other side speaks protocol version %d, this side version %d", theirs, Version)
	}
	return nil
}
