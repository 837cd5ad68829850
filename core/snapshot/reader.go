package snapshot

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"

	"github.com/klauspost/compress/zstd"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// reader reads one file and checks every byte of it.
type reader struct {
	name    string // for errors
	in      *bufio.Reader
	left    int64 // bytes of the file behind what was read
	records uint64
	bytes   uint64
	digest  uint32
	decoder *zstd.Decoder
	stored  []byte
	raw     []byte
}

// bad makes the error for a file that is not as it was written.
func (r *reader) bad(format string, args ...any) error {
	return tqerr.New(tqerr.Corruption, "%s: "+format, append([]any{r.name}, args...)...)
}

// newReader reads the header of a file of so many bytes.
func newReader(name string, in io.Reader, size int64, kind Kind) (*reader, error) {
	r := &reader{name: name, in: bufio.NewReaderSize(in, 256<<10), left: size}
	var h [headerSize]byte
	if err := r.head(h[:]); err != nil {
		return nil, err
	}
	if string(h[:8]) != magic {
		return nil, r.bad("not a file of this format")
	}
	if v := binary.LittleEndian.Uint16(h[8:]); v != version {
		return nil, tqerr.New(tqerr.VersionMismatch, "%s: format version %d, this release reads %d", name, v, version)
	}
	if crc32c.Checksum(h[:12]) != binary.LittleEndian.Uint32(h[12:]) {
		return nil, r.bad("the header is damaged")
	}
	if k := Kind(binary.LittleEndian.Uint16(h[10:])); k != kind {
		return nil, r.bad("a file of kind %d, want %d", k, kind)
	}
	return r, nil
}

// head reads bytes that the digest covers.
func (r *reader) head(h []byte) error {
	if int64(len(h)) > r.left {
		return r.bad("cut off")
	}
	if err := r.full(h); err != nil {
		return err
	}
	r.digest = crc32c.Update(r.digest, h)
	return nil
}

func (r *reader) full(b []byte) error {
	n, err := io.ReadFull(r.in, b)
	r.left -= int64(n)
	switch err {
	case nil:
		return nil
	case io.EOF, io.ErrUnexpectedEOF:
		return r.bad("cut off")
	default:
		return tqerr.Wrap(tqerr.IO, err, "%s", r.name)
	}
}

// recordHeader is the fixed part of a record, checked for what can be checked without the bytes behind it.
type recordHeader struct {
	kind, packing byte
	stored, raw   int
	sum           uint32 // as written
	begun         uint32 // of what precedes the stored bytes
}

func (r *reader) header() (recordHeader, error) {
	var h [headSize]byte
	if err := r.head(h[:]); err != nil {
		return recordHeader{}, err
	}
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], r.records)
	out := recordHeader{
		kind: h[0], packing: h[1],
		stored: int(binary.LittleEndian.Uint32(h[4:])), raw: int(binary.LittleEndian.Uint32(h[8:])),
		sum: binary.LittleEndian.Uint32(h[12:]),
	}
	out.begun = crc32c.Update(crc32c.Checksum(number[:]), h[:12])
	switch {
	case int64(out.stored) > r.left:
		return out, r.bad("record %d: cut off", r.records)
	case out.packing == plain && out.stored == out.raw && out.raw <= maxRecord:
	case out.packing == packed && out.raw <= blockSize && out.stored <= out.raw:
	default:
		return out, r.bad("record %d is damaged", r.records)
	}
	return out, nil
}

func (r *reader) count(h recordHeader) {
	if h.kind != recordEnd {
		r.records++
		r.bytes += uint64(h.raw)
	}
}

// next reads a record that is no data. The body is valid until the next call.
func (r *reader) next() (kind byte, body []byte, err error) {
	h, err := r.header()
	if err != nil {
		return 0, nil, err
	}
	if cap(r.stored) < h.stored {
		r.stored = make([]byte, h.stored)
	}
	body = r.stored[:h.stored]
	if err := r.full(body); err != nil {
		return 0, nil, err
	}
	if crc32c.Update(h.begun, body) != h.sum {
		return 0, nil, r.bad("record %d is damaged", r.records)
	}
	if h.packing == packed {
		if body, err = r.unpack(body, h.raw); err != nil {
			return 0, nil, err
		}
	}
	r.count(h)
	if h.kind == recordEnd {
		return h.kind, body, r.atEnd(body)
	}
	return h.kind, body, nil
}

func (r *reader) unpack(stored []byte, raw int) ([]byte, error) {
	if r.decoder == nil {
		r.decoder, _ = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*blockSize))
	}
	if cap(r.raw) < raw {
		r.raw = make([]byte, 0, raw)
	}
	out, err := r.decoder.DecodeAll(stored, r.raw[:0])
	if err != nil || len(out) != raw {
		return nil, r.bad("record %d cannot be unpacked", r.records)
	}
	r.raw = out
	return out, nil
}

func (r *reader) atEnd(body []byte) error {
	var e end
	if err := r.message(body, &e); err != nil {
		return err
	}
	if e.Records != r.records || e.Bytes != r.bytes || r.left != 0 {
		return r.bad("%d records with %d bytes and %d bytes behind them, the end says %d and %d", r.records, r.bytes, r.left, e.Records, e.Bytes)
	}
	return nil
}

// close frees what unpacking has used.
func (r *reader) close() {
	if r.decoder != nil {
		r.decoder.Close()
	}
}

// message decodes the body of a record.
func (r *reader) message(body []byte, v any) error {
	if err := wire.Unmarshal(body, v); err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "%s: record %d", r.name, r.records)
	}
	return nil
}

// readFile hands the records of a file to a function, without the end. It returns what pins the file.
func readFile(fs vfs.FS, path string, kind Kind, take func(r *reader, kind byte, body []byte) error) (size int64, digest uint32, err error) {
	f, err := fs.Open(path)
	if err != nil {
		return 0, 0, vfs.Wrap(err)
	}
	defer func() { _ = f.Close() }() // nothing that was read is lost by it
	info, err := f.Stat()
	if err != nil {
		return 0, 0, vfs.Wrap(err)
	}
	if !info.Mode().IsRegular() {
		return 0, 0, tqerr.New(tqerr.Corruption, "%s: not a file", path)
	}
	digest, err = readStream(path, f, info.Size(), kind, take)
	return info.Size(), digest, err
}

// readStream hands out the records of so many bytes, and checks all of them.
func readStream(name string, in io.Reader, size int64, kind Kind, take func(r *reader, kind byte, body []byte) error) (digest uint32, err error) {
	r, err := newReader(name, in, size, kind)
	if err != nil {
		return 0, err
	}
	defer r.close()
	for first := true; ; first = false {
		kind, body, err := r.next()
		switch {
		case err != nil:
			return 0, err
		case kind == recordEnd:
			return r.digest, nil
		case first != (kind == recordHead):
			return 0, r.bad("the head record is not the first")
		}
		if err := take(r, kind, body); err != nil {
			return 0, err
		}
	}
}

// origin reads a head record: the cut, and the lineage in a state.
func (r *reader) origin(body []byte, cut *Cut) (lineage uint64, err error) {
	var x headRecord
	if err := r.message(body, &x); err != nil {
		return 0, err
	}
	if len(x.Cut) != len(cut) {
		return 0, r.bad("a cut of %d bytes, want %d", len(x.Cut), len(cut))
	}
	*cut = Cut(x.Cut)
	return x.Lineage, nil
}

// cut reads the head record of a file that has no state.
func (r *reader) cut(body []byte, cut *Cut) error {
	_, err := r.origin(body, cut)
	return err
}

// data fills the places of a stream, one after another, from the data records that come next.
func (r *reader) data(ctx context.Context, places [][]byte) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		for len(places) > 0 && len(places[0]) == 0 {
			places = places[1:]
		}
		if len(places) == 0 {
			return nil
		}
		h, err := r.header()
		if err != nil {
			return err
		}
		if h.kind != recordData || h.raw == 0 || h.raw > blockSize {
			return r.bad("record %d: bytes of values are missing", r.records)
		}
		if h.packing == packed {
			places, err = r.dataPacked(h, places)
		} else {
			places, err = r.dataPlain(h, places)
		}
		if err != nil {
			return err
		}
		r.count(h)
	}
}

func (r *reader) dataPlain(h recordHeader, places [][]byte) ([][]byte, error) {
	sum, left := h.begun, h.raw
	for left > 0 {
		if len(places) == 0 {
			return nil, r.bad("record %d: more bytes than values", r.records)
		}
		n := min(left, len(places[0]))
		piece := places[0][:n]
		if err := r.full(piece); err != nil {
			return nil, err
		}
		sum = crc32c.Update(sum, piece)
		left -= n
		if places[0] = places[0][n:]; len(places[0]) == 0 {
			places = places[1:]
		}
	}
	if sum != h.sum {
		return nil, r.bad("record %d is damaged", r.records)
	}
	return places, nil
}

func (r *reader) dataPacked(h recordHeader, places [][]byte) ([][]byte, error) {
	if cap(r.stored) < h.stored {
		r.stored = make([]byte, h.stored)
	}
	stored := r.stored[:h.stored]
	if err := r.full(stored); err != nil {
		return nil, err
	}
	if crc32c.Update(h.begun, stored) != h.sum {
		return nil, r.bad("record %d is damaged", r.records)
	}
	raw, err := r.unpack(stored, h.raw)
	for err == nil && len(raw) > 0 {
		if len(places) == 0 {
			return nil, r.bad("record %d: more bytes than values", r.records)
		}
		n := copy(places[0], raw)
		raw = raw[n:]
		if places[0] = places[0][n:]; len(places[0]) == 0 {
			places = places[1:]
		}
	}
	return places, err
}
