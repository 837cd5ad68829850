package stream

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
)

// lender lends one piece of memory.
type lender struct {
	memory []byte
	lent   chan func() // the stops of what was lent; nil: nobody wants them
}

func (l *lender) Lend(_ transport.Peer, _ transport.Grant, stop func()) ([][]byte, func(), error) {
	if l.lent != nil {
		l.lent <- stop
	}
	return [][]byte{l.memory}, func() {}, nil
}

func listen(t *testing.T, l Limits) *Listener {
	leaktest.Check(t)
	s, err := Listen("127.0.0.1", 0, l, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func opened(t *testing.T, s *Listener, take func(net.Conn)) net.Conn {
	conn, err := Open(t.Context(), net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())), s.Ticket(take, func() {}), nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func serving(l *lender) func(net.Conn) {
	return func(conn net.Conn) { Serve(conn, transport.Peer{}, l, DefaultLimits) }
}

func TestBytesThatWereChangedOnTheWay(t *testing.T) {
	s := listen(t, DefaultLimits)
	l := &lender{memory: make([]byte, 100)}
	conn := opened(t, s, serving(l))
	head := (&transfer{kind: kindWrite, length: 4}).append(nil)
	_, err := conn.Write(append(append(head, "abcd"...), 1, 2, 3, 4))
	require.NoError(t, err)
	require.Equal(t, tqerr.Corruption, tqerr.CodeOf(status(conn)))
	require.NoError(t, carry(conn, &transfer{kind: kindWrite, length: 4}, [][]byte{[]byte("ef"), []byte("gh")}), "the stream goes on")
	require.Equal(t, "efgh\x00", string(l.memory[:5]))
}

// A ticket is as old as it is, also while its timer has not had its turn yet.
func TestATicketWhoseTimerIsLate(t *testing.T) {
	s := listen(t, DefaultLimits)
	late := 0
	ticket := s.Ticket(func(net.Conn) { t.Error("it was taken") }, func() { late++ })
	s.mu.Lock()
	made := s.mu.tickets[[ticketSize]byte(ticket)]
	made.timer.Stop()
	made.expires = time.Now()
	s.mu.Unlock()
	for range 2 {
		_, err := Open(t.Context(), net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())), ticket, nil)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "older than 10s")
	}
	require.NoError(t, s.Close())
	require.Equal(t, 1, late)
}

// A server that took longer to accept a stream than its ticket is good for is given another one.
func TestATicketThatCameTooLateIsReplaced(t *testing.T) {
	s := listen(t, DefaultLimits)
	l := &lender{memory: []byte("abcd")}
	dialed := 0
	p := &Pool{Dial: func(ctx context.Context) (net.Conn, error) {
		ticket := s.Ticket(serving(l), func() {})
		if dialed++; dialed <= 2 {
			s.mu.Lock()
			s.mu.tickets[[ticketSize]byte(ticket)].expires = time.Now()
			s.mu.Unlock()
		}
		return Open(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())), ticket, nil)
	}}
	t.Cleanup(p.Close)
	got := make([]byte, 4)
	require.NoError(t, p.Receive(t.Context(), transport.Grant{}, [][]byte{got}))
	require.Equal(t, "abcd", string(got))
	require.Equal(t, 3, dialed)
}

// A transfer whose stream was broken is done again, with the same bytes at the same place.
func TestABrokenStreamIsReplaced(t *testing.T) {
	s := listen(t, DefaultLimits)
	l := &lender{memory: make([]byte, 1<<20)}
	broken := 0
	p := &Pool{}
	p.Dial = func(ctx context.Context) (net.Conn, error) {
		if broken++; broken <= 3 {
			return opened(t, s, func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1000)) }), nil
		}
		return opened(t, s, serving(l)), nil
	}
	t.Cleanup(p.Close)
	sent := bytes.Repeat([]byte("0123456789"), 100_000)
	require.NoError(t, p.Send(t.Context(), transport.Grant{Write: true}, 7, [][]byte{sent}))
	require.True(t, bytes.Equal(sent, l.memory[7:7+len(sent)]))
	require.Equal(t, 4, broken)
	got := make([]byte, 1<<20)
	require.NoError(t, p.Receive(t.Context(), transport.Grant{}, [][]byte{got[:1], got[1:]}))
	require.True(t, bytes.Equal(l.memory, got))
	require.Equal(t, 4, broken, "the stream is used again")

	p.Dial = func(context.Context) (net.Conn, error) { return opened(t, s, func(net.Conn) {}), nil }
	p.give(p.mu.idle[0], true)
	p.mu.idle = nil
	err := p.Receive(t.Context(), transport.Grant{}, [][]byte{got})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "one that always breaks is given up")
}

func TestATransferEndsWithItsContext(t *testing.T) {
	s := listen(t, DefaultLimits)
	over := make(chan struct{})
	p := &Pool{Dial: func(context.Context) (net.Conn, error) { return opened(t, s, func(net.Conn) { <-over }), nil }}
	t.Cleanup(p.Close)
	t.Cleanup(func() { close(over) })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := p.Receive(ctx, transport.Grant{}, [][]byte{make([]byte, 10)})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// The owner of the memory takes it back in the middle of a transfer.
func TestStop(t *testing.T) {
	s := listen(t, DefaultLimits)
	l := &lender{memory: make([]byte, 100), lent: make(chan func(), 1)}
	conn := opened(t, s, serving(l))
	_, err := conn.Write(append((&transfer{kind: kindWrite, length: 50}).append(nil), "only this"...))
	require.NoError(t, err)
	(<-l.lent)()
	require.Error(t, status(conn))
}

func TestNothingIsTakenWithoutATicket(t *testing.T) {
	s := listen(t, Limits{Greeting: 100 * time.Millisecond, Stall: time.Minute})
	for _, greeting := range []string{"", "TQ1S", "GET / HTTP/1.1\r\n\r\n\r\n", "TQ1S0123456789abcdef"} {
		conn, err := net.Dial("tcp", s.listener.Addr().String())
		require.NoError(t, err)
		_, err = conn.Write([]byte(greeting))
		require.NoError(t, err)
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
		said, err := readStatus(conn)
		require.True(t, err != nil || said.Code == tqerr.Unavailable)
		require.NoError(t, conn.Close())
	}
}

// FuzzServe gives a server arbitrary bytes for transfers: it must come to an end and touch nothing outside the grant.
func FuzzServe(f *testing.F) {
	f.Add((&transfer{kind: kindWrite, length: 3}).append(nil))
	f.Add(append((&transfer{kind: kindWrite, offset: 2, length: 3}).append(nil), "abc1234"...))
	f.Add((&transfer{kind: kindRead, offset: 1 << 63, length: 1 << 63}).append(nil))
	f.Add((&transfer{kind: kindRead, length: 64}).append(nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		ours, theirs := net.Pipe()
		memory := bytes.Repeat([]byte{7}, 192)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer theirs.Close() // as the listener does
			Serve(theirs, transport.Peer{}, &lender{memory: memory[64:128]}, Limits{Greeting: time.Second, Stall: time.Second})
		}()
		go func() {
			_, _ = ours.Write(raw)
			_ = ours.Close()
		}()
		buf := make([]byte, 256)
		for {
			if _, err := ours.Read(buf); err != nil {
				break
			}
		}
		_ = theirs.Close()
		<-ended
		for i, b := range memory {
			if (i < 64 || i >= 128) && b != 7 {
				t.Fatalf("byte %d was overwritten", i)
			}
		}
	})
}

// FuzzStatus reads arbitrary bytes as what a server says.
func FuzzStatus(f *testing.F) {
	f.Add(statusOf(nil))
	f.Add(statusOf(tqerr.New(tqerr.NotFound, "gone")))
	f.Add([]byte{1, 0, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, raw []byte) {
		said, err := readStatus(bytes.NewReader(raw))
		if err == nil && said != nil && (said.Code == tqerr.OK || len(said.Msg) > maxText) {
			t.Fatalf("%v", said)
		}
		var known *tqerr.Error
		if err != nil && errors.As(err, &known) && known.Code != tqerr.Corruption {
			t.Fatal(err)
		}
	})
}

// FuzzCarry gives a client arbitrary bytes for what a server answers to a transfer: it ends, and fills nothing but its pieces.
func FuzzCarry(f *testing.F) {
	f.Add(uint8(kindRead), append(append(statusOf(nil), bytes.Repeat([]byte{7}, 64)...), 1, 2, 3, 4))
	f.Add(uint8(kindRead), statusOf(tqerr.New(tqerr.NotFound, "gone")))
	f.Add(uint8(kindWrite), statusOf(nil))
	f.Add(uint8(kindWrite), []byte{1, 0, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, kind uint8, raw []byte) {
		kind = kindWrite + kind%2
		ours, theirs := net.Pipe()
		memory := bytes.Repeat([]byte{7}, 192)
		read := make(chan struct{})
		go func() {
			defer close(read)
			_, _ = io.Copy(io.Discard, theirs)
		}()
		go func() {
			_, _ = theirs.Write(raw)
			_ = theirs.Close()
		}()
		pieces := [][]byte{memory[64:70], memory[70:128]}
		err := carry(ours, &transfer{kind: kind, length: 64}, pieces)
		_ = ours.Close()
		<-read
		for i, b := range memory {
			if (i < 64 || i >= 128 || kind == kindWrite) && b != 7 {
				t.Fatalf("byte %d was overwritten", i)
			}
		}
		if err == nil && kind == kindRead {
			sum := binary.LittleEndian.AppendUint32(nil, crc32.Checksum(memory[64:128], crc32.MakeTable(crc32.Castagnoli)))
			require.True(t, bytes.HasPrefix(raw[4+int(binary.LittleEndian.Uint16(raw[2:])):], append(memory[64:128:128], sum...)))
		}
	})
}
