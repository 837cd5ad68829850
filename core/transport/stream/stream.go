// Package stream carries payload over TCP straight between a client's memory and that of a server. It stands beside a
// connection that has authenticated its peer and hands out tickets; a ticket is good for one stream and for a short time.
// Streams of a listener with an Identity are TLS 1.3, and everything below is inside of it.
//
// A stream begins with a greeting, and is then used for one transfer after the other. All numbers are little-endian:
//
//	greeting  client  | TQ1S | ticket, 16 bytes |
//	          server  | status |
//	transfer  client  | kind u8 | zero, 3 bytes | grant u64 | offset u64 | length u64 |
//	  write   client  | bytes | crc32c u32 |
//	          server  | status |
//	  read    server  | status | bytes | crc32c u32 |, only the status when it is not OK
//	status            | tqerr.Code u16 | length u16 | text |
//
// The bytes of a transfer are numbered as transport.Grant says, so a client that splits a batch over streams, or repeats a
// part of it, writes the same bytes to the same places.
//
// Locks: all are leaves.
package stream

import (
	"encoding/binary"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/tqerr"
)

const (
	magic      = "TQ1S"
	ticketSize = 16
	headerSize = 28
	maxText    = 4 << 10
	// pieceSize is how much is moved under one deadline, and is summed while it is in the cache.
	pieceSize = 512 << 10
)

// kinds of a transfer
const (
	kindWrite = 1
	kindRead  = 2
)

// Limits bound what a peer that does nothing can hold up.
type Limits struct {
	// Greeting is how long a ticket is good for, and how long its bearer may take to show it.
	Greeting time.Duration
	// Stall is how long a transfer may move no byte at all.
	Stall time.Duration
}

// DefaultLimits are far above what a working network needs.
var DefaultLimits = Limits{Greeting: 10 * time.Second, Stall: 30 * time.Second}

// transfer is the header of a transfer.
type transfer struct {
	kind                  uint8
	grant, offset, length uint64
}

func (t *transfer) append(b []byte) []byte {
	b = append(b, t.kind, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, t.grant)
	b = binary.LittleEndian.AppendUint64(b, t.offset)
	return binary.LittleEndian.AppendUint64(b, t.length)
}

func (t *transfer) parse(b []byte) error {
	t.kind, t.grant = b[0], binary.LittleEndian.Uint64(b[4:])
	t.offset, t.length = binary.LittleEndian.Uint64(b[12:]), binary.LittleEndian.Uint64(b[20:])
	if (t.kind != kindWrite && t.kind != kindRead) || b[1]|b[2]|b[3] != 0 {
		return tqerr.New(tqerr.Corruption, "transfer of unknown kind %d", t.kind)
	}
	return nil
}

func statusOf(err error) []byte {
	text := ""
	if err != nil {
		text = err.Error()
	}
	text = text[:min(len(text), maxText)]
	b := binary.LittleEndian.AppendUint16(nil, uint16(tqerr.CodeOf(err)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	return append(b, text...)
}

func writeStatus(w io.Writer, err error) error {
	_, werr := w.Write(statusOf(err))
	return werr
}

// readStatus returns what the server said, and separately that it could not be read.
func readStatus(r io.Reader) (said *tqerr.Error, err error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	code, size := tqerr.Code(binary.LittleEndian.Uint16(head[:])), int(binary.LittleEndian.Uint16(head[2:]))
	if size > maxText {
		return nil, tqerr.New(tqerr.Corruption, "status with a text of %d bytes, limit %d", size, maxText)
	}
	text := make([]byte, size)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, err
	}
	if code == tqerr.OK {
		return nil, nil
	}
	return &tqerr.Error{Code: code, Msg: string(text)}, nil
}

// together is how many small pieces go out at once.
const together = 64

// writeBytes writes a head, pieces, and their sum. Small pieces go out together. Each write has a deadline of its own, so
// that only a peer that takes nothing fails; with stall 0 the deadline is the caller's business. All but the last pieces are
// summed after they were written: the kernel's copy brings them into the cache in less time than the sum would.
func writeBytes(conn net.Conn, head []byte, pieces [][]byte, stall time.Duration) error {
	all := append(make(net.Buffers, 0, together+2), head)
	batch, size, sum := make([][]byte, 0, together), 0, uint32(0)
	write := func(tail ...[]byte) error {
		if stall > 0 {
			_ = conn.SetWriteDeadline(time.Now().Add(stall))
		}
		err := writeAll(conn, append(append(all, batch...), tail...))
		all = all[:0]
		return err
	}
	add := func() {
		for _, p := range batch {
			sum = crc32c.Update(sum, p)
		}
	}
	for _, p := range pieces {
		for len(p) > 0 {
			if size == pieceSize || len(batch) == cap(batch) {
				if err := write(); err != nil {
					return err
				}
				add()
				batch, size = batch[:0], 0
			}
			n := min(len(p), pieceSize-size)
			batch, size, p = append(batch, p[:n]), size+n, p[n:]
		}
	}
	add()
	return write(binary.LittleEndian.AppendUint32(nil, sum))
}

// readBytes fills pieces and checks the sum behind them. Small pieces are read together with what follows.
func readBytes(conn net.Conn, pieces [][]byte, stall time.Duration) error {
	r := &gathered{conn: conn}
	left := totalOf(pieces) + 4
	sum := uint32(0)
	for _, p := range pieces {
		for len(p) > 0 {
			n := min(len(p), pieceSize)
			if stall > 0 {
				_ = conn.SetReadDeadline(time.Now().Add(stall))
			}
			if err := r.fill(p[:n], left); err != nil {
				return err
			}
			left -= uint64(n)
			sum = crc32c.Update(sum, p[:n])
			p = p[n:]
		}
	}
	var end [4]byte
	if err := r.fill(end[:], left); err != nil {
		return err
	}
	if got := binary.LittleEndian.Uint32(end[:]); got != sum {
		return tqerr.New(tqerr.Corruption, "payload has crc32c %08x, announced as %08x", sum, got)
	}
	return nil
}

// gathered reads a connection, small pieces through a buffer that never holds more than the transfer has left: a thousand
// rows of a kilobyte would be a thousand calls of the system.
type gathered struct {
	conn net.Conn
	buf  []byte
	rest []byte // read and not handed out
}

const gatherLimit = 32 << 10

func (g *gathered) fill(p []byte, left uint64) error {
	n := copy(p, g.rest)
	g.rest, p, left = g.rest[n:], p[n:], left-uint64(n)
	if len(p) == 0 {
		return nil
	}
	if len(p) >= gatherLimit {
		_, err := io.ReadFull(g.conn, p)
		return err
	}
	if g.buf == nil {
		g.buf = make([]byte, min(left, 2*gatherLimit))
	}
	read, err := io.ReadAtLeast(g.conn, g.buf[:min(left, uint64(len(g.buf)))], len(p))
	g.rest = g.buf[:read]
	if err != nil {
		return err
	}
	g.rest = g.rest[copy(p, g.rest):]
	return nil
}

// cut returns the part of pieces, one behind the other, from an offset on.
func cut(pieces [][]byte, offset, length uint64) ([][]byte, error) {
	total := totalOf(pieces)
	if offset > total || length > total-offset {
		return nil, tqerr.New(tqerr.InvalidArgument, "bytes %d to %d of a grant of %d", offset, offset+length, total)
	}
	var out [][]byte
	for _, p := range pieces {
		if length == 0 {
			break
		}
		if size := uint64(len(p)); offset >= size {
			offset -= size
			continue
		}
		p = p[offset:]
		p = p[:min(uint64(len(p)), length)]
		out, offset, length = append(out, p), 0, length-uint64(len(p))
	}
	return out, nil
}

func totalOf(pieces [][]byte) (total uint64) {
	for _, p := range pieces {
		total += uint64(len(p))
	}
	return total
}

// A host that sends nothing for silence has vanished. The kernel asks it every second while nothing is on its way.
const silence = 3500 * time.Millisecond

// prepare makes a connection that waits for the other host notice within four seconds that it has vanished, and send small messages
// at once.
func prepare(conn *net.TCPConn) {
	_ = conn.SetNoDelay(true)
	_ = conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3})
}

// Watch makes a connection notice that also while bytes are on their way. It ends as well when the other process takes no bytes for
// as long, for a connection that can be replaced or that carries few.
func Watch(conn net.Conn) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
		})
	}
}
