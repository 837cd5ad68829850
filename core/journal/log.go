package journal

import (
	"crypto/rand"
	"errors"
	"io"
	"path/filepath"
	"sync"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// Durability says what survives what.
type Durability uint8

// The kinds of durability of a journal.
const (
	Relaxed Durability = iota + 1 // the end of the process
	Strict                        // a power loss
)

// Options of a journal.
type Options struct {
	// Dir is the folder, which nobody else uses. It is created when missing.
	Dir        string
	Durability Durability
	// AllocateBytes is by how much a log is made longer in advance, so that a full disk is noticed before anything is written;
	// 0 means 1 MiB.
	AllocateBytes int64
	FS            vfs.Disk // nil: that of the system
}

// file is a log that is appended to.
type file struct {
	vfs.DiskFile
	number    uint32
	first     uint64 // sequence of its first frame
	end       int64  // of its last frame
	allocated int64  // space up to here is taken already
	synced    uint64 // sequence of the last frame that is fsynced
}

// Log is an open journal. Its methods may be called from any goroutine, but those of a Turn by one at a time.
type Log struct {
	opts     Options
	fs       vfs.Disk
	identity [16]byte
	lock     io.Closer
	logs     []uint32 // numbers of the logs in the folder, ascending
	states   []uint32 // and of the states
	ended    bool     // the journal is of no use to anybody
	// recovered is what Recover has found; see Recovered.
	recovered uint64
	syncing   sync.Mutex
	mu        struct {
		sync.Mutex
		current *file
		former  []*file // logs that a state does not cover yet, oldest first
		next    uint64  // sequence of the next frame
		durable uint64  // sequence up to which everything is as durable as the journal promises
		state   int64   // bytes of the last state
		broken  error   // nil: frames may be appended
		bad     *file   // the log that it is broken by
		closed  bool
		scratch []byte
	}
}

// Open locks a folder. It refuses one that holds anything it does not know, or is in use, and changes nothing then. Recover
// comes next.
func Open(o Options) (l *Log, err error) {
	if o.AllocateBytes <= 0 {
		o.AllocateBytes = 1 << 20
	}
	l = &Log{opts: o, fs: o.FS}
	if l.fs == nil {
		l.fs = vfs.OSDisk{}
	}
	if err := l.fs.Mkdir(o.Dir); err != nil {
		return nil, l.failed(err, "create the folder")
	}
	if err := l.look(); err != nil {
		return nil, err
	}
	if l.lock, err = l.fs.LockFile(l.path(lockName)); err != nil {
		if errors.Is(err, vfs.ErrInUse) {
			return nil, tqerr.Wrap(tqerr.AlreadyExists, err, "journal %s is in use by another controller", o.Dir)
		}
		return nil, l.failed(err, "lock the folder")
	}
	err = l.look() // somebody may have written between the look and the lock
	if err == nil && l.ended {
		err = l.removeAll()
	}
	if err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	return l, nil
}

// Dir is the folder.
func (l *Log) Dir() string { return l.opts.Dir }

func (l *Log) path(name string) string { return filepath.Join(l.opts.Dir, name) }

// failed makes the error of a file call.
func (l *Log) failed(err error, doing string) error {
	var known *tqerr.Error
	if errors.As(err, &known) {
		return tqerr.Wrap(known.Code, err, "journal %s: %s", l.opts.Dir, doing)
	}
	return tqerr.Wrap(tqerr.IO, err, "journal %s: %s", l.opts.Dir, doing)
}

// begin makes an empty log, as durable as it gets.
func (l *Log) begin(number uint32) (*file, error) {
	path, unfinished := l.path(logName(number)), l.path(logName(number)+newSuffix)
	_ = l.fs.Remove(unfinished)
	f, err := l.fs.Create(unfinished)
	if err != nil {
		return nil, l.failed(err, "create a log")
	}
	out := &file{DiskFile: f, number: number, end: headerBytes, allocated: headerBytes}
	_, err = f.WriteAt(header{logKind, number, l.identity, 0}.encode(), 0)
	if err == nil {
		err = out.allocate(l.opts.AllocateBytes)
	}
	if err == nil && l.opts.Durability == Strict {
		err = f.Sync()
	}
	if err == nil {
		err = l.fs.Rename(unfinished, path)
	}
	if err == nil && l.opts.Durability == Strict {
		if err = l.fs.SyncDir(l.opts.Dir); err != nil {
			_ = l.fs.Remove(path)
		}
	}
	if err != nil {
		_ = f.Close()
		_ = l.fs.Remove(unfinished)
		return nil, l.failed(err, "begin a log")
	}
	return out, nil
}

// allocate takes the space of so many bytes behind the frames.
func (f *file) allocate(size int64) error {
	if f.end+size <= f.allocated {
		return nil
	}
	if err := f.Allocate(f.allocated, f.end+size-f.allocated); err != nil {
		return err
	}
	f.allocated = f.end + size
	return nil
}

// Append writes records as one frame, whose sequence it returns: all of them count or none. On a full disk only records that
// are urgent, because they free something, use the last of the space that was taken in advance. After an error nothing was
// appended, and the same may be tried again; but when a sequence comes with the error the frame may count if the process dies before
// another one, or a state, has taken its place. A journal that is broken stays so until Finish.
func (l *Log) Append(urgent bool, records ...[]byte) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usableLocked(); err != nil {
		return 0, err
	}
	size := frameBytes
	for _, r := range records {
		size += len(r) + 10
	}
	if size > maxBody {
		return 0, tqerr.New(tqerr.ResourceExhausted, "journal: a change of %d bytes, want at most %d", size, maxBody)
	}
	f := l.mu.current
	if err := l.reserve(f, int64(size), urgent); err != nil {
		return 0, err
	}
	body := make([]byte, 0, size)
	for _, r := range records {
		body = appendRecord(body, r)
	}
	durable := l.mu.next - 1
	if l.opts.Durability == Strict {
		durable = l.mu.durable
	}
	l.mu.scratch = appendFrame(l.mu.scratch[:0], &l.identity, l.mu.next, durable, body)
	if _, err := f.WriteAt(l.mu.scratch, f.end); err != nil {
		return l.wipeLocked(f, l.failed(err, "write a change"))
	}
	f.end += int64(len(l.mu.scratch))
	if cap(l.mu.scratch) > 1<<20 {
		l.mu.scratch = nil
	}
	sequence := l.mu.next
	l.mu.next++
	if l.opts.Durability == Relaxed {
		l.mu.durable = sequence
	}
	return sequence, nil
}

// wipeLocked makes sure that what was written of a frame does not count, and returns what Append does.
func (l *Log) wipeLocked(f *file, why error) (uint64, error) {
	if _, err := f.WriteAt(make([]byte, frameBytes), f.end); err != nil {
		return l.mu.next, why
	}
	return 0, why
}

func (l *Log) usableLocked() error {
	if l.mu.closed {
		return tqerr.New(tqerr.Unavailable, "the journal is closed")
	}
	return l.mu.broken
}

// reserve makes sure that there is space for a frame, and headroom for urgent ones.
func (l *Log) reserve(f *file, size int64, urgent bool) error {
	headroom := l.opts.AllocateBytes / 2
	if f.end+size+headroom <= f.allocated {
		return nil
	}
	err := f.allocate(size + 2*l.opts.AllocateBytes)
	if err != nil && urgent && f.end+size <= f.allocated {
		return nil
	}
	if err != nil {
		err = f.allocate(size + headroom)
	}
	if err != nil {
		return l.failed(err, "reserve space for a change")
	}
	return nil
}

// Durable reports whether everything up to a sequence is as durable as the journal promises.
func (l *Log) Durable(sequence uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.durable >= sequence
}

// Strict reports whether a frame that is appended is not durable before a Sync.
func (l *Log) Strict() bool { return l.opts.Durability == Strict }

// Last is the sequence of the last frame.
func (l *Log) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.next - 1
}

// Sync returns when everything up to a sequence is as durable as the journal promises. Who comes while an fsync runs waits for
// the next one, which is that of all who came meanwhile.
func (l *Log) Sync(sequence uint64) error {
	if l.Durable(sequence) {
		return nil
	}
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	if err := l.usableLocked(); err != nil || l.mu.durable >= sequence {
		done := l.mu.durable >= sequence
		l.mu.Unlock()
		if done {
			return nil
		}
		return err
	}
	last := l.mu.next - 1
	files := append(append([]*file{}, l.mu.former...), l.mu.current)
	l.mu.Unlock()
	for k, f := range files {
		end := last
		if k+1 < len(files) {
			end = files[k+1].first - 1
		}
		if f.synced >= end {
			continue
		}
		if err := f.Sync(); err != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.mu.broken, l.mu.bad = l.failed(err, "fsync"), f
			return l.mu.broken
		}
		f.synced = end
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.durable = max(l.mu.durable, last)
	return nil
}

// Overgrown reports that the logs are larger than the last state, and more than a little: it is time for Begin and Finish.
func (l *Log) Overgrown() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	size := l.mu.current.end
	for _, f := range l.mu.former {
		size += f.end
	}
	return size > max(l.mu.state, 4*l.opts.AllocateBytes)
}

// Broken is nil as long as frames may be appended.
func (l *Log) Broken() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usableLocked()
}

// Break lets nothing be appended until a turn that begins now has been finished: what was appended last is not true.
func (l *Log) Break(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.broken, l.mu.bad = why, l.mu.current
}

// End says that nobody wants the journal any more: Close removes it, or the next Open.
func (l *Log) End() error {
	f, err := l.fs.Create(l.path(endedName))
	if err == nil {
		err = f.Close()
	}
	if err == nil && l.opts.Durability == Strict {
		err = l.fs.SyncDir(l.opts.Dir)
	}
	if err != nil {
		return l.failed(err, "end")
	}
	l.ended = true
	return nil
}

// removeAll removes all files but the lock. The one that says that they are of no use goes last.
func (l *Log) removeAll() error {
	names, err := l.fs.List(l.opts.Dir)
	for _, name := range names {
		if err == nil && name != lockName && name != endedName {
			err = l.fs.Remove(l.path(name))
		}
	}
	if err == nil {
		err = l.fs.Remove(l.path(endedName))
	}
	if err != nil {
		return l.failed(err, "remove what has ended")
	}
	l.logs, l.states, l.ended = nil, nil, false
	return nil
}

// Close ends the use of the folder.
func (l *Log) Close() error {
	var err error
	if l.mu.current != nil {
		if l.Broken() == nil && l.opts.Durability == Strict {
			err = l.Sync(l.Last())
		}
		l.closeFiles()
	}
	if l.ended {
		if err = l.removeAll(); err == nil {
			_ = l.fs.Remove(l.path(lockName))
			_ = l.fs.Remove(l.opts.Dir)
		}
	}
	return errors.Join(err, l.lock.Close())
}

func (l *Log) closeFiles() {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = true
	for _, f := range append(l.mu.former, l.mu.current) {
		_ = f.Close()
	}
	l.mu.former = nil
}

func newIdentity() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails, says crypto/rand
	return id
}
