//go:build go1.25

package controller_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// far is a client on another host: it maps nothing, and payload is lent to its streams.
type far struct {
	s    *system
	peer transport.Peer
	sent uint64
}

func (s *system) far() *far { return &far{s: s, peer: transport.Peer{ID: client.NewID()}} }

func (f *far) call(op wire.Op, body, reply any) error {
	f.s.t.Helper()
	raw, err := wire.Marshal(body)
	require.NoError(f.s.t, err)
	f.sent++
	answer := make(chan *wire.Reply, 1)
	req := &wire.Request{Op: op, Sequence: wire.Sequence(0, f.sent), Body: raw}
	f.s.server.Serve(context.Background(), f.peer, req, func(r *wire.Reply) { answer <- r })
	r := <-answer
	if err := r.Err(); err != nil || reply == nil {
		return err
	}
	return wire.Unmarshal(r.Body, reply)
}

func (f *far) gone() { f.s.server.Gone(f.peer) }

// loan is what a stream has borrowed.
type loan struct {
	memory  [][]byte
	done    func()
	stopped chan struct{}
}

func (f *far) lend(grant transport.Grant) (*loan, error) {
	l := &loan{stopped: make(chan struct{}, 1)}
	var err error
	l.memory, l.done, err = f.s.server.Lend(f.peer, grant, func() { l.stopped <- struct{}{} })
	return l, err
}

func (l *loan) asked() bool { return len(l.stopped) > 0 }

// beginPut stages one row of wide elements for each key and returns the number of the write.
func (f *far) beginPut(keys ...string) uint64 {
	f.s.t.Helper()
	var reply wire.PutReply
	require.NoError(f.s.t, f.call(wire.OpPut, &wire.PutRequest{
		Partition: "p", Keys: keys, Columns: []wire.Column{column(len(keys), wide)},
	}, &reply))
	return reply.Txn
}

// write fills the memory of a write with rows of equal elements.
func (f *far) write(txn uint64, values ...int64) {
	f.s.t.Helper()
	l, err := f.lend(transport.Grant{Write: true, ID: txn})
	require.NoError(f.s.t, err)
	var all []byte
	for _, v := range values {
		for range wide {
			all = binary.NativeEndian.AppendUint64(all, uint64(v))
		}
	}
	for _, m := range l.memory {
		all = all[copy(m, all):]
	}
	require.Empty(f.s.t, all)
	l.done()
}

func (f *far) beginGet(keys ...string) (*wire.GetReply, error) {
	var reply wire.GetReply
	return &reply, f.call(wire.OpGet, &wire.GetRequest{Partition: "p", Keys: keys, Strict: true, Views: true}, &reply)
}

// first is the first element of each row of a read.
func (l *loan) first() (out []int64) {
	all := bytes.Join(l.memory, nil)
	for at := 0; at < len(all); at += 8 * wide {
		out = append(out, int64(binary.NativeEndian.Uint64(all[at:])))
	}
	return out
}

// Rows of both units, written and read by a client that maps nothing, are those that a client on this host sees.
func TestMemoryIsLentToStreams(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		f, near := s.far(), s.user()
		for i := range int64(4) { // one write after another, so that both units get some
			txn := f.beginPut(fmt.Sprint(i))
			f.write(txn, 10+i)
			require.NoError(t, f.call(wire.OpCommit, &wire.TxnRequest{Txn: txn}, nil))
		}
		near.put(s.rows(wide, []string{"4", "5", "6"}, 14, 15, 16))
		for i, u := range s.units {
			require.Positive(t, u.Stats().Cells, "unit %d", i)
		}
		reply, err := f.beginGet("6", "0", "5", "3", "1")
		require.NoError(t, err)
		require.NotZero(t, reply.Lease, "without views there is one lease")
		var both [2]*loan
		for i := range both { // streams of one read share it
			both[i], err = f.lend(transport.Grant{ID: reply.Lease})
			require.NoError(t, err)
			require.Equal(t, []int64{16, 10, 15, 13, 11}, both[i].first())
		}
		near.put(s.rows(wide, []string{"0", "1", "3", "5", "6"}, 1, 2, 3, 4, 5))
		require.NoError(t, f.call(wire.OpRelease, &wire.ReleaseRequest{Leases: wire.Ints{int64(reply.Lease)}}, nil))
		_, err = f.lend(transport.Grant{ID: reply.Lease})
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
		both[0].done()
		synctest.Wait()
		require.Equal(t, []int64{16, 10, 15, 13, 11}, both[1].first(), "a stream that runs keeps the versions")
		both[1].done()
		synctest.Wait()
		require.Zero(t, s.stats().Leases)
		require.False(t, both[0].asked() || both[1].asked())
		f.gone()
	})
}

// What streams write into is given back only when none of them writes any more.
func TestAWriteEndsAfterItsStreams(t *testing.T) {
	for name, end := range map[string]func(*far, uint64){
		"the client vanishes": func(f *far, _ uint64) { f.gone() },
		"it calls off":        func(f *far, txn uint64) { _ = f.call(wire.OpAbort, &wire.TxnRequest{Txn: txn}, nil) },
		"it commits": func(f *far, txn uint64) {
			require.NoError(f.s.t, f.call(wire.OpCommit, &wire.TxnRequest{Txn: txn}, nil))
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, setup{}, func(t *testing.T, s *system) {
				f := s.far()
				txn := f.beginPut("a")
				f.write(txn, 7)
				l, err := f.lend(transport.Grant{Write: true, ID: txn})
				require.NoError(t, err)
				over := make(chan struct{})
				go func() {
					defer close(over)
					end(f, txn)
				}()
				synctest.Wait()
				require.True(t, l.asked())
				select {
				case <-over:
					t.Fatal("ended while a stream writes")
				default:
				}
				require.NotZero(t, s.stats().Staged)
				_, err = f.lend(transport.Grant{Write: true, ID: txn})
				require.Error(t, err, "nobody begins any more")
				l.memory[0][0] = 7
				l.done()
				<-over
				synctest.Wait()
				require.Zero(t, s.stats().Staged)
				f.gone()
			})
		})
	}
}

// A session that closes takes memory of other processes out of the address space, after the last stream that uses it.
func TestCloseWaitsForStreams(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		s.user().put(s.rows(wide, []string{"a"}, 5))
		f := s.far()
		reply, err := f.beginGet("a")
		require.NoError(t, err)
		reads, err := f.lend(transport.Grant{ID: reply.Lease})
		require.NoError(t, err)
		txn := f.beginPut("b")
		writes, err := f.lend(transport.Grant{Write: true, ID: txn})
		require.NoError(t, err)
		s.closed = true
		over := make(chan struct{})
		go func() {
			defer close(over)
			s.server.Close()
		}()
		synctest.Wait()
		require.True(t, writes.asked())
		clear(writes.memory[0])
		writes.done()
		synctest.Wait()
		if len(s.hosts) > 0 {
			require.True(t, reads.asked())
			select {
			case <-over:
				t.Fatal("closed while a stream reads")
			default:
			}
		}
		require.Equal(t, []int64{5}, reads.first())
		reads.done()
		<-over
		_, err = f.lend(transport.Grant{ID: reply.Lease})
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "closed")
	})
}

// A unit that is gone takes the writes and reads with it that need it; nobody's memory disappears under a stream.
func TestAUnitDiesUnderStreams(t *testing.T) {
	within(t, setup{remote: true}, func(t *testing.T, s *system) {
		s.user().put(s.rows(wide, []string{"a"}, 5))
		f := s.far()
		reply, err := f.beginGet("a")
		require.NoError(t, err)
		reads, err := f.lend(transport.Grant{ID: reply.Lease})
		require.NoError(t, err)
		txn := f.beginPut("b")
		writes, err := f.lend(transport.Grant{Write: true, ID: txn})
		require.NoError(t, err)
		s.kill(0)
		synctest.Wait()
		clear(writes.memory[0])
		require.Len(t, reads.first(), 1)
		writes.done()
		reads.done()
		err = f.call(wire.OpCommit, &wire.TxnRequest{Txn: txn}, nil)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "unit-0")
		_, err = f.beginGet("a")
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		f.gone()
	})
}

func TestWhatIsNotLent(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		f, other := s.far(), s.far()
		_, err := f.lend(transport.Grant{Write: true, ID: 1})
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "a peer that is not known")
		txn := f.beginPut("a")
		require.NoError(t, other.call(wire.OpList, &wire.ListRequest{}, nil))
		for name, grant := range map[string]transport.Grant{
			"another write": {Write: true, ID: txn + 1}, "a read by the number of a write": {ID: txn}, "no lease": {ID: 1},
		} {
			_, err := f.lend(grant)
			require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err), name)
		}
		_, err = other.lend(transport.Grant{Write: true, ID: txn})
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err), "somebody else's write")

		near := s.far()
		near.peer.Local = true
		mapped := near.beginPut("b")
		_, err = near.lend(transport.Grant{Write: true, ID: mapped})
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err))
		for _, one := range []*far{f, other, near} {
			one.gone()
		}
	})
}
