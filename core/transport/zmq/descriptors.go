//go:build zmq

package zmq

import (
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

func socketOf(conn net.Conn) []syscall.Conn {
	if c, ok := conn.(syscall.Conn); ok {
		return []syscall.Conn{c}
	}
	return nil
}

// descriptors returns the numbers of sockets that are open.
func descriptors(sockets []syscall.Conn) (out []int) {
	for _, s := range sockets {
		if raw, err := s.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { out = append(out, int(fd)) })
		}
	}
	return out
}

// socketsAt finds the TCP sockets of this process by the ports of their ends. ZeroMQ does not tell which are its own.
func socketsAt(match func(own, peer string) bool) (out []int) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, entry := range entries {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		own, err := unix.Getsockname(fd)
		if err != nil {
			continue
		}
		peer, _ := unix.Getpeername(fd)
		if match(portOf(own), portOf(peer)) {
			out = append(out, fd)
		}
	}
	return out
}

func portOf(address unix.Sockaddr) string {
	switch a := address.(type) {
	case *unix.SockaddrInet4:
		return strconv.Itoa(a.Port)
	case *unix.SockaddrInet6:
		return strconv.Itoa(a.Port)
	}
	return ""
}
