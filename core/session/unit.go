package session

import (
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/machine"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/local"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// maxUnitName bounds the name of a unit, which errors and listings repeat.
const maxUnitName = 256

// openUnit makes this process a storage unit, which a controller joins by socket or address, and secret; see Info. It has no
// rendezvous file, and no client.
func openUnit(cfg *Config, p paths) (_ *Session, err error) {
	if cfg.Name == "" || len(cfg.Name) > maxUnitName {
		return nil, tqerr.New(tqerr.InvalidArgument, "unit name %q: want 1 to %d bytes", cfg.Name, maxUnitName)
	}
	if cfg.MemoryLimit < 0 || cfg.SampleLimit < 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "unit %q: limits of %d bytes and %d samples, want 0 or more", cfg.Name, cfg.MemoryLimit, cfg.SampleLimit)
	}
	s := &Session{Pool: bufpool.New(), paths: p}
	defer func() {
		if err != nil {
			_ = s.Close(0)
		}
	}()
	p.sweepUnits()
	s.Jobs = jobs.New(s.Pool)
	session, secret := newIdentity()
	disk, err := cfg.Disk.of(session, cfg.Namespace, cfg.Name, 0)
	if err != nil {
		return nil, err
	}
	s.host, err = remote.NewServer(remote.Options{
		Name: cfg.Name, MemoryLimit: cfg.MemoryLimit, SampleLimit: cfg.SampleLimit, Jobs: s.Jobs, Disk: disk,
	})
	if err != nil {
		return nil, err
	}
	s.Info = Info{Owner: true, Session: session, PID: os.Getpid(), Secret: secret, Blob: cfg.Blob, Machine: machine.ID()}
	s.Info.Socket = p.prefix + unitMark + strconv.Itoa(s.Info.PID) + "-" + session[:8] + ".sock"
	s.socket, err = local.Listen(s.Info.Socket, secret, s.host)
	if err == nil && cfg.Listen != "" {
		err = s.listenAsUnit(cfg)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// listenAsUnit serves controllers and clients of other hosts, and notes how they reach the unit.
func (s *Session) listenAsUnit(cfg *Config) (err error) {
	own := zmq.Credentials{Token: wire.UnitToken(s.Info.Secret)}
	if cfg.Security == securityCurve {
		own.Key = newKey()
		if s.Info.Key, err = zmq.PublicKey(own.Key); err != nil {
			return err
		}
	}
	if s.remote, err = zmq.Listen(cfg.Listen, cfg.PayloadPort, own, s.host); err != nil {
		return err
	}
	s.host.ServeStreams(s.remote.Ticket)
	s.Info.Address = s.remote.Address()
	return nil
}

// unitMark begins the middle of the name of a unit's socket, the process id follows. No socket of a session has it, since a
// session's name is hexadecimal.
const unitMark = "u"

// unitLives tells from a socket and the middle of its name that it is a unit's that runs. A process of another namespace of
// process ids cannot be seen, but answers.
func unitLives(path, middle string) bool {
	rest, is := strings.CutPrefix(middle, unitMark)
	if !is {
		return false
	}
	number, _, _ := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(number)
	if err == nil && pid > 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	conn, err := net.Dial("unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return !errors.Is(err, syscall.ECONNREFUSED)
}

// sweepUnits removes the sockets of units whose processes have died.
func (p paths) sweepUnits() {
	p.removeDead(func(middle, ext string) bool { return ext == "sock" && strings.HasPrefix(middle, unitMark) })
}
