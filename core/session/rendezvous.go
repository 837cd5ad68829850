package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// rendezvousFormat is the version of the rendezvous file. A reader refuses a newer one.
const rendezvousFormat = 1

// rendezvous is the file through which processes of one host find their session. It is private to the user, written under a
// temporary name and renamed, and valid while its owner holds the lock file beside it.
type rendezvous struct {
	Format   int    `json:"format"`
	Protocol int    `json:"protocol"`
	Session  string `json:"session"`
	PID      int    `json:"pid"`
	Socket   string `json:"socket"`
	Secret   []byte `json:"secret"`
}

// paths are the files of a namespace.
type paths struct{ dir, file, lock, prefix string }

func pathsOf(dir, namespace string) (paths, error) {
	bad := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	}
	if namespace == "" || strings.HasPrefix(namespace, ".") || len(namespace) > 64 || strings.ContainsFunc(namespace, bad) {
		return paths{}, tqerr.New(tqerr.InvalidArgument, "namespace %q: want 1 to 64 letters, digits, \".\", \"_\" or \"-\"", namespace)
	}
	given := dir != ""
	if !given {
		dir = defaultDir()
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return paths{}, tqerr.Wrap(tqerr.IO, err, "runtime directory %s", dir)
	}
	if !given {
		if err := checkPrivate(dir); err != nil {
			return paths{}, err
		}
	}
	base := filepath.Join(dir, namespace)
	return paths{dir: dir, file: base + ".json", lock: base + ".lock", prefix: base + "."}, nil
}

// defaultDir is a directory of this user on this host.
func defaultDir() string {
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" {
		if info, err := os.Stat(run); err == nil && info.IsDir() {
			return filepath.Join(run, "transferqueue")
		}
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("transferqueue-%d", os.Getuid()))
}

// checkPrivate refuses a directory that somebody else has made at a place where everybody may, or may write to.
func checkPrivate(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return tqerr.Wrap(tqerr.IO, err, "runtime directory %s", dir)
	}
	st, known := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o022 != 0 || (known && int(st.Uid) != os.Getuid()) {
		return tqerr.New(tqerr.InvalidState, "runtime directory %s: want a directory that only user %d may write to", dir, os.Getuid())
	}
	return nil
}

// errBusy says that another process holds the lock.
var errBusy = errors.New("another process owns the session")

// takeLock takes the lock of a namespace without waiting. It is given back by closing the file, and by the kernel when
// the process dies.
func (p paths) takeLock() (*os.File, error) {
	f, err := os.OpenFile(p.lock, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "lock file %s", p.lock)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errBusy
	}
	return nil, tqerr.Wrap(tqerr.IO, err, "lock file %s", p.lock)
}

// read returns the rendezvous of a namespace. A file that is not there gives os.ErrNotExist.
func (p paths) read() (*rendezvous, error) {
	info, err := os.Lstat(p.file)
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Getuid() {
		return nil, tqerr.New(tqerr.InvalidState, "rendezvous file %s belongs to user %d, want %d", p.file, st.Uid, os.Getuid())
	}
	file, err := os.Open(p.file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	data, err := io.ReadAll(io.LimitReader(file, maxRendezvous))
	if err != nil {
		return nil, err
	}
	return parseRendezvous(p.file, data)
}

// maxRendezvous is far above the size of a rendezvous file.
const maxRendezvous = 64 << 10

func parseRendezvous(path string, data []byte) (*rendezvous, error) {
	var r rendezvous
	if err := json.Unmarshal(data, &r); err != nil || r.Format <= 0 || r.Socket == "" {
		return nil, tqerr.New(tqerr.Corruption, "rendezvous file %s is not one of a session; remove it if no session runs", path)
	}
	if r.Format > rendezvousFormat || r.Protocol != wire.Version {
		return nil, tqerr.New(tqerr.VersionMismatch, "rendezvous file %s: format %d and protocol %d, want %d and %d", path, r.Format, r.Protocol, rendezvousFormat, wire.Version)
	}
	return &r, nil
}

// write publishes a session.
func (p paths) write(r *rendezvous) error {
	data, err := json.Marshal(r)
	if err != nil {
		return tqerr.Wrap(tqerr.Internal, err, "rendezvous")
	}
	temp := fmt.Sprintf("%s%d.tmp", p.prefix, os.Getpid())
	if err := os.WriteFile(temp, data, 0o600); err != nil {
		return tqerr.Wrap(tqerr.IO, err, "rendezvous file %s", p.file)
	}
	if err := os.Rename(temp, p.file); err != nil {
		return tqerr.Wrap(tqerr.IO, err, "rendezvous file %s", p.file)
	}
	return nil
}

// lastingMark begins the names of sockets at which one owner of a session with a journal listens after the other.
const lastingMark = ".j"

// socketOf is the socket of an owner. Without a rendezvous file its name says which process listens, so that one that a dead
// process has left can be told, or, when the session goes on with the next owner, which session; a namespace cannot begin with a dot.
func (p paths) socketOf(session string, published, goesOn bool) string {
	short := session[:8]
	switch {
	case published:
		return p.prefix + short + ".sock"
	case goesOn:
		return filepath.Join(p.dir, fmt.Sprintf("%s.%s.sock", lastingMark, short))
	default:
		return filepath.Join(p.dir, fmt.Sprintf(".%d.%s.sock", os.Getpid(), short))
	}
}

func lasts(socket string) bool { return strings.HasPrefix(filepath.Base(socket), lastingMark+".") }

// sweepUnpublished removes the sockets of unpublished owners at which nobody listens any more.
func (p paths) sweepUnpublished() {
	left, _ := filepath.Glob(filepath.Join(p.dir, ".[0-9]*.sock"))
	for _, socket := range left {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		switch {
		case err == nil:
			_ = conn.Close()
		case errors.Is(err, syscall.ECONNREFUSED):
			_ = os.Remove(socket)
		}
	}
}

// sweep removes what owners that died have left. Called with the lock held. Their rendezvous file stays when their session may go
// on: were it missing, and this process died before it has written its own, clients would take the session for closed.
func (p paths) sweep(goesOn bool) {
	p.removeDead(func(middle, ext string) bool { return middle != "" && (ext == "sock" || ext == "tmp") })
	if !goesOn {
		_ = os.Remove(p.file)
	}
}

// removeDead removes those files of the namespace whose names say so, but for sockets of units that live.
func (p paths) removeDead(named func(middle, ext string) bool) {
	entries, _ := os.ReadDir(p.dir)
	for _, entry := range entries {
		path := filepath.Join(p.dir, entry.Name())
		rest, mine := strings.CutPrefix(path, p.prefix)
		// What has more dots belongs to a namespace whose name only begins like this one.
		middle, ext, _ := strings.Cut(rest, ".")
		if mine && named(middle, ext) && !unitLives(path, middle) {
			_ = os.Remove(path)
		}
	}
}
