package session

import (
	"context"
	"time"

	"transferqueue/core/client"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/wire"
)

const (
	// redialFor is how long a client whose connection broke tries to get another one before its requests fail.
	redialFor   = 3 * time.Second
	redialPause = 20 * time.Millisecond
)

// joinRemote attaches to the session that listens at tcp://HOST:PORT. A server that is not there yet is waited for.
func joinRemote(ctx context.Context, cfg *Config) (*Session, error) {
	r := &redialer{address: cfg.Address, token: cfg.Token, id: client.NewID()}
	var conn transport.Conn
	var config wire.ConfigReply
	for {
		var err error
		if conn, err = r.dialUntil(ctx); err != nil {
			return nil, err
		}
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
	s.Client = client.New(client.Options{Conn: conn, Pool: s.Pool, Redial: r.redial, Remembered: r.restart > 0})
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
	token   []byte
	id      uint64
	life    uint64
	session string
	restart time.Duration // how long the session may take to be started again; 0: it will not be
}

func (r *redialer) dial(ctx context.Context) (transport.Conn, error) {
	conn, err := zmq.Dial(ctx, r.address, r.token, r.id, r.life)
	if err != nil {
		return nil, err
	}
	r.life = conn.Life()
	return conn, nil
}

// dialUntil tries as long as nobody answers and ctx lasts; the last error says why.
func (r *redialer) dialUntil(ctx context.Context) (transport.Conn, error) {
	for {
		conn, err := r.dial(ctx)
		if err == nil || tqerr.CodeOf(err) != tqerr.Unavailable {
			return conn, err
		}
		select {
		case <-time.After(redialPause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (r *redialer) redial(ctx context.Context) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, max(redialFor, r.restart))
	defer cancel()
	for {
		conn, err := r.dialUntil(ctx)
		if streamer, ok := conn.(transport.Streamer); err != nil || r.restart == 0 || ok && streamer.Resumed() {
			return conn, err
		}
		var config wire.ConfigReply
		err = configOf(ctx, conn, &config)
		if err == nil && config.Session == r.session {
			return conn, nil
		}
		_ = conn.Close()
		if err == nil {
			return nil, errEnded
		}
		if ctx.Err() != nil || tqerr.CodeOf(err) != tqerr.Unavailable {
			return nil, err
		}
	}
}
