package journal

import (
	"bytes"
	"slices"
	"strings"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// look finds the files of the folder.
func (l *Log) look() error {
	names, err := l.fs.List(l.opts.Dir)
	if err != nil {
		return l.failed(err, "list the folder")
	}
	l.logs, l.states = nil, nil
	for _, name := range names {
		bare := strings.TrimSuffix(name, newSuffix)
		log, isLog := numberOf(bare, logPrefix)
		state, isState := numberOf(bare, statePrefix)
		switch {
		case name == endedName:
			l.ended = true
		case name == lockName || bare != name && (isLog || isState):
		case isLog:
			l.logs = append(l.logs, log)
		case isState:
			l.states = append(l.states, state)
		default:
			return tqerr.New(tqerr.AlreadyExists, "journal %s: %q is not a file of a journal; name another folder, or remove it", l.opts.Dir, name)
		}
	}
	slices.Sort(l.logs)
	slices.Sort(l.states)
	return nil
}

// sequenceGap is left between the changes of two lives. What a power loss has taken from the end of a log may have been executed
// somewhere, and its sequences must not be taken for those of later changes.
const sequenceGap = 1 << 32

// Recover hands out the records of the last state, with sequence 0, and of everything that was appended since, in order. It
// changes nothing.
// Nothing can be appended before a Turn has begun a log and finished a state. Found is false for a folder without a journal.
//
// Corruption and VersionMismatch name the file; errors of apply are returned as they are.
func (l *Log) Recover(apply func(sequence uint64, record []byte) error) (found bool, err error) {
	l.mu.next = 1
	l.mu.broken = tqerr.New(tqerr.InvalidState, "the journal has no log yet")
	if len(l.logs) == 0 && len(l.states) == 0 {
		l.identity = newIdentity()
		return false, nil
	}
	r := &recovery{l: l, apply: apply}
	from := uint32(1)
	if n := len(l.states); n > 0 {
		from = l.states[n-1]
		if err := r.state(from); err != nil {
			return true, err
		}
	}
	if err := r.logsFrom(from); err != nil {
		return true, err
	}
	l.identity, l.recovered = r.identity, l.mu.next-1
	l.mu.next += sequenceGap
	l.mu.durable = l.mu.next - 1
	return true, nil
}

// Recovered is the sequence of the last change that Recover has found, or of the last that the state has. Somebody who has executed
// a later one has done what a power loss has taken.
func (l *Log) Recovered() uint64 { return l.recovered }

type recovery struct {
	l        *Log
	apply    func(sequence uint64, record []byte) error
	identity [16]byte
	known    bool // identity
}

// read reads a file whole and checks its header.
func (r *recovery) read(name string, kind uint16, number uint32) (h header, data []byte, err error) {
	l := r.l
	f, err := l.fs.Open(l.path(name))
	if err != nil {
		return h, nil, l.failed(err, "open "+name)
	}
	defer func() {
		if closed := f.Close(); closed != nil && err == nil {
			err = l.failed(closed, "close "+name)
		}
	}()
	size, err := f.Size()
	if err == nil {
		data = make([]byte, size)
		_, err = f.ReadAt(data, 0)
	}
	if err != nil {
		return h, nil, l.failed(err, "read "+name)
	}
	if h, err = decodeHeader(data); err != nil {
		return h, nil, l.failed(err, name)
	}
	if h.kind != kind || h.number != number {
		return h, nil, r.bad(name, "it was another file: kind %d, number %d", h.kind, h.number)
	}
	if r.known && h.identity != r.identity {
		return h, nil, r.bad(name, "it is of another journal")
	}
	r.identity, r.known = h.identity, true
	return h, data[headerBytes:], nil
}

func (r *recovery) bad(name, format string, args ...any) error {
	return r.l.failed(tqerr.New(tqerr.Corruption, format, args...), name)
}

// state hands out the records of a state, which must be whole.
func (r *recovery) state(number uint32) error {
	name := stateName(number)
	h, data, err := r.read(name, stateKind, number)
	if err != nil {
		return err
	}
	r.l.mu.state = int64(len(data))
	for sequence := uint64(1); ; sequence++ {
		f, size, ok := decodeFrame(data, &r.identity)
		if !ok || f.sequence != sequence {
			return r.bad(name, "frame %d is damaged or missing", sequence)
		}
		data = data[size:]
		if len(f.body) == 0 {
			break
		}
		if err := eachRecord(f.body, func(b []byte) error { return r.apply(0, b) }); err != nil {
			return r.l.failed(err, name)
		}
	}
	if len(data) > 0 {
		return r.bad(name, "%d bytes behind its end", len(data))
	}
	r.l.mu.next = h.first
	return nil
}

// logsFrom hands out the records of all logs from a number on.
func (r *recovery) logsFrom(number uint32) error {
	l := r.l
	l.mu.next = max(l.mu.next, 1)
	torn := "" // the log that ends in something that is no frame
	expected := number
	for _, n := range l.logs {
		if n < number {
			continue
		}
		name := logName(n)
		// A log is visible before anything is written that relies on it.
		if n != expected && torn == "" {
			return r.bad(logName(expected), "it is missing, but %s is there", name)
		}
		expected = n + 1
		_, data, err := r.read(name, logKind, n)
		if err != nil {
			return err
		}
		size := len(data)
		for torn == "" && len(data) > 0 {
			f, size, ok := decodeFrame(data, &r.identity)
			if !ok || f.sequence != l.mu.next {
				break
			}
			if err := eachRecord(f.body, func(b []byte) error { return r.apply(f.sequence, b) }); err != nil {
				return l.failed(err, name)
			}
			l.mu.next++
			data = data[size:]
		}
		at := headerBytes + size - len(data)
		if torn == "" && damaged(data, &r.identity, int64(at)) {
			return r.bad(name, "change %d is damaged, at byte %d", l.mu.next, at)
		}
		if err := r.checkTail(name, data, at); err != nil {
			return err
		}
		if torn == "" && len(bytes.Trim(data, "\x00")) > 0 {
			torn = name
		}
	}
	if expected == number {
		return r.bad(logName(number), "it is missing")
	}
	return nil
}

// damaged reports whether bytes at a place of a log where a frame should be are none although all of them were written. What does
// not begin as a frame may be left of a write that failed, unless nothing but its beginning is wrong.
func damaged(data []byte, identity *[16]byte, at int64) bool {
	if len(data) < frameBytes {
		return false
	}
	if !bytes.HasPrefix(data, frameMagic) && data[0] != 0 {
		_, _, ok := decodeFrame(slices.Concat(frameMagic, data[len(frameMagic):]), identity)
		return ok
	}
	_, size, ok := decodeFrame(data, identity)
	return !ok && size > 0 && !vfs.MayBeTorn(data[:size], at)
}

// checkTail makes sure that nobody was told of what lies behind the last frame that counts, from a byte of a log on.
func (r *recovery) checkTail(name string, data []byte, begin int) error {
	missing := r.l.mu.next
	for {
		at := bytes.Index(data, frameMagic)
		if at < 0 {
			return nil
		}
		data = data[at:]
		if f, size, ok := decodeFrame(data, &r.identity); ok {
			if f.sequence >= missing && f.durable >= missing || f.sequence < missing {
				return r.bad(name, "change %d, at byte %d, is damaged or missing, and change %d was written when it was complete", missing, begin, f.sequence)
			}
			data = data[size:]
			continue
		}
		data = data[len(frameMagic):]
	}
}
