// Package session opens and ends the session of a process: it starts controller and units here, or attaches to those of
// another process on this host, which it finds through the rendezvous file. A lock file decides who owns a session; the
// kernel frees it when its holder dies, so a dead owner's session is replaced and never waited for.
package session

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"time"

	"transferqueue/core/client"
	"transferqueue/core/controller"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/machine"
	"transferqueue/core/jobs"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/inproc"
	"transferqueue/core/transport/local"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// Config says what to open. It arrives as a msgpack map with these names.
type Config struct {
	Mode        string  `msgpack:"mode"` // "auto": attach, else own; "attach"; "own": never attach; "unit": see openUnit
	Dir         string  `msgpack:"dir"`  // runtime directory, "": of the user
	Namespace   string  `msgpack:"namespace"`
	Units       int     `msgpack:"units"`              // in the owner's process; negative: none, they join
	MemoryLimit int64   `msgpack:"memory_limit_bytes"` // per unit, 0: none
	Disk        Disk    `msgpack:"disk"`
	Journal     Journal `msgpack:"journal"`
	// Keep lets what is durable stay at a clean end, because the session is to be started again.
	Keep        bool   `msgpack:"keep"`
	SampleLimit int64  `msgpack:"total_storage_size"` // over all units, 0: none
	PutWaitMS   int64  `msgpack:"put_wait_ms"`
	PreAllocate int    `msgpack:"pre_allocate"`
	Polling     bool   `msgpack:"polling_mode"`
	Blob        []byte `msgpack:"config"` // what attaching processes are given
	TimeoutMS   int64  `msgpack:"timeout_ms"`
	HostID      string `msgpack:"host_id"` // of this process, "": what internal/machine finds
	Version     string `msgpack:"version"`
	Name        string `msgpack:"name"` // of a unit
	Key         uint64 `msgpack:"key"`  // by which the caller may call it off while it waits

	// Sampler chooses what a fetch hands out; a call of one that Python runs takes SamplerMS at most.
	Sampler   sampler.Spec `msgpack:"sampler"`
	SamplerMS int64        `msgpack:"sampler_timeout_ms"`

	// Unpublished makes an owner that has neither lock nor rendezvous file: others attach by its socket and secret.
	Unpublished bool   `msgpack:"unpublished"`
	Socket      string `msgpack:"socket"` // with "attach": of the session to join, instead of the one in Dir
	Secret      []byte `msgpack:"secret"`

	Listen      string `msgpack:"listen"`       // of an owner or a unit: tcp://HOST:PORT, where other hosts reach it; "": nowhere
	PayloadPort int    `msgpack:"payload_port"` // of one that listens, 0: any free one
	Address     string `msgpack:"address"`      // tcp://HOST:PORT of the session to join, instead of one of this host
	Machine     string `msgpack:"machine"`      // of the session to join: there its Socket is tried first
	Token       []byte `msgpack:"token"`        // what clients of other hosts must know, see zmq.ParseToken
	Security    string `msgpack:"security"`     // "curve": what crosses to other hosts is encrypted; "token", "": not
	TokenFile   string `msgpack:"token_file"`   // of an owner: where Token is from, if from a file; CURVE's public key is added there
	KeyFile     string `msgpack:"key_file"`     // of an owner with CURVE: its secret key, made when it is not there
}

// Info tells how a session was opened.
type Info struct {
	Owner   bool   `msgpack:"owner"`
	Session string `msgpack:"session"`
	PID     int    `msgpack:"pid"` // of the owner
	Socket  string `msgpack:"socket"`
	Secret  []byte `msgpack:"secret"`
	Host    string `msgpack:"host"` // of the owner
	Blob    []byte `msgpack:"config"`
	Address string `msgpack:"address"` // where it listens for other hosts, or was reached
	Machine string `msgpack:"machine"` // where the socket is; see internal/machine
	Key     []byte `msgpack:"key"`     // of the server, which clients must know besides the token; none without CURVE
	// Restored says that the owner goes on with a session whose owner has died or was stopped.
	Restored bool `msgpack:"restored"`
}

// Session is this process's part in a session.
type Session struct {
	Info   Info
	Client *client.Client
	Jobs   *jobs.Queue // Python work of the units here; nil when attached
	Pool   *bufpool.Pool

	conn   transport.Conn
	server *controller.Server
	socket *local.Server
	remote *zmq.Server
	inside *inproc.Server
	units  []*unit.Unit
	host   *remote.Server // of a unit for a controller in another process
	lock   *os.File
	paths  paths
	once   sync.Once
	closed error // what Close returned
	final  bool  // what units have on disk is of no use to anybody after Close
}

const (
	retry = 5 * time.Millisecond
	// takeover is how long a rendezvous file may make no sense while somebody holds the lock: it may be a dead owner's, and
	// the new one has not removed it yet.
	takeover = 500 * time.Millisecond
	always   = math.MaxInt64
)

// Open joins or starts a session. It does not wait longer than the configured time, and says what it waited for.
func Open(ctx context.Context, cfg *Config) (*Session, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(cfg.TimeoutMS)*time.Millisecond)
	defer cancel()
	machine.Use(cfg.HostID)
	if cfg.Address != "" {
		if cfg.Socket != "" && cfg.Machine == machine.ID() {
			if s, _, err := join(ctx, cfg.Socket, cfg.Secret); err == nil {
				return s, nil
			}
		}
		return joinRemote(ctx, cfg)
	}
	if cfg.Socket != "" {
		s, _, err := join(ctx, cfg.Socket, cfg.Secret)
		return s, err
	}
	p, err := pathsOf(cfg.Dir, cfg.Namespace)
	if err != nil {
		return nil, err
	}
	if cfg.Mode == "unit" {
		return openUnit(cfg, p)
	}
	if cfg.Unpublished {
		return own(ctx, cfg, p, nil)
	}
	for started := time.Now(); ; {
		s, patience, err := attempt(ctx, cfg, p)
		if s != nil || time.Since(started) >= patience {
			return s, err
		}
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return nil, tqerr.New(tqerr.Unavailable, "%s", waitedFor(cfg, p, err))
		}
	}
}

func waitedFor(cfg *Config, p paths, err error) string {
	text := fmt.Sprintf("the session in %s did not answer within %.1f s", p.file, float64(cfg.TimeoutMS)/1000)
	if err != nil {
		text += ": " + err.Error()
	}
	return text
}

// attempt tries once. patience is how long it makes sense to try again, because another process is opening or closing a
// session.
func attempt(ctx context.Context, cfg *Config, p paths) (s *Session, patience time.Duration, err error) {
	lock, err := p.takeLock()
	switch {
	case err == nil && cfg.Mode == "attach":
		_ = lock.Close()
		return nil, 0, noSession(p)
	case err == nil:
		s, err = own(ctx, cfg, p, lock)
		return s, 0, err
	case !errors.Is(err, errBusy):
		return nil, 0, err
	}
	s, patience, err = attach(ctx, p)
	if s != nil && cfg.Mode == "own" {
		return nil, 0, errors.Join(tqerr.New(tqerr.AlreadyExists, "namespace %q has a session already, see %s", cfg.Namespace, p.file), s.Close(0))
	}
	return s, patience, err
}

func noSession(p paths) error {
	if _, err := p.read(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return tqerr.Wrap(tqerr.NotInitialized, err, "no session is running, call init() first")
	}
	return tqerr.New(tqerr.NotInitialized, "no session is running (looked for %s), call init() first", p.file)
}

func attach(ctx context.Context, p paths) (*Session, time.Duration, error) {
	r, err := p.read()
	if errors.Is(err, os.ErrNotExist) {
		return nil, always, err
	}
	if err != nil {
		return nil, takeover, err
	}
	s, patience, err := joinAs(ctx, r.Socket, r.Secret, &p)
	if s != nil {
		s.paths = p
	}
	return s, patience, err
}

// join attaches to the session behind a socket.
func join(ctx context.Context, socket string, secret []byte) (*Session, time.Duration, error) {
	return joinAs(ctx, socket, secret, nil)
}

// joinAs attaches to a session that was found through the files of its namespace, nil: otherwise.
func joinAs(ctx context.Context, socket string, secret []byte, p *paths) (*Session, time.Duration, error) {
	id := client.NewID()
	conn, err := local.Dial(ctx, socket, secret, id)
	if err != nil {
		return nil, whileUnavailable(ctx, err), err
	}
	s := &Session{conn: conn, Pool: bufpool.New()}
	reply, err := conn.Call(ctx, &wire.Request{Op: wire.OpConfig})
	var config wire.ConfigReply
	if err == nil {
		err = wire.Unmarshal(reply.Body, &config)
	}
	if err != nil {
		_ = conn.Close()
		return nil, whileUnavailable(ctx, err), err
	}
	s.Info = Info{
		Session: config.Session, PID: config.PID, Socket: socket, Secret: secret, Host: config.Host, Blob: config.Config,
		Machine: machine.ID(),
	}
	o := client.Options{Conn: conn, Pool: s.Pool, Machine: machine.ID()}
	o.Direct = func(ctx context.Context) (client.Direct, error) { return local.DialDirect(ctx, socket, secret, id) }
	if config.RestartMS > 0 && p != nil {
		f := &follower{paths: *p, session: config.Session, id: id, wait: time.Duration(config.RestartMS) * time.Millisecond}
		o.Redial, o.Direct = f.redial, f.direct
	} else if config.RestartMS > 0 && lasts(socket) {
		f := &follower{socket: socket, secret: secret, session: config.Session, id: id, wait: time.Duration(config.RestartMS) * time.Millisecond}
		o.Redial = f.redial
	}
	s.Client = client.New(o)
	return s, 0, nil
}

// whileUnavailable says that an owner which does not answer may be one that comes or goes.
func whileUnavailable(ctx context.Context, err error) time.Duration {
	if tqerr.CodeOf(err) == tqerr.Unavailable || ctx.Err() != nil {
		return always
	}
	return 0
}

// own starts controller and units in this process and publishes them.
func own(ctx context.Context, cfg *Config, p paths, lock *os.File) (_ *Session, err error) {
	s := &Session{Pool: bufpool.New(), lock: lock, paths: p, final: !cfg.Keep || cfg.Journal.none()}
	defer func() {
		if err != nil {
			_ = s.Close(time.Second)
		}
	}()
	if p.sweepUnpublished(); lock != nil {
		p.sweep(!cfg.Journal.none())
	}
	session, secret := newIdentity()
	written, err := cfg.Journal.open(cfg.Namespace)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && written != nil && s.server == nil {
			_ = written.Close()
		}
	}()
	s.Jobs = jobs.New(s.Pool)
	host, _ := os.Hostname()
	units, err := s.startUnits(cfg, session, host)
	if err != nil {
		return nil, err
	}
	samplerTime := time.Duration(cfg.SamplerMS) * time.Millisecond
	picks, err := sampler.Make(cfg.Sampler, s.Jobs, samplerTime)
	if err != nil {
		return nil, err
	}
	s.server, err = controller.Open(ctx, controller.Options{
		Journal: written, Secret: secret, RestartWait: time.Duration(cfg.Journal.RestartMS) * time.Millisecond,
		Units: units, Sampler: picks, Python: s.Jobs, SamplerTime: samplerTime, Polling: cfg.Polling, PreAllocate: cfg.PreAllocate,
		SampleLimit: cfg.SampleLimit, PutWait: time.Duration(cfg.PutWaitMS) * time.Millisecond, Config: cfg.Blob,
		Version: cfg.Version, PID: os.Getpid(), Session: session, Host: host, Machine: machine.ID(), Jobs: s.Jobs.Waiting,
		Dial: dialUnit,
	})
	if err != nil {
		return nil, err
	}
	session, secret = s.server.Session(), s.server.Secret()
	r := &rendezvous{
		Format: rendezvousFormat, Protocol: wire.Version, Session: session, PID: os.Getpid(), Secret: secret,
		Socket: p.prefix + session[:8] + ".sock",
	}
	if lock == nil {
		r.Socket = p.unpublished(session)
		if written != nil {
			r.Socket = p.lasting(session)
		}
	}
	if s.socket, err = local.Listen(r.Socket, secret, s.server); err != nil {
		return nil, err
	}
	if cfg.Listen != "" {
		if err = s.listen(cfg); err != nil {
			return nil, err
		}
	}
	s.inside = inproc.NewServer(s.server)
	if s.conn, err = s.inside.Dial(client.NewID()); err != nil {
		return nil, err
	}
	s.Client = client.New(client.Options{Conn: s.conn, Pool: s.Pool, Machine: machine.ID()})
	s.Info = Info{
		Owner: true, Session: r.Session, PID: r.PID, Socket: r.Socket, Secret: secret, Host: host, Blob: s.server.Config(), Address: s.Info.Address,
		Key: s.Info.Key, Machine: machine.ID(), Restored: s.server.Restored(),
	}
	if lock == nil {
		return s, nil
	}
	return s, p.write(r)
}

// newIdentity makes the name of a session or a unit, and the secret that its clients show.
func newIdentity() (session string, secret []byte) {
	var id [8]byte
	secret = make([]byte, 32)
	_, _ = rand.Read(id[:]) // never fails, says crypto/rand
	_, _ = rand.Read(secret)
	return hex.EncodeToString(id[:]), secret
}

func (s *Session) startUnits(cfg *Config, session, host string) (units []controller.Unit, err error) {
	for i := range unitsHere(cfg) {
		name := fmt.Sprintf("unit-%d", i)
		disk, err := cfg.Disk.of(session, cfg.Namespace, name, i)
		if err != nil {
			return nil, err
		}
		u, err := unit.New(unit.Options{
			ID: uint32(i), Name: name, Host: host, MemoryLimit: cfg.MemoryLimit, Jobs: s.Jobs, Disk: disk,
		})
		if err != nil {
			return nil, err
		}
		s.units, units = append(s.units, u), append(units, u)
		if cfg.Journal.none() { // else it belongs to the session that the journal names
			if err := u.Own(session); err != nil {
				return nil, err
			}
		}
	}
	return units, nil
}

// unitsHere is how many units the owner's process has: at least one, unless all are to join.
func unitsHere(cfg *Config) int {
	if cfg.Units < 0 {
		return 0
	}
	return max(cfg.Units, 1)
}

// Close ends the session when this process owns it, and leaves it otherwise. Waiting requests end with Unavailable. A second
// call returns what the first did.
func (s *Session) Close(timeout time.Duration) error {
	s.once.Do(func() { s.closed = s.close(timeout) })
	return s.closed
}

func (s *Session) close(timeout time.Duration) error {
	if r, err := s.paths.read(); s.lock != nil && err == nil && r.Session == s.Info.Session {
		_ = os.Remove(s.paths.file) // unless the directory was removed meanwhile, and the file is of another session
	}
	var errs []error
	if s.Jobs != nil {
		s.Jobs.Close()
	}
	if s.server != nil {
		errs = append(errs, s.discardOutside(timeout))
		if s.final {
			errs = append(errs, s.server.EndJournal())
		}
		s.server.Close()
	}
	if s.Client != nil {
		errs = append(errs, s.Client.Close())
	}
	if s.inside != nil {
		errs = append(errs, s.inside.Close())
	}
	if s.remote != nil {
		errs = append(errs, s.remote.Close())
	}
	if s.socket != nil {
		errs = append(errs, s.socket.Close())
	}
	if s.host != nil {
		errs = append(errs, s.host.Close())
	}
	errs = append(errs, s.closeUnits(timeout))
	if s.Info.Owner {
		s.paths.sweepUnpublished() // those that were killed while this one ran
	}
	s.Pool.Close()
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}

// closeUnits waits a little for requests that still hold unit memory.
func (s *Session) closeUnits(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	var errs []error
	for _, u := range s.units {
		if s.final && u.Durable() {
			errs = append(errs, u.Discard(s.Info.Session))
		}
		err := u.Close()
		for tqerr.CodeOf(err) == tqerr.InvalidState && time.Now().Before(deadline) {
			time.Sleep(retry)
			err = u.Close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Descriptors lists the file descriptors that a forked child must close, so that the end of this process is seen.
func (s *Session) Descriptors() []int {
	var out []int
	if s.lock != nil {
		out = append(out, int(s.lock.Fd()))
	}
	if s.socket != nil {
		out = append(out, s.socket.Descriptors()...)
	}
	if s.remote != nil {
		out = append(out, s.remote.Descriptors()...)
	}
	for _, u := range s.units {
		out = append(out, u.Descriptors()...)
	}
	if s.host != nil {
		out = append(out, s.host.Unit().Descriptors()...)
	}
	if s.server != nil {
		out = append(out, s.server.Descriptors()...)
	}
	if s.Client != nil {
		out = append(out, s.Client.Descriptors()...)
	}
	if d, ok := s.conn.(interface{ Descriptors() []int }); ok {
		out = append(out, d.Descriptors()...)
	}
	return out
}
