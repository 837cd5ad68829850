package local

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
)

// maxPath is the longest path that a unix socket can have.
const maxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// socketBuffer is what the kernel may hold of one direction; larger payloads need fewer wake-ups with it.
const socketBuffer = 1 << 20

func checkPath(path string) error {
	if len(path) > maxPath {
		return tqerr.New(tqerr.InvalidArgument, "socket path %q has %d bytes, limit %d", path, len(path), maxPath)
	}
	if path == "" || path[0] == '@' {
		return tqerr.New(tqerr.InvalidArgument, "socket path %q is not a path of a file", path)
	}
	return nil
}

// peerOf asks the kernel who is at the other end. The process id is 0 when it is not in our namespace.
func peerOf(sock *net.UnixConn) (uid uint32, pid int, err error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) { cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, 0, err
	}
	if sockErr != nil {
		return 0, 0, sockErr
	}
	return cred.Uid, int(cred.Pid), nil
}

// mayConnect tells whether a user may be a client of a server of user own.
func mayConnect(uid, own uint32) bool { return uid == own || uid == 0 }

// descriptor returns the number of a socket's descriptor, which stays its number until it is closed.
func descriptor(sock syscall.Conn) int {
	number := -1
	raw, err := sock.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { number = int(fd) })
	}
	if err != nil {
		return -1
	}
	return number
}

// blocking returns another descriptor of a socket, which nobody else knows, and sets the socket to blocking. An os.File would
// stay with Go's poller.
func blocking(sock syscall.Conn) (fd int, err error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return -1, err
	}
	var failed error
	if err := raw.Control(func(own uintptr) { fd, failed = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return -1, err
	}
	if failed != nil {
		return -1, failed
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func ownUser() uint32 { return uint32(os.Geteuid()) }
