package remote

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
)

// requests is a Link over which no payload goes.
type requests struct{ transport.Poster }

func (requests) Resumed() bool { return false }

func (requests) Send(context.Context, transport.Grant, int64, [][]byte) error { return errNoPayload }

func (requests) Receive(context.Context, transport.Grant, [][]byte) error { return errNoPayload }

func (requests) ReceiveFrom(context.Context, transport.Grant, int64, [][]byte) error {
	return errNoPayload
}

var errNoPayload = tqerr.New(tqerr.Unimplemented, "no payload")

// However long a question of the unit's is awaited, it forgets the answers that the controller has.
func TestAnswersThatArrivedAreForgotten(t *testing.T) {
	leaktest.Check(t)
	queue := jobs.New(nil)
	server, err := NewServer(Options{Name: "u", MemoryLimit: 1 << 20, Jobs: queue, Disk: &unit.Disk{
		Path: t.TempDir(), Run: "r", Unit: "u", Threshold: 1 << 40, HighWatermark: 0.9, LowWatermark: 0.4,
	}})
	require.NoError(t, err)
	net := memnet.New(1, server)
	conn, err := net.Dial(1)
	require.NoError(t, err)
	line := NewLine(requests{conn}, func(context.Context) (Link, error) { return nil, tqerr.New(tqerr.Unavailable, "gone") })
	u, err := Open(t.Context(), line, Address{Name: "u", Session: 1, Address: "tcp://h:1"})
	require.NoError(t, err)
	u.Advise(func(string, []schema.Sample, []store.Use) {})
	for range 1000 {
		require.NoError(t, u.Sync(t.Context()))
	}
	l := server.current.Load()
	l.mu.Lock()
	require.NotNil(t, l.mu.advice.standing)
	require.LessOrEqual(t, len(l.mu.outcomes), 4, "that of the question, and of the last requests")
	l.mu.Unlock()
	require.NoError(t, u.Close())
	require.NoError(t, net.Close())
	require.NoError(t, server.Close())
	queue.Close()
}
