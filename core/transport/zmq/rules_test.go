//go:build zmq

package zmq

import (
	"context"
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Only the goroutine of a reactor sends and receives. The other half of the proof is reactor.uses under the race detector.
func TestASocketBelongsToItsReactor(t *testing.T) {
	found := map[string]bool{}
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(gotoken.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		for _, d := range file.Decls {
			ast.Inspect(d, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok && slices.Contains(touching, s.Sel.Name) {
					found[name+" "+d.(*ast.FuncDecl).Name.Name] = true
				}
				return true
			})
		}
	}
	require.Equal(t, []string{
		"dial.go open",                                                               // before the reactor starts, and in ending
		"dial.go watch",                                                              // before
		"reactor.go discard", "reactor.go park", "reactor.go post", "reactor.go run", // the reactor itself
		"server.go open", // before, and in receive of the gate
	}, slices.Sorted(maps.Keys(found)))
}

var touching = []string{"sock", "SendBytes", "SendMessage", "RecvBytes", "RecvMessageBytes", "GetEvents", "Monitor"}

// A message to a peer that is not there is refused, not dropped, and nobody else notices.
func TestAMessageToNobodyIsRefused(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	c := dialed(t, s, 1)
	nobody := &link{r: s.router, to: "nobody", limits: defaultLimits}
	require.NoError(t, nobody.Send(&wire.Frame{Type: wire.FrameReply}, true))
	<-nobody.Room()
	require.Eventually(t, func() bool {
		s.router.mu.Lock()
		defer s.router.mu.Unlock()
		return nobody.err != nil
	}, 30*time.Second, time.Millisecond)
	require.Equal(t, zmq4.Errno(syscall.EHOSTUNREACH), zmq4.AsErrno(nobody.err))
	require.Equal(t, nobody.err, nobody.Send(&wire.Frame{Type: wire.FrameReply}, true))
	requireAlive(t, c)
}

// ZeroMQ's own queues hold a thousand messages unless told otherwise, and a ROUTER drops what is beyond.
func TestManySmallMessagesAreNotDropped(t *testing.T) {
	leaktest.Check(t)
	const n = 20_000
	release := make(chan struct{})
	var arrived atomic.Int64
	s := run(t, serving{serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		<-release
		arrived.Add(1)
		reply(&wire.Reply{Body: req.Body})
	}}, defaultLimits)
	c := dialed(t, s, 1)
	hold := make(chan struct{})
	proceed := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(proceed)
	answers := make(chan error, n)
	for i := range n {
		c.Post(&wire.Request{Body: []byte("small")}, func(_ *wire.Reply, err error) {
			if i == 0 {
				<-hold // the client does not take its replies for a while either, nor sends what is left
			}
			answers <- err
		})
	}
	require.Eventually(t, func() bool {
		c.link.r.mu.Lock()
		defer c.link.r.mu.Unlock()
		return len(c.link.queue) == 0
	}, time.Minute, time.Millisecond)
	close(release)
	require.Eventually(t, func() bool { return arrived.Load() == n }, time.Minute, time.Millisecond)
	proceed()
	for range n {
		require.NoError(t, <-answers)
	}
}

// A peer whose old connection nobody has ended yet is served on its new one, and is not gone when the old one ends.
func TestHandover(t *testing.T) {
	leaktest.Check(t)
	l := defaultLimits
	l.grace = time.Hour
	gone := make(chan transport.Peer, 9)
	waiting := make(chan func(*wire.Reply), 9)
	s := run(t, serving{gone: func(p transport.Peer) { gone <- p }, serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		if len(req.Body) == 0 {
			waiting <- reply
			return
		}
		reply(&wire.Reply{Body: req.Body})
	}}, l)
	old, err := Dial(t.Context(), s.Address(), token, 9, 0)
	require.NoError(t, err)
	lost := make(chan error, 1)
	old.Post(&wire.Request{}, func(_ *wire.Reply, err error) { lost <- err })
	late := <-waiting
	next, err := Dial(t.Context(), s.Address(), token, 9, old.Life())
	require.NoError(t, err)
	require.True(t, next.Resumed())
	requireAlive(t, next)
	broken(old)
	require.Error(t, <-lost)
	late(&wire.Reply{}) // to a connection that is gone
	requireAlive(t, next)
	require.Empty(t, gone)
	require.NoError(t, next.Close())
	require.EqualValues(t, 9, (<-gone).ID)
}

func TestJudge(t *testing.T) {
	good := func() [][]byte {
		return [][]byte{[]byte("1.0"), []byte("7"), []byte("tq"), []byte("127.0.0.1"), nil, []byte("PLAIN"), []byte("tq"), token.Token}
	}
	for name, c := range map[string]struct {
		change func([][]byte) [][]byte
		status string
	}{
		"the token":           {func(p [][]byte) [][]byte { return p }, "200"},
		"another one":         {func(p [][]byte) [][]byte { p[7] = []byte("0123456789abcdef-tokeN"); return p }, "400"},
		"a part of it":        {func(p [][]byte) [][]byte { p[7] = token.Token[:16]; return p }, "400"},
		"none":                {func(p [][]byte) [][]byte { p[7] = nil; return p }, "400"},
		"no mechanism":        {func(p [][]byte) [][]byte { p[5] = []byte("NULL"); return p[:6] }, "400"},
		"another mechanism":   {func(p [][]byte) [][]byte { p[5] = []byte("GSSAPI"); return p }, "400"},
		"a part too many":     {func(p [][]byte) [][]byte { return append(p, token.Token) }, "400"},
		"nothing":             {func([][]byte) [][]byte { return nil }, "400"},
		"the token as a name": {func(p [][]byte) [][]byte { p[6], p[7] = token.Token, []byte("tq"); return p }, "400"},
	} {
		parts := c.change(good())
		answer := judge(parts, [][]byte{[]byte("PLAIN"), []byte("tq"), token.Token})
		require.Len(t, answer, 6, name)
		require.Equal(t, c.status, answer[2], name)
		if len(parts) > 1 {
			require.Equal(t, "7", answer[1], name)
		}
	}
}
