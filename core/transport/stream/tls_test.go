package stream

import (
	"crypto/tls"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
)

// The certificate of a listener is good at any time that a client believes it is.
func TestClocksThatDiffer(t *testing.T) {
	leaktest.Check(t)
	identity, err := NewIdentity()
	require.NoError(t, err)
	s, err := Listen("127.0.0.1", 0, DefaultLimits, identity)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	l := &lender{memory: []byte("the bytes of a read")}
	for _, now := range []time.Time{time.Unix(0, 0), time.Now().AddDate(-30, 0, 0), time.Now().AddDate(200, 0, 0)} {
		config := pinned(identity.Pin)
		config.Time = func() time.Time { return now }
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())))
		require.NoError(t, err)
		below := conn.(*net.TCPConn)
		client := &secured{tls.Client(below, config), below}
		_, err = client.Write(append([]byte(magic), s.Ticket(serving(l), func() {})...))
		require.NoError(t, err, now)
		require.NoError(t, status(client))
		got := make([]byte, len(l.memory))
		require.NoError(t, carry(client, &transfer{kind: kindRead, length: uint64(len(got))}, [][]byte{got}))
		require.Equal(t, l.memory, got)
		require.NoError(t, client.Close())
	}
}
