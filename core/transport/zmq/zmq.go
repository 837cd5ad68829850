// Package zmq connects hosts: requests and replies are messages over ZeroMQ, a ROUTER at the server and a DEALER at each
// client, and payload moves on TCP streams beside them (transport/stream). Sockets authenticate with PLAIN, or with CURVE,
// which encrypts too: the server's socket hands on nothing of a connection whose client does not know the session's token.
// With CURVE the streams are TLS; the welcome brings the fingerprint of the certificate that the server has made itself.
//
// A connection begins with a hello, the first message behind the authentication. The welcome that answers it brings a
// ticket, with which the client opens its lifeline: a stream that carries no payload and whose end is the end of the
// connection, at both sides at once. ROUTER and DEALER say nothing of that themselves. The kernel watches the lifeline,
// so a host that has vanished is noticed within four seconds; a process that is slow is not taken for a dead one, because its
// kernel answers for it. The server then waits for some time whether the peer comes back under its id, and remembers meanwhile what it
// has answered; a client that leaves says so on its lifeline.
//
// A socket belongs to one goroutine, the reactor, to which others hand their messages. It never blocks in ZeroMQ: it is
// parked in the network poller of Go over the socket's own descriptor. ZeroMQ's high-water marks count messages and are
// off; each side counts the bytes that the other has taken, which credit frames tell, and keeps the rest in a queue of its
// own. A peer that takes nothing loses its connection and costs nobody else anything.
//
// There are no sockets for events: liveness is the lifeline's, and a watch is a request that waits at the server, whose answer
// has all changes since the one before, in order and once, also when the connection breaks in between. PUB/SUB would lose what
// is sent while a subscriber is away or slow, and need that request besides, to tell that from silence.
//
// All but this file and credentials.go needs cgo and libzmq, and the build tag zmq.
//
// Locks: reactor.mu, Server.mu, conn.mu and Conn.mu are leaves. None is held while a handler is called.
package zmq

import (
	"net"
	"strconv"
	"strings"
	"time"

	"transferqueue/core/tqerr"
)

// limits bound what a peer can cost.
type limits struct {
	// window is how many bytes may be on the way to a peer that has not said that it took them, at least 1 MiB; one message may
	// exceed it.
	window int
	// queued is how many bytes may wait behind the window. One message may exceed it when nothing else waits.
	queued int
	// stall is how long a peer may take none of the bytes that wait for it.
	stall time.Duration
	// greeting is how long either side may take until the connection stands.
	greeting time.Duration
	// grace is how long a peer that did not say goodbye may stay away before it is gone.
	grace time.Duration
}

var defaultLimits = limits{
	window: 16 << 20, queued: 64 << 20, stall: 30 * time.Second, greeting: 10 * time.Second, grace: 10 * time.Second,
}

// maxMessage is the largest message of either side.
const maxMessage = 320 << 20

const scheme = "tcp://"

// ParseAddress splits tcp://HOST:PORT. Without a host it is the loopback address; "*" is every interface.
func ParseAddress(address string) (host string, port int, err error) {
	bad := func(why string) (string, int, error) {
		return "", 0, tqerr.New(tqerr.InvalidArgument, "address %q: %s, want tcp://HOST:PORT", address, why)
	}
	rest, ok := strings.CutPrefix(address, scheme)
	if !ok {
		return bad("it does not begin with " + scheme)
	}
	host, text, err := net.SplitHostPort(rest)
	if err != nil {
		return bad("it has no port")
	}
	if port, err = strconv.Atoi(text); err != nil || port < 0 || port > 65535 {
		return bad("port " + strconv.Quote(text) + " is not one")
	}
	switch host {
	case "":
		host = "127.0.0.1"
	case "*":
		host = "0.0.0.0"
	}
	return host, port, nil
}

func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
