//go:build go1.25

package controller_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/wire"
)

// running commits an update of "a" by a callable that waits for leave. cut ends the connection that it came on.
func (f *far) running(entered, leave chan bool) (again func() <-chan *wire.Reply, cut func()) {
	f.s.t.Helper()
	f.s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
		entered <- true
		<-leave
		return sums(job, mem)
	})
	var reply wire.PutReply
	require.NoError(f.s.t, f.call(wire.OpPut, &wire.PutRequest{
		Partition: "p", Keys: []string{"a"}, Columns: []wire.Column{column(1, wide)}, Update: true, Callable: []byte("sum"),
	}, &reply))
	f.write(reply.Txn, 2)
	body, err := wire.Marshal(&wire.TxnRequest{Txn: reply.Txn})
	require.NoError(f.s.t, err)
	f.sent++
	req := &wire.Request{Op: wire.OpCommit, Sequence: wire.Sequence(0, f.sent), Body: body}
	ctx, cut := context.WithCancel(context.Background())
	send := func(ctx context.Context) <-chan *wire.Reply {
		answer := make(chan *wire.Reply, 1)
		f.s.server.Serve(ctx, f.peer, req, func(r *wire.Reply) { answer <- r })
		return answer
	}
	send(ctx)
	<-entered
	return func() <-chan *wire.Reply { return send(context.Background()) }, cut
}

// A commit that runs when its connection breaks has taken the write: the same request on the next connection has its outcome.
func TestACommitOutlivesItsConnection(t *testing.T) {
	for name, early := range map[string]bool{"comes again while it runs": true, "comes again behind its end": false} {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 1}, func(t *testing.T, s *system) {
				f, near := s.far(), s.user()
				near.put(s.rows(wide, []string{"a"}, 10))
				entered, leave := make(chan bool, 2), make(chan bool, 2)
				again, cut := f.running(entered, leave)
				cut()
				synctest.Wait()
				var answer <-chan *wire.Reply
				if early {
					answer = again()
				}
				leave <- true
				synctest.Wait()
				if !early {
					answer = again()
				}
				require.NoError(t, (<-answer).Err())
				require.Equal(t, []int64{12}, near.values("a"))
				require.Empty(t, entered, "it ran once")
				f.gone()
			})
		})
	}
}

// It does not outlive its client.
func TestACommitEndsWithItsClient(t *testing.T) {
	with(t, setup{units: 1}, func(t *testing.T, s *system) {
		f, near := s.far(), s.user()
		near.put(s.rows(wide, []string{"a"}, 10))
		entered, leave := make(chan bool, 2), make(chan bool, 2)
		_, cut := f.running(entered, leave)
		cut()
		f.gone()
		synctest.Wait()
		leave <- true
		synctest.Wait()
		require.Equal(t, []int64{10}, near.values("a"))
		require.Zero(t, s.stats().Staged)
	})
}
