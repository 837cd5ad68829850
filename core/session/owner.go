package session

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"time"

	"transferqueue/core/client"
	"transferqueue/core/controller"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/machine"
	"transferqueue/core/jobs"
	"transferqueue/core/sampler"
	"transferqueue/core/transport/inproc"
	"transferqueue/core/transport/local"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

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
	host, _ := os.Hostname()
	if err = s.startController(ctx, cfg, host); err != nil {
		return nil, err
	}
	info := Info{
		Owner: true, Session: s.server.Session(), PID: os.Getpid(), Secret: s.server.Secret(), Host: host, Blob: s.server.Config(),
		Machine: machine.ID(), Restored: s.server.Restored(),
	}
	info.Socket = p.socketOf(info.Session, lock != nil, !cfg.Journal.none())
	if s.socket, err = local.Listen(info.Socket, info.Secret, s.server); err != nil {
		return nil, err
	}
	if cfg.Listen != "" {
		if err = s.listen(cfg, &info); err != nil {
			return nil, err
		}
	}
	s.inside = inproc.NewServer(s.server)
	if s.conn, err = s.inside.Dial(client.NewID()); err != nil {
		return nil, err
	}
	s.Client = client.New(client.Options{Conn: s.conn, Pool: s.Pool, Machine: machine.ID()})
	s.Info = info
	if lock == nil {
		return s, nil
	}
	return s, p.write(&rendezvous{
		Format: rendezvousFormat, Protocol: wire.Version, Session: info.Session, PID: info.PID, Secret: info.Secret, Socket: info.Socket,
	})
}

// startController starts the units of this process, and the controller: one that goes on with a session when the journal has one.
func (s *Session) startController(ctx context.Context, cfg *Config, host string) (err error) {
	session, secret := newIdentity()
	written, err := cfg.Journal.open(cfg.Namespace)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && written != nil {
			_ = written.Close()
		}
	}()
	s.Jobs = jobs.New(s.Pool)
	units, err := s.startUnits(cfg, session, host)
	if err != nil {
		return err
	}
	samplerTime := time.Duration(cfg.SamplerMS) * time.Millisecond
	picks, err := sampler.Make(cfg.Sampler, s.Jobs, samplerTime)
	if err != nil {
		return err
	}
	log := written
	written = nil // Open closes it when it fails
	s.server, err = controller.Open(ctx, controller.Options{
		Journal: log, Secret: secret, RestartWait: time.Duration(cfg.Journal.RestartMS) * time.Millisecond,
		Units: units, Sampler: picks, Python: s.Jobs, SamplerTime: samplerTime, Polling: cfg.Polling, PreAllocate: cfg.PreAllocate,
		SampleLimit: cfg.SampleLimit, PutWait: time.Duration(cfg.PutWaitMS) * time.Millisecond, Config: cfg.Blob,
		Version: cfg.Version, PID: os.Getpid(), Session: session, Host: host, Machine: machine.ID(), Jobs: s.Jobs.Waiting,
		Dial: dialUnit,
	})
	return err
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
