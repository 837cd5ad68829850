package stream

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"syscall"
	"time"

	"transferqueue/core/tqerr"
)

// PinSize is the length of the fingerprint of a certificate.
const PinSize = sha256.Size

// Identity is the certificate of a listener whose streams are encrypted. It names nobody: clients learn its fingerprint on
// a connection that has authenticated the server, and accept no other one.
type Identity struct {
	// Pin is the SHA-256 of the certificate.
	Pin    []byte
	config *tls.Config
}

// NewIdentity makes a key and its certificate. The key never leaves the process.
func NewIdentity() (*Identity, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.Internal, err, "key of payload streams")
	}
	// Nobody looks at the dates, so clocks may differ.
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.Internal, err, "certificate of payload streams")
	}
	pin := sha256.Sum256(der)
	return &Identity{Pin: pin[:], config: &tls.Config{
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
		CurvePreferences: []tls.CurveID{tls.X25519}, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}},
	}}, nil
}

// pinned accepts the certificate with a fingerprint, and no authority.
func pinned(pin []byte) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}, DynamicRecordSizingDisabled: true,
		InsecureSkipVerify: true, // the fingerprint is compared instead
		VerifyConnection: func(state tls.ConnectionState) error {
			got := sha256.Sum256(state.PeerCertificates[0].Raw)
			if !bytes.Equal(got[:], pin) {
				return errors.New("the certificate is not the one that the server has announced")
			}
			return nil
		},
	}
}

// secured is a TLS connection that closes like a TCP connection: at once, without a last word for which it might wait. The
// protocol above tells the end of each transfer itself.
type secured struct {
	*tls.Conn
	below *net.TCPConn
}

func (s *secured) Close() error { return s.below.Close() }

// SyscallConn implements syscall.Conn.
func (s *secured) SyscallConn() (syscall.RawConn, error) { return s.below.SyscallConn() }

// accept does a server's part of the handshake when streams are encrypted.
func (i *Identity) accept(conn *net.TCPConn) (net.Conn, error) {
	if i == nil {
		return conn, nil
	}
	s := &secured{tls.Server(conn, i.config), conn}
	return s, s.Handshake()
}

// connect does a client's part of the handshake when it knows a fingerprint.
func connect(ctx context.Context, conn net.Conn, pin []byte) (net.Conn, error) {
	if len(pin) == 0 {
		return conn, nil
	}
	s := &secured{tls.Client(conn, pinned(pin)), conn.(*net.TCPConn)}
	return s, s.HandshakeContext(ctx)
}

// recordSize is how much TLS encrypts at once.
const recordSize = 16 << 10

// writeTogether writes pieces behind each other, small ones in common records.
func (s *secured) writeTogether(pieces net.Buffers) error {
	var buf []byte
	flush := func() error {
		_, err := s.Write(buf)
		buf = buf[:0]
		return err
	}
	for _, p := range pieces {
		if len(buf) > 0 && len(buf)+len(p) > recordSize {
			if err := flush(); err != nil {
				return err
			}
		}
		if len(p) < recordSize {
			buf = append(buf, p...)
			continue
		}
		if _, err := s.Write(p); err != nil {
			return err
		}
	}
	if len(buf) == 0 {
		return nil
	}
	return flush()
}

// writeAll writes pieces with as few calls as the connection allows. It changes the list.
func writeAll(conn net.Conn, pieces net.Buffers) error {
	if s, ok := conn.(*secured); ok {
		return s.writeTogether(pieces)
	}
	_, err := pieces.WriteTo(conn)
	return err
}
