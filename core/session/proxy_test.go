//go:build zmq

package session_test

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/wire"
)

// proxyHost is another loopback address, so that a proxy has the very ports of the server behind it.
const proxyHost = "127.0.0.2"

// proxy stands between clients and a server on loopback. It delays what passes, cuts connections in the middle of anything,
// sends requests and replies twice, and shows the tickets of payload streams a second time.
type proxy struct {
	t                          *testing.T
	cut, twice                 float64       // chances, per message or piece
	delay                      time.Duration // at most, per message or piece
	blind                      bool          // what passes is encrypted, so that anything may be sent twice, and no ticket is seen
	calm                       atomic.Bool
	down                       atomic.Bool // nothing gets through
	cuts, doubles, stale, runs atomic.Int64
	running                    sync.WaitGroup
	mu                         struct {
		sync.Mutex
		listeners []net.Listener
		conns     map[net.Conn]struct{}
		closed    bool
	}
}

// startProxy makes the proxy of a server at tcp://127.0.0.1:PORT with its payload at another port.
func startProxy(t *testing.T, p *proxy, ports ...int) {
	p.t = t
	p.mu.conns = map[net.Conn]struct{}{}
	for _, port := range ports {
		l, err := net.Listen("tcp", net.JoinHostPort(proxyHost, strconv.Itoa(port)))
		require.NoError(t, err)
		p.mu.listeners = append(p.mu.listeners, l)
		p.running.Add(1)
		guard.Go("proxy: accept", func() {
			defer p.running.Done()
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				p.running.Add(1)
				guard.Go("proxy: connection", func() {
					defer p.running.Done()
					p.carry(conn, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
				})
			}
		})
	}
	t.Cleanup(p.close)
}

func (p *proxy) close() {
	p.mu.Lock()
	p.mu.closed = true
	for _, l := range p.mu.listeners {
		_ = l.Close()
	}
	for conn := range p.mu.conns {
		_ = conn.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
}

// keep registers connections, which the end of the proxy and the network going away close.
func (p *proxy) keep(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.mu.conns[c] = struct{}{}
		if p.mu.closed || p.down.Load() {
			_ = c.Close()
		}
	}
}

func (p *proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.mu.conns, c)
		_ = c.Close()
	}
}

// cutAll is the network going away, until down is false again.
func (p *proxy) cutAll() {
	p.down.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.mu.conns {
		_ = conn.Close()
	}
}

func (p *proxy) carry(client net.Conn, address string) {
	server, err := net.Dial("tcp", address)
	if err != nil {
		_ = client.Close()
		return
	}
	p.keep(client, server)
	defer p.drop(client, server)
	p.runs.Add(1)
	first := make([]byte, 4)
	if _, err := io.ReadFull(client, first); err != nil {
		return
	}
	if _, err := server.Write(first); err != nil {
		return
	}
	const handshakeOfTLS = 22
	if string(first) == "TQ1S" {
		p.carryStream(client, server, first, address)
		return
	}
	if first[0] == handshakeOfTLS {
		p.carryBytes(client, server)
		return
	}
	var both sync.WaitGroup
	both.Add(2)
	guard.Go("proxy: requests", func() {
		defer both.Done()
		defer p.drop(client, server)
		p.messages(client, server, 60)
	})
	guard.Go("proxy: replies", func() {
		defer both.Done()
		defer p.drop(client, server)
		p.messages(server, client, 64)
	})
	both.Wait()
}

// unlucky waits a little and tells whether the connection is to be cut now.
func (p *proxy) unlucky() bool {
	if p.calm.Load() {
		return false
	}
	if rand.IntN(4) == 0 {
		time.Sleep(rand.N(p.delay))
	}
	if rand.Float64() < p.cut {
		p.cuts.Add(1)
		return true
	}
	return false
}

// messages passes on ZMTP: a greeting, whose rest is still to come, and then frames.
func (p *proxy) messages(from io.Reader, to io.Writer, greeting int) {
	plain := struct{ io.Writer }{to} // one that is no socket: between sockets bytes are spliced, over pipes that stay for a while
	if _, err := io.CopyN(plain, from, int64(greeting)); err != nil {
		return
	}
	for {
		head := make([]byte, 9)
		if _, err := io.ReadFull(from, head[:2]); err != nil {
			return
		}
		size := uint64(head[1])
		if head[0]&2 == 0 {
			head = head[:2]
		} else {
			if _, err := io.ReadFull(from, head[2:]); err != nil {
				return
			}
			size = binary.BigEndian.Uint64(head[1:])
		}
		frame := append(head, make([]byte, size)...)
		body := frame[len(head):]
		if _, err := io.ReadFull(from, body); err != nil {
			return
		}
		if p.unlucky() {
			_, _ = to.Write(frame[:rand.IntN(len(frame))])
			return
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
		if (p.blind || double(body)) && !p.calm.Load() && rand.Float64() < p.twice {
			p.doubles.Add(1)
			if _, err := to.Write(frame); err != nil {
				return
			}
		}
	}
}

// double tells the messages that may arrive twice: requests and replies.
func double(body []byte) bool {
	return len(body) >= wire.HeaderSize && string(body[:4]) == "TQ1F" && (wire.FrameType(body[4]) == wire.FrameRequest || wire.FrameType(body[4]) == wire.FrameReply)
}

// carryStream passes on a payload stream, and then shows its ticket again.
func (p *proxy) carryStream(client, server net.Conn, first []byte, address string) {
	ticket := make([]byte, 16)
	if _, err := io.ReadFull(client, ticket); err != nil {
		return
	}
	if _, err := server.Write(ticket); err != nil {
		return
	}
	answered := p.carryBytes(client, server)
	if p.calm.Load() || !answered { // a cut may come before the server has read the ticket
		return
	}
	again, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer again.Close()
	_ = again.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = again.Write(append(first, ticket...))
	answer, err := io.ReadAll(again)
	if err == nil && !strings.Contains(string(answer), "was used already") {
		p.t.Errorf("a ticket that was used is answered with %q", answer)
	}
	p.stale.Add(1)
}

// carryBytes passes on what it does not look at, and tells whether the server has said anything.
func (p *proxy) carryBytes(client, server net.Conn) bool {
	var both sync.WaitGroup
	var answered atomic.Bool
	both.Add(2)
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		guard.Go("proxy: payload", func() {
			defer both.Done()
			defer p.drop(client, server)
			buf := make([]byte, 32<<10)
			for {
				n, err := way[0].Read(buf)
				if err != nil {
					return
				}
				if way[0] == server {
					answered.Store(true)
				}
				if p.unlucky() {
					n = rand.IntN(n + 1)
					_, _ = way[1].Write(buf[:n])
					return
				}
				if _, err := way[1].Write(buf[:n]); err != nil {
					return
				}
			}
		})
	}
	both.Wait()
	return answered.Load()
}
