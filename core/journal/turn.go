package journal

import (
	"errors"
	"slices"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// Turn replaces logs by a state and a new log. There is one at a time.
type Turn struct {
	l     *Log
	next  *file
	first uint64 // sequence of the first frame behind the state
}

// Begin makes the new log, which nothing is written to before Switch. After an error nothing has changed.
func (l *Log) Begin() (*Turn, error) {
	if n := len(l.states); n > 0 { // what a power loss has brought back
		l.removeBefore(l.states[n-1])
	}
	number := uint32(1)
	for _, n := range slices.Concat(l.logs, l.states) {
		number = max(number, n+1)
	}
	next, err := l.begin(number)
	if err != nil {
		return nil, err
	}
	l.logs = append(l.logs, number)
	return &Turn{l: l, next: next}, nil
}

// Switch lets everything that is appended from now on go to the new log. The state that Finish will be given is that of this
// moment, so the caller sees to it that nobody appends meanwhile. It does no file call.
func (t *Turn) Switch() {
	l := t.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.current != nil {
		l.mu.former = append(l.mu.former, l.mu.current)
	}
	t.first = l.mu.next
	t.next.first, t.next.synced = t.first, t.first-1
	l.mu.current = t.next
}

// Abandon is called instead of Switch when the turn is not to happen.
func (t *Turn) Abandon() {
	_ = t.next.Close()
	_ = t.l.fs.Remove(t.l.path(logName(t.next.number))) // an empty log does no harm
}

// Finish writes the state, record by record, and removes what it makes needless. Nothing can be appended to a broken journal
// before. After an error the logs are all kept, and another turn may be begun.
func (t *Turn) Finish(write func(put func(record []byte) error) error) error {
	l := t.l
	size, err := t.writeState(write)
	if err != nil {
		return err
	}
	l.syncing.Lock()
	l.mu.Lock()
	former := l.mu.former
	l.mu.former, l.mu.state = nil, size
	if l.mu.bad != t.next { // else the state is older than what is wrong
		l.mu.broken, l.mu.bad = nil, nil
	}
	l.mu.durable = max(l.mu.durable, t.first-1)
	l.mu.Unlock()
	l.syncing.Unlock()
	for _, f := range former {
		_ = f.Close()
	}
	l.removeBefore(t.next.number)
	return nil
}

// removeBefore removes what a state makes needless. What cannot be removed now is ignored by the next Open, and removed by a
// later turn.
func (l *Log) removeBefore(state uint32) {
	l.logs = l.remove(l.logs, state, logName)
	l.states = l.remove(l.states, state, stateName)
}

// remove removes the files of numbers before one and returns the numbers of those that are left.
func (l *Log) remove(numbers []uint32, before uint32, name func(uint32) string) []uint32 {
	return slices.DeleteFunc(numbers, func(n uint32) bool {
		return n < before && l.fs.Remove(l.path(name(n))) == nil
	})
}

// writeState makes the state visible as a whole.
func (t *Turn) writeState(write func(put func(record []byte) error) error) (size int64, err error) {
	l := t.l
	path := l.path(stateName(t.next.number))
	unfinished := path + newSuffix
	_ = l.fs.Remove(unfinished)
	f, err := l.fs.Create(unfinished)
	if err != nil {
		return 0, l.failed(err, "create a state")
	}
	w := &stateWriter{l: l, f: f, out: header{stateKind, t.next.number, l.identity, t.first}.encode()}
	if err = write(w.put); err == nil {
		err = w.finish()
	}
	if err == nil && l.opts.Durability == Strict {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = l.fs.Rename(unfinished, path)
	}
	if err != nil {
		_ = l.fs.Remove(unfinished)
		return 0, l.failed(err, "write a state")
	}
	if l.opts.Durability == Strict {
		if err = l.fs.SyncDir(l.opts.Dir); err != nil {
			err = l.failed(err, "fsync of the folder")
			l.Break(err) // a power loss may bring it back, and what would be appended is not of it
			_ = l.fs.Remove(path)
			return 0, err
		}
	}
	l.states = append(l.states, t.next.number)
	return w.at, nil
}

// stateWriter writes the frames of a state.
type stateWriter struct {
	l        *Log
	f        vfs.DiskFile
	at       int64 // of what is written
	out      []byte
	body     []byte
	sequence uint64
}

// stateBatch is about how many bytes of records a frame of a state has.
const stateBatch = 1 << 20

func (w *stateWriter) put(record []byte) error {
	if len(record) > maxBody-16 {
		return tqerr.New(tqerr.ResourceExhausted, "a record of %d bytes, want at most %d", len(record), maxBody-16)
	}
	if len(record) == 0 {
		return tqerr.New(tqerr.Internal, "an empty record of a state")
	}
	if len(w.body) > 0 && len(w.body)+len(record) > stateBatch {
		if err := w.frame(); err != nil {
			return err
		}
	}
	w.body = appendRecord(w.body, record)
	return nil
}

func (w *stateWriter) frame() error {
	w.sequence++
	w.out = appendFrame(w.out, &w.l.identity, w.sequence, w.sequence-1, w.body)
	w.body = w.body[:0]
	_, err := w.f.WriteAt(w.out, w.at)
	w.at += int64(len(w.out))
	w.out = w.out[:0]
	return err
}

func (w *stateWriter) finish() error {
	if len(w.body) > 0 {
		if err := w.frame(); err != nil {
			return err
		}
	}
	return w.frame()
}
