package session

import (
	"context"
	"time"

	"transferqueue/core/client"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/machine"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/local"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

const (
	// redialFor is how long a client whose connection broke tries to get another one before its requests fail.
	redialFor = 3 * time.Second
	// silentRedialFor is that when its end was a silence, which takes four seconds to be noticed.
	silentRedialFor = 750 * time.Millisecond
	redialPause     = 20 * time.Millisecond
	// curveInline is how much payload travels in messages that CURVE encrypts, at a hundredth of the speed of a stream.
	curveInline = 4 << 10
)

// listen serves clients of other hosts, and notes how they reach the session.
func (s *Session) listen(cfg *Config, info *Info) error {
	own, public, err := ownCredentials(cfg)
	if err != nil {
		return err
	}
	if s.remote, err = zmq.Listen(cfg.Listen, cfg.PayloadPort, own, s.server); err != nil {
		return err
	}
	info.Address, info.Key = s.remote.Address(), public.Key
	return nil
}

// joinRemote attaches to the session that listens at tcp://HOST:PORT. A server that is not there yet is waited for.
func joinRemote(ctx context.Context, cfg *Config) (*Session, error) {
	given, err := reachCredentials(cfg)
	if err != nil {
		return nil, err
	}
	r := &redialer{address: cfg.Address, given: given, id: client.NewID()}
	var conn transport.Conn
	var config wire.ConfigReply
	for {
		fresh, err := r.dialUntil(ctx)
		if err != nil {
			return nil, err
		}
		conn = fresh
		if err = configOf(ctx, conn, &config); err == nil {
			break
		}
		_ = conn.Close()
		if ctx.Err() != nil || tqerr.CodeOf(err) != tqerr.Unavailable {
			return nil, tqerr.Wrap(tqerr.CodeOf(err), err, "%s", cfg.Address)
		}
	}
	s := &Session{conn: conn, Pool: bufpool.New()}
	s.Info = Info{Session: config.Session, PID: config.PID, Address: cfg.Address, Host: config.Host, Blob: config.Config}
	r.session, r.restart = config.Session, time.Duration(config.RestartMS)*time.Millisecond
	o := client.Options{Conn: conn, Pool: s.Pool, Redial: r.redial, Remembered: r.restart > 0, Machine: machine.ID()}
	if len(given.Key) > 0 {
		o.Inline = curveInline
	}
	s.Client = client.New(o)
	return s, nil
}

func configOf(ctx context.Context, conn transport.Conn, config *wire.ConfigReply) error {
	reply, err := conn.Call(ctx, &wire.Request{Op: wire.OpConfig})
	if err != nil {
		return err
	}
	return wire.Unmarshal(reply.Body, config)
}

// redialer connects a client to its session again and again. Its methods are called by one goroutine at a time.
type redialer struct {
	address string
	given   zmq.Credentials
	id      uint64
	last    *zmq.Conn // nil: there was none yet
	session string
	restart time.Duration // how long the session may take to be started again; 0: it will not be
}

func (r *redialer) dial(ctx context.Context) (*zmq.Conn, error) {
	life := uint64(0)
	if r.last != nil {
		life = r.last.Life()
	}
	conn, err := zmq.Dial(ctx, r.address, r.given, r.id, life)
	if err != nil {
		return nil, err
	}
	r.last = conn
	return conn, nil
}

// patience is how long to try to connect, so that requests fail within five seconds after the other side has vanished.
func (r *redialer) patience() time.Duration {
	if r.last != nil && r.last.Silent() {
		return silentRedialFor
	}
	return redialFor
}

// dialUntil tries as long as nobody answers and ctx lasts; the last error says why.
func (r *redialer) dialUntil(ctx context.Context) (*zmq.Conn, error) {
	var why error
	for {
		conn, err := r.dial(ctx)
		if err != nil && why != nil && ctx.Err() != nil {
			return nil, why // that the last attempt had no time left is not the reason
		}
		if err == nil || tqerr.CodeOf(err) != tqerr.Unavailable {
			return conn, err
		}
		why = err
		select {
		case <-time.After(redialPause):
		case <-ctx.Done():
			return nil, why
		}
	}
}

// silence turns the end of an attempt that had less time than ctx into Unavailable: the caller's time is not over.
func silence(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && tqerr.CodeOf(err) == tqerr.DeadlineExceeded {
		return tqerr.New(tqerr.Unavailable, "%s", err)
	}
	return err
}

// redial finds the same session again. One that goes on after its owner has died is asked whether it is the same.
func (r *redialer) redial(ctx context.Context) (transport.Conn, error) {
	short, cancel := context.WithTimeout(ctx, max(r.patience(), r.restart))
	defer cancel()
	for {
		conn, err := r.dialUntil(short)
		if err != nil {
			return nil, silence(ctx, err)
		}
		if r.restart == 0 || conn.Resumed() {
			return conn, nil
		}
		var config wire.ConfigReply
		err = configOf(short, conn, &config)
		if err == nil && config.Session == r.session {
			return conn, nil
		}
		_ = conn.Close()
		if err == nil {
			return nil, errEnded
		}
		if short.Err() != nil || tqerr.CodeOf(err) != tqerr.Unavailable {
			return nil, silence(ctx, err)
		}
	}
}

// dialUnit connects a controller to a unit in another process: by its socket when both are on one machine and the socket can
// be reached from here, else over TCP.
func dialUnit(ctx context.Context, at *wire.UnitAddress) (remote.Conn, error) {
	if at.Socket != "" && (at.Address == "" || at.Machine == machine.ID()) {
		conn, err := local.Dial(ctx, at.Socket, at.Secret, client.NewID())
		if err == nil || at.Address == "" {
			return conn, err
		}
	}
	r := &redialer{address: at.Address, given: zmq.Credentials{Token: at.Token(), Key: at.Key}, id: client.NewID()}
	dial := func(ctx context.Context) (remote.Link, error) {
		short, cancel := context.WithTimeout(ctx, r.patience())
		defer cancel()
		conn, err := r.dialUntil(short)
		if err != nil {
			return nil, silence(ctx, err)
		}
		return conn, nil
	}
	first, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	return remote.NewLine(first, dial), nil
}
