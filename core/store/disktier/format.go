package disktier

import (
	"bytes"
	"encoding/binary"
	"math"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

const (
	formatVersion = 1
	headerBytes   = 64
	frameBytes    = 28 // of a frame without its body
	valuesKind    = 1
	indexKind     = 2
	bindEntry     = 1
	dropEntry     = 2
	ownerEntry    = 3
	changeEntry   = 4
	holdEntry     = 5
	releaseEntry  = 6
	// maxBody bounds the body of a frame.
	maxBody = 1 << 30
)

var (
	headerMagic = []byte("TQ\xf5DISK\n")
	frameMagic  = []byte("TQf\x01")
	order       = binary.LittleEndian
)

type header struct {
	kind   uint16
	number uint32
	store  [16]byte
}

func (h header) encode() []byte {
	b := make([]byte, headerBytes)
	copy(b, headerMagic)
	order.PutUint16(b[8:], h.kind)
	order.PutUint16(b[10:], formatVersion)
	order.PutUint32(b[12:], h.number)
	copy(b[16:], h.store[:])
	order.PutUint32(b[60:], crc32c.Checksum(b[:60]))
	return b
}

func decodeHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes || !bytes.HasPrefix(b, headerMagic) {
		return h, tqerr.New(tqerr.Corruption, "it is not a file of a disk tier, or its header is damaged")
	}
	if order.Uint32(b[60:]) != crc32c.Checksum(b[:60]) {
		return h, tqerr.New(tqerr.Corruption, "its header is damaged")
	}
	if v := order.Uint16(b[10:]); v > formatVersion {
		return h, tqerr.New(tqerr.VersionMismatch, "it has format version %d, this program knows %d", v, formatVersion)
	}
	h.kind, h.number = order.Uint16(b[8:]), order.Uint32(b[12:])
	copy(h.store[:], b[16:32])
	return h, nil
}

// frameHeader is a frame without its body.
type frameHeader struct {
	length          uint32
	number, durable uint64
	sum             uint32
}

// appendFrame frames a body.
func appendFrame(out []byte, number, durable uint64, body []byte) []byte {
	at := len(out)
	out = append(out, frameMagic...)
	out = order.AppendUint32(out, uint32(len(body)))
	out = order.AppendUint64(out, number)
	out = order.AppendUint64(out, durable)
	sum := crc32c.Checksum(out[at:])
	out = order.AppendUint32(out, crc32c.Update(sum, body))
	return append(out, body...)
}

// decodeFrame reads the frame at the start of b; ok is false when there is none that is whole and undamaged.
func decodeFrame(b []byte) (h frameHeader, body []byte, ok bool) {
	if len(b) < frameBytes || !bytes.HasPrefix(b, frameMagic) {
		return h, nil, false
	}
	h = frameHeader{order.Uint32(b[4:]), order.Uint64(b[8:]), order.Uint64(b[16:]), order.Uint32(b[24:])}
	if h.length > maxBody || int64(len(b)) < frameBytes+int64(h.length) {
		return h, nil, false
	}
	body = b[frameBytes : frameBytes+h.length]
	sum := crc32c.Update(crc32c.Checksum(b[:24]), body)
	return h, body, sum == h.sum
}

// damagedFrame reports whether bytes at a place of an index where a frame should be are none although all of them were written.
func damagedFrame(b []byte, at int64) bool {
	for i, want := range frameMagic {
		if i < len(b) && b[i] != want {
			return b[i] != 0 // else it is torn there
		}
	}
	h, body, ok := decodeFrame(b)
	return !ok && body != nil && !vfs.MayBeTorn(b[:frameBytes+int(h.length)], at)
}

// entry is one line of a frame: a bind, or a drop when sums is nil.
type entry struct {
	partition string
	samples   []schema.Sample
	column    schema.Column // with its field
	block     store.Block
	sums      []uint32
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendSamples(b []byte, kind byte, partition, field string, samples []schema.Sample) []byte {
	b = appendText(appendText(append(b, kind), partition), field)
	b = binary.AppendUvarint(b, uint64(len(samples)))
	before := int64(-1)
	for _, s := range samples {
		b = binary.AppendVarint(b, s.Index-before-1)
		b = binary.AppendUvarint(b, uint64(s.Generation))
		before = s.Index
	}
	return b
}

// appendChange notes which change of the owner the frame executes.
func appendChange(b []byte, change uint64) []byte {
	if change == 0 {
		return b
	}
	return binary.AppendUvarint(append(b, changeEntry), change)
}

func appendOwner(b []byte, owner string) []byte {
	if owner == "" {
		return b
	}
	return appendText(append(b, ownerEntry), owner)
}

// appendHold is a bind of rows of a write instead of samples.
func appendHold(b []byte, txn uint64, e *entry) []byte {
	return appendBind(binary.AppendUvarint(append(b, holdEntry), txn), e)
}

func appendRelease(b []byte, txn uint64) []byte {
	return binary.AppendUvarint(append(b, releaseEntry), txn)
}

func appendBind(b []byte, e *entry) []byte {
	c := &e.column
	b = appendSamples(b, bindEntry, e.partition, c.Field, e.samples)
	b = binary.AppendUvarint(b, uint64(e.block.Segment))
	b = binary.AppendUvarint(b, uint64(e.block.Offset))
	b = append(b, byte(c.Kind), byte(c.DType), c.Ragged, byte(c.Form))
	b = binary.AppendUvarint(b, uint64(len(c.Shape)))
	for _, d := range c.Shape {
		b = binary.AppendUvarint(b, uint64(d))
	}
	switch b = append(b, c.Vary); c.Form {
	case schema.Varying:
		for _, n := range c.Lengths {
			b = binary.AppendUvarint(b, uint64(n))
		}
	case schema.Free:
		at := 0
		for _, n := range c.NDims {
			b = binary.AppendUvarint(b, uint64(n))
			for _, d := range c.Dims[at : at+int(n)] {
				b = binary.AppendUvarint(b, uint64(d))
			}
			at += int(n)
		}
	case schema.Objects:
		for i, n := range c.Sizes {
			b = binary.AppendUvarint(append(b, byte(c.Codecs[i])), uint64(n))
		}
	}
	for _, sum := range e.sums {
		b = order.AppendUint32(b, sum)
	}
	return b
}

// decoder reads a body. After the first thing that makes no sense bad is true and everything is zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uvarint(most uint64) uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > most {
		d.b, d.bad = nil, true
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.b, d.bad = nil, true
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.b, d.bad = nil, true
		return make([]byte, min(n, 8))
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) byte() byte   { return d.take(1)[0] }
func (d *decoder) text() string { return string(d.take(d.uvarint(maxBody))) }

// count reads a number of things of which each takes at least one byte.
func (d *decoder) count() int { return int(d.uvarint(uint64(len(d.b)))) }

func (d *decoder) sizes(n int) []int64 {
	if n == 0 {
		return nil
	}
	out := make([]int64, n)
	for i := range out {
		out[i] = int64(d.uvarint(math.MaxInt64))
	}
	return out
}

func (d *decoder) samples() []schema.Sample {
	out := make([]schema.Sample, d.count())
	before := int64(-1)
	for i := range out {
		out[i] = schema.Sample{Index: before + 1 + d.varint(), Generation: uint32(d.uvarint(math.MaxUint32))}
		if before = out[i].Index; before < 0 {
			d.b, d.bad = nil, true
			return nil
		}
	}
	return out
}

// next reads the next entry. Call it while d.b has bytes.
func (d *decoder) next() (e entry, ok bool) {
	kind := d.byte()
	e.partition, e.column.Field = d.text(), d.text()
	e.samples = d.samples()
	if kind == bindEntry && !d.bad {
		d.bind(&e)
	} else if kind != dropEntry {
		d.bad = true
	}
	return e, !d.bad
}

func (d *decoder) bind(e *entry) {
	c := &e.column
	c.Rows = len(e.samples)
	e.block.Segment, e.block.Offset = uint32(d.uvarint(math.MaxUint32)), int64(d.uvarint(math.MaxInt64/2))
	c.Kind, c.DType, c.Ragged, c.Form = schema.Kind(d.byte()), schema.DType(d.byte()), d.byte(), schema.Form(d.byte())
	c.Shape = d.sizes(d.count())
	switch c.Vary = d.byte(); c.Form {
	case schema.Varying:
		c.Lengths = d.sizes(c.Rows)
	case schema.Free:
		for i := 0; i < c.Rows && !d.bad; i++ {
			n := d.uvarint(schema.MaxDims)
			c.NDims, c.Dims = append(c.NDims, uint8(n)), append(c.Dims, d.sizes(int(n))...)
		}
	case schema.Objects:
		for i := 0; i < c.Rows && !d.bad; i++ {
			c.Codecs, c.Sizes = append(c.Codecs, schema.Codec(d.byte())), append(c.Sizes, int64(d.uvarint(math.MaxInt64)))
		}
	}
	e.sums = make([]uint32, c.Rows)
	for i := range e.sums {
		e.sums[i] = order.Uint32(d.take(4))
	}
	if d.bad = d.bad || c.Validate() != nil || e.block.Offset < valuesStart; !d.bad {
		e.block.Size = c.Bytes()
		d.bad = e.block.Size > math.MaxInt64/2
	}
}
