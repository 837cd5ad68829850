package session

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"transferqueue/core/client"
	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/local"
)

// Journal says whether and where an owner writes down what its session knows, so that the session goes on after it has died.
type Journal struct {
	Durability string `msgpack:"durability"` // "none", "relaxed", "strict"; "": none
	Path       string `msgpack:"path"`
	// RestartMS is how long clients wait for an owner that has died to be started again.
	RestartMS int64 `msgpack:"restart_wait_ms"`
}

const (
	// journalFolder is where the journals of all namespaces are, inside the folder that a user has named.
	journalFolder = "transfer_queue_journal"
	journalKey    = "controller.journal"
)

func (j *Journal) none() bool { return j.Durability == "" || j.Durability == "none" }

// open opens the journal of a namespace; nil: there is to be none.
func (j *Journal) open(namespace string) (*journal.Log, error) {
	o := journal.Options{Dir: filepath.Join(j.Path, journalFolder, namespace)}
	switch j.Durability {
	case "", "none":
		return nil, nil
	case "relaxed":
		o.Durability = journal.Relaxed
	case "strict":
		o.Durability = journal.Strict
	default:
		return nil, tqerr.New(tqerr.InvalidArgument, "%s.durability %q: want \"none\", \"relaxed\" or \"strict\"", journalKey, j.Durability)
	}
	if !filepath.IsAbs(j.Path) {
		return nil, tqerr.New(tqerr.InvalidArgument, "%s.path %q: want a folder when there is a journal", journalKey, j.Path)
	}
	if info, err := os.Stat(j.Path); err == nil && !info.IsDir() {
		return nil, tqerr.New(tqerr.InvalidArgument, "%s.path: %s is not a directory", journalKey, j.Path)
	}
	log, err := journal.Open(o)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.CodeOf(err), err, "%s.path", journalKey)
	}
	return log, nil
}

// follower leads a client of this host to the next owner of its session, which is found through the files of the namespace, or
// at the same socket.
type follower struct {
	paths   paths
	socket  string // "": through the files
	secret  []byte
	missing time.Time // since when the socket is not there
	session string
	id      uint64
	wait    time.Duration
}

// redial waits until the session runs again. It gives up at once when the session was closed, and when its owner does not come
// back in time.
func (f *follower) redial(ctx context.Context) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, f.wait)
	defer cancel()
	for {
		conn, err := f.dial(ctx)
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, errEnded) {
			return nil, err
		}
		select {
		case <-time.After(redialPause):
		case <-ctx.Done():
			return nil, tqerr.Wrap(tqerr.Unavailable, err, "the session was not started again within %s", f.wait)
		}
	}
}

var errEnded error = tqerr.New(tqerr.Unavailable, "the session was closed")

// dial connects to whoever serves the session now.
func (f *follower) dial(ctx context.Context) (transport.Conn, error) {
	if f.socket != "" {
		return f.dialSame(ctx)
	}
	r, err := f.current()
	if err != nil {
		return nil, err
	}
	return local.Dial(ctx, r.Socket, r.Secret, f.id)
}

// removedFor is how long a socket is missing that an owner has removed which has closed. One that begins replaces it at once.
const removedFor = time.Second

// dialSame connects to the socket at which the next owner listens.
func (f *follower) dialSame(ctx context.Context) (transport.Conn, error) {
	conn, err := local.Dial(ctx, f.socket, f.secret, f.id)
	if err == nil {
		f.missing = time.Time{}
		return conn, nil
	}
	switch _, gone := os.Lstat(f.socket); {
	case !errors.Is(gone, os.ErrNotExist):
		f.missing = time.Time{}
	case f.missing.IsZero():
		f.missing = time.Now()
	case time.Since(f.missing) > removedFor:
		return nil, errEnded
	}
	return nil, err
}

// current is where the session is served. A rendezvous file that is gone while nobody holds the lock was removed by an owner
// that has closed.
func (f *follower) current() (*rendezvous, error) {
	r, err := f.paths.read()
	if errors.Is(err, os.ErrNotExist) {
		lock, busy := f.paths.takeLock()
		if busy == nil {
			_ = lock.Close()
			return nil, errEnded
		}
		return nil, tqerr.New(tqerr.Unavailable, "the session is being started")
	}
	if err == nil && r.Session != f.session {
		return nil, errEnded
	}
	return r, err
}

// direct opens a connection for single requests.
func (f *follower) direct(ctx context.Context) (client.Direct, error) {
	r, err := f.current()
	if err != nil {
		return nil, err
	}
	return local.DialDirect(ctx, r.Socket, r.Secret, f.id)
}
