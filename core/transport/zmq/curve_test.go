//go:build zmq

package zmq

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

func TestWhoDoesNotFitIsTold(t *testing.T) {
	leaktest.Check(t)
	plain, curve := run(t, serving{}, defaultLimits), runWith(t, secret, serving{}, defaultLimits)
	healthy := dialedWith(t, curve, encrypted(t), 1)
	for name, c := range map[string]struct {
		server *Server
		given  Credentials
		code   tqerr.Code
		says   string
	}{
		"no key":          {curve, token, tqerr.InvalidArgument, "uses CURVE: behind the token the server's key is missing"},
		"a key too many":  {plain, encrypted(t), tqerr.InvalidArgument, "is not encrypted"},
		"another token":   {curve, Credentials{[]byte("another-token-of-length"), encrypted(t).Key}, tqerr.InvalidArgument, "the token is not that of the session"},
		"another key":     {curve, Credentials{token.Token, bytes.Repeat([]byte{3}, KeySize)}, tqerr.Unavailable, "has another key than stands behind the token"},
		"a key too short": {curve, Credentials{token.Token, make([]byte, 31)}, tqerr.InvalidArgument, "a key of 31 bytes, want 32"},
	} {
		began := time.Now()
		_, err := Dial(t.Context(), c.server.Address(), c.given, 2, 0)
		require.Equal(t, c.code, tqerr.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, c.says, name)
		require.NotContains(t, err.Error(), string(token.Token))
		require.Less(t, time.Since(began), 5*time.Second, name)
	}
	requireAlive(t, healthy)
	_, err := listen("tcp://127.0.0.1:0", 0, Credentials{token.Token, make([]byte, 5)}, serving{}, defaultLimits)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
}

// A client that knows the server's key, which is public, and not the token.
func TestNothingIsReadOfAnUnknownKey(t *testing.T) {
	leaktest.Check(t)
	s := runWith(t, secret, serving{serve: func(context.Context, transport.Peer, *wire.Request, func(*wire.Reply)) {
		t.Error("a request was served")
	}}, defaultLimits)
	public, private, err := zmq4.NewCurveKeypair()
	require.NoError(t, err)
	sock := rawSocket(t, s, func(sock *zmq4.Socket) {
		require.NoError(t, sock.SetCurveServerkey(string(encrypted(t).Key)))
		require.NoError(t, sock.SetCurvePublickey(public))
		require.NoError(t, sock.SetCurveSecretkey(private))
	})
	require.NoError(t, sock.SetRcvtimeo(200*time.Millisecond))
	_, err = sock.SendBytes(wire.Hello(4, nil).Append(nil), 0)
	require.NoError(t, err)
	_, err = sock.RecvBytes(0)
	require.Error(t, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(t, s.mu.conns)
}

// tap relays connections and keeps what crosses.
type tap struct {
	mu   sync.Mutex
	seen bytes.Buffer
}

func (w *tap) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen.Write(p)
}

func (w *tap) saw(what []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return bytes.Contains(w.seen.Bytes(), what)
}

func (w *tap) relay(t *testing.T, to string) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var running sync.WaitGroup
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		running.Wait()
	})
	copying := func(from, into net.Conn) {
		_, _ = io.Copy(io.MultiWriter(into, w), from)
		_, _ = from.Close(), into.Close()
		running.Done()
	}
	running.Add(1)
	go func() {
		defer running.Done()
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			running.Add(2)
			go copying(near, far)
			go copying(far, near)
		}
	}()
	return l
}

// lending answers reads with a payload that can be recognised, and requests with themselves.
type lending struct {
	serving
	memory []byte
}

func (l lending) Lend(transport.Peer, transport.Grant, func()) ([][]byte, func(), error) {
	return [][]byte{l.memory}, func() {}, nil
}

// Who reads the network sees neither token nor request nor payload, which it does see without CURVE.
func TestAnEavesdropper(t *testing.T) {
	for name, c := range map[string]struct {
		server, client Credentials
		hidden         bool
	}{"PLAIN": {token, token, false}, "CURVE": {secret, encrypted(t), true}} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			payload := bytes.Repeat([]byte("PAYLOAD-OF-A-READ"), 10)
			s := runWith(t, c.server, lending{serving{serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
				reply(&wire.Reply{Body: req.Body})
			}}, payload}, defaultLimits)
			w := &tap{}
			l := w.relay(t, strings.TrimPrefix(s.Address(), scheme))
			conn, err := Dial(t.Context(), scheme+l.Addr().String(), c.client, 1, 0)
			require.NoError(t, err)
			defer conn.Close()
			conn.payload = w.relay(t, conn.payload).Addr().String()
			reply, err := conn.Call(t.Context(), &wire.Request{Op: wire.OpList, Body: []byte("BODY-OF-A-REQUEST")})
			require.NoError(t, err)
			require.Equal(t, "BODY-OF-A-REQUEST", string(reply.Body))
			got := make([]byte, len(payload))
			require.NoError(t, conn.Receive(t.Context(), transport.Grant{}, [][]byte{got[:100], got[100:]}))
			require.Equal(t, payload, got)
			for _, what := range [][]byte{token.Token, []byte("BODY-OF-A-REQUEST"), []byte("PAYLOAD-OF-A-READ")} {
				require.Equal(t, c.hidden, !w.saw(what), "%s", what)
			}
		})
	}
}

// Who answers at the payload port in the server's place has another certificate, or none.
func TestSomebodyElseAtThePayloadPort(t *testing.T) {
	leaktest.Check(t)
	s := runWith(t, secret, serving{}, defaultLimits)
	conn := dialedWith(t, s, encrypted(t), 1)
	impostor, err := stream.NewIdentity()
	require.NoError(t, err)
	other, err := stream.Listen("127.0.0.1", 0, stream.DefaultLimits, impostor)
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	open, err := stream.Listen("127.0.0.1", 0, stream.DefaultLimits, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, open.Close()) }()
	for _, port := range []int{other.Port(), open.Port()} {
		conn.payload = join("127.0.0.1", port)
		err := conn.Receive(t.Context(), transport.Grant{}, [][]byte{make([]byte, 10)})
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "no encrypted stream to tcp://"+conn.payload)
	}
	requireAlive(t, conn)
}
