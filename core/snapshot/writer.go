package snapshot

import (
	"bufio"
	"encoding/binary"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// Kind says what a file is.
type Kind uint16

// The kinds of files.
const (
	StateFile Kind = iota + 1
	IndexFile
	ValuesFile
	RowsFile
)

const version = 1

// magic begins every file. As in PNG its ends show a transfer that takes the file for text.
const magic = "\x89TQS\r\n\x1a\n"

const (
	headerSize = 16
	headSize   = 16
)

// Types of records. Numbers are format: new ones are only appended.
const (
	recordData = iota + 1
	recordHead
	recordUsed
	recordPartition
	recordSamples
	recordKeys
	recordTags
	recordField
	recordHolders
	recordTask
	recordConsumed
	recordSampler
	recordRows
	recordPart
	recordBirths
	recordLost
	recordEnd = 255
)

const (
	plain = iota
	packed
)

const (
	// blockSize is the most bytes of a data record.
	blockSize = 4 << 20
	// sampleSize is how many bytes of a block are packed to see whether the rest is worth it.
	sampleSize = 16 << 10
	// alwaysPacked is the share to which a sample shrinks when its bytes are so alike that packing is quick.
	alwaysPacked = 1.0 / 64
	// maxRecord bounds the bytes of a record; it is above what a message can hold.
	maxRecord = 1 << 30
)

// end is the body of the last record.
type end struct {
	Records uint64
	Bytes   uint64
}

// writer writes one file. It is not safe for concurrent use.
type writer struct {
	out     *bufio.Writer
	records uint64
	bytes   uint64 // raw, in records
	size    int64  // of the file
	digest  uint32
	pending []byte // of the data stream
	encoder *zstd.Encoder
	scratch []byte
	perByte float64 // nanoseconds that writing a byte takes
	// packing is what packing a byte of a whole block has taken; a sample alone is too short to be interrupted. It decays, so
	// that packing is tried again.
	packing float64
}

// firstGuess is a fast disk's nanoseconds per byte, until the file's own are known.
const firstGuess = 0.7

func newWriter(out io.Writer, kind Kind) (*writer, error) {
	w := &writer{out: bufio.NewWriterSize(out, 256<<10), perByte: firstGuess}
	h := binary.LittleEndian.AppendUint16([]byte(magic), version)
	h = binary.LittleEndian.AppendUint16(h, uint16(kind))
	h = binary.LittleEndian.AppendUint32(h, crc32c.Checksum(h))
	return w, w.head(h)
}

// head writes bytes that the digest covers.
func (w *writer) head(h []byte) error {
	w.digest = crc32c.Update(w.digest, h)
	w.size += int64(len(h))
	_, err := w.out.Write(h)
	return err
}

// record writes a message.
func (w *writer) record(kind byte, message any) error {
	body, err := wire.Marshal(message)
	if err != nil {
		return err
	}
	stored, packing := body, byte(plain)
	if len(body) <= blockSize {
		stored, packing = w.pack(body)
	}
	return w.write(kind, packing, stored, len(body))
}

func (w *writer) write(kind, packing byte, stored []byte, raw int) error {
	if raw > maxRecord {
		return tqerr.New(tqerr.InvalidArgument, "a record of %d bytes, limit %d", raw, maxRecord)
	}
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], w.records)
	h := [headSize]byte{kind, packing}
	binary.LittleEndian.PutUint32(h[4:], uint32(len(stored)))
	binary.LittleEndian.PutUint32(h[8:], uint32(raw))
	sum := crc32c.Checksum(number[:])
	sum = crc32c.Update(sum, h[:12])
	binary.LittleEndian.PutUint32(h[12:], crc32c.Update(sum, stored))
	if kind != recordEnd {
		w.records++
		w.bytes += uint64(raw)
	}
	if err := w.head(h[:]); err != nil {
		return err
	}
	w.size += int64(len(stored))
	_, err := w.out.Write(stored)
	return err
}

// data appends to the stream. It may keep b until flush only as a copy.
func (w *writer) data(b []byte) error {
	for len(b) > 0 {
		if len(w.pending) == 0 && len(b) >= blockSize {
			if err := w.block(b[:blockSize]); err != nil {
				return err
			}
			b = b[blockSize:]
			continue
		}
		n := min(len(b), blockSize-len(w.pending))
		w.pending = append(w.pending, b[:n]...)
		b = b[n:]
		if len(w.pending) == blockSize {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush ends a stream.
func (w *writer) flush() error {
	b := w.pending
	w.pending = w.pending[:0]
	if len(b) == 0 {
		return nil
	}
	return w.block(b)
}

func (w *writer) block(b []byte) error {
	stored, packing := w.pack(b)
	return w.timed(recordData, packing, stored, len(b))
}

// timed is write for a block, which tells packing what it competes with.
func (w *writer) timed(kind, packing byte, stored []byte, raw int) error {
	begun := time.Now()
	err := w.write(kind, packing, stored, raw)
	if len(stored) >= blockSize/4 {
		perByte := float64(time.Since(begun)) / float64(len(stored))
		w.perByte += (perByte - w.perByte) / 8
	}
	return err
}

// pack returns the bytes packed when that pays, else as they are: when they shrink to half, and a file takes at most twice
// as long by it.
func (w *writer) pack(b []byte) (stored []byte, packing byte) {
	if len(b) < 512 {
		return b, plain
	}
	if w.encoder == nil {
		// Without an output and with one worker nothing runs beside the caller and nothing can fail.
		w.encoder, _ = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
			zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(false))
	}
	if len(b) > 2*sampleSize {
		middle, begun := len(b)/2, time.Now()
		w.scratch = w.encoder.EncodeAll(b[middle:middle+sampleSize], w.scratch[:0])
		perByte := max(float64(time.Since(begun))/sampleSize, w.packing)
		share := float64(len(w.scratch)) / sampleSize
		if share > 0.5 || share > alwaysPacked && perByte > (2-share)*w.perByte {
			w.packing *= 0.98
			return b, plain
		}
	}
	begun := time.Now()
	w.scratch = w.encoder.EncodeAll(b, w.scratch[:0])
	if len(b) > 2*sampleSize {
		w.packing = float64(time.Since(begun)) / float64(len(b))
	}
	if len(w.scratch) > len(b)/2 {
		return b, plain
	}
	return w.scratch, packed
}

// finish writes the end record.
func (w *writer) finish() error {
	body, err := wire.Marshal(&end{w.records, w.bytes})
	if err != nil {
		return err
	}
	if err := w.write(recordEnd, plain, body, len(body)); err != nil {
		return err
	}
	if w.encoder != nil {
		_ = w.encoder.Close() // it has no output
	}
	return w.out.Flush()
}
