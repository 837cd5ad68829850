package journal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/tqerr"
)

const (
	formatVersion = 1
	headerBytes   = 64
	frameBytes    = 28 // of a frame without its body
	logKind       = 1
	stateKind     = 2
	// maxBody bounds the body of a frame.
	maxBody = 1 << 30
)

var (
	headerMagic = []byte("TQ\xf5JRNL\n")
	frameMagic  = []byte("TQj\x01")
	order       = binary.LittleEndian
)

const (
	lockName    = "lock"
	endedName   = "ended"
	newSuffix   = ".new"
	logPrefix   = "log-"
	statePrefix = "state-"
)

func logName(number uint32) string   { return fmt.Sprintf("%s%08d", logPrefix, number) }
func stateName(number uint32) string { return fmt.Sprintf("%s%08d", statePrefix, number) }

// numberOf reads the number out of the name of a file of a kind.
func numberOf(name, prefix string) (uint32, bool) {
	digits, is := strings.CutPrefix(name, prefix)
	if !is || len(digits) < 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), err == nil && n > 0 && name == fmt.Sprintf("%s%08d", prefix, n)
}

type header struct {
	kind     uint16
	number   uint32
	identity [16]byte
	first    uint64
}

func (h header) encode() []byte {
	b := make([]byte, headerBytes)
	copy(b, headerMagic)
	order.PutUint16(b[8:], h.kind)
	order.PutUint16(b[10:], formatVersion)
	order.PutUint32(b[12:], h.number)
	copy(b[16:], h.identity[:])
	order.PutUint64(b[32:], h.first)
	order.PutUint32(b[60:], crc32c.Checksum(b[:60]))
	return b
}

func decodeHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes || !bytes.HasPrefix(b, headerMagic) {
		return h, tqerr.New(tqerr.Corruption, "it is not a file of a journal, or its header is damaged")
	}
	if order.Uint32(b[60:]) != crc32c.Checksum(b[:60]) {
		return h, tqerr.New(tqerr.Corruption, "its header is damaged")
	}
	if v := order.Uint16(b[10:]); v > formatVersion {
		return h, tqerr.New(tqerr.VersionMismatch, "it has format version %d, this program knows %d", v, formatVersion)
	}
	h = header{kind: order.Uint16(b[8:]), number: order.Uint32(b[12:]), first: order.Uint64(b[32:])}
	copy(h.identity[:], b[16:32])
	return h, nil
}

// frame is a frame as it was read.
type frame struct {
	sequence, durable uint64
	body              []byte
}

// appendFrame frames a body.
func appendFrame(out []byte, identity *[16]byte, sequence, durable uint64, body []byte) []byte {
	at := len(out)
	out = append(out, frameMagic...)
	out = order.AppendUint32(out, uint32(len(body)))
	out = order.AppendUint64(out, sequence)
	out = order.AppendUint64(out, durable)
	out = order.AppendUint32(out, frameSum(identity, out[at:], body))
	return append(out, body...)
}

// frameSum begins with the identity, so that bytes of a user which look like a frame are none.
func frameSum(identity *[16]byte, head, body []byte) uint32 {
	sum := crc32c.Update(crc32c.Checksum(identity[:]), head)
	return crc32c.Update(sum, body)
}

// decodeFrame reads the frame at the start of b; ok is false when there is none that is whole and undamaged.
func decodeFrame(b []byte, identity *[16]byte) (f frame, size int, ok bool) {
	if len(b) < frameBytes || !bytes.HasPrefix(b, frameMagic) {
		return f, 0, false
	}
	length := order.Uint32(b[4:])
	if length > maxBody || int64(len(b)) < frameBytes+int64(length) {
		return f, 0, false
	}
	size = frameBytes + int(length)
	f = frame{sequence: order.Uint64(b[8:]), durable: order.Uint64(b[16:]), body: b[frameBytes:size:size]}
	return f, size, frameSum(identity, b[:24], f.body) == order.Uint32(b[24:])
}

// appendRecord puts a record into a body.
func appendRecord(body, record []byte) []byte {
	return append(binary.AppendUvarint(body, uint64(len(record))), record...)
}

// eachRecord hands out the records of a body.
func eachRecord(body []byte, do func(record []byte) error) error {
	for len(body) > 0 {
		n, size := binary.Uvarint(body)
		if size <= 0 || n > uint64(len(body)-size) {
			return tqerr.New(tqerr.Corruption, "a record is longer than its frame")
		}
		end := size + int(n)
		if err := do(body[size:end:end]); err != nil {
			return err
		}
		body = body[end:]
	}
	return nil
}
