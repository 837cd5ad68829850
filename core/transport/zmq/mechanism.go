//go:build zmq

package zmq

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/pebbe/zmq4"

	"transferqueue/core/tqerr"
)

// userName is sent with PLAIN, which wants one.
const userName = "tq"

// atServer returns what a client must show, in the places of ZAP, and the options of the server's socket.
func (c *Credentials) atServer() (wanted [][]byte, protect func(*zmq4.Socket) error, err error) {
	if !c.curve() {
		return [][]byte{[]byte("PLAIN"), []byte(userName), c.Token}, func(sock *zmq4.Socket) error { return sock.SetPlainServer(1) }, nil
	}
	public, _, err := clientKeys(c.Token)
	return [][]byte{[]byte("CURVE"), public}, func(sock *zmq4.Socket) error {
		return errors.Join(sock.SetCurveServer(1), sock.SetCurveSecretkey(string(c.Key)))
	}, err
}

// atClient sets the options of a client's socket.
func (c *Credentials) atClient(sock *zmq4.Socket) error {
	if !c.curve() {
		return errors.Join(sock.SetPlainUsername(userName), sock.SetPlainPassword(string(c.Token)))
	}
	public, secret, err := clientKeys(c.Token)
	return errors.Join(err, sock.SetCurveServerkey(string(c.Key)), sock.SetCurvePublickey(string(public)), sock.SetCurveSecretkey(string(secret)))
}

// diagnosis says why a handshake failed. ZeroMQ itself often does not know: the server closes the connection when it sees
// another mechanism than its own, before or after the client has seen that.
func (c *Conn) diagnosis(ctx context.Context, err error) error {
	switch mechanism := mechanismAt(ctx, join(c.host, c.port)); {
	case mechanism == "PLAIN" && c.curve:
		return tqerr.New(tqerr.InvalidArgument, "the session at %s is not encrypted, but a server's key stands behind the token: give the token alone", c.address)
	case mechanism == "CURVE" && !c.curve:
		return tqerr.New(tqerr.InvalidArgument,
			"the session at %s uses CURVE: behind the token the server's key is missing, see the token file of the owner", c.address)
	case mechanism == "CURVE":
		return tqerr.New(tqerr.Unavailable, "the server at %s has another key than stands behind the token", c.address)
	}
	return err
}

// The greeting of ZMTP 3 (ZeroMQ RFC 23): signature and version, to which the server answers with the whole greeting before
// it looks at more.
const (
	greetingBegin   = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"
	greetingSize    = 64
	mechanismOffset = 12
	mechanismSize   = 20
)

// mechanismAt asks a server for its mechanism; "" when it does not answer like one of ZeroMQ.
func mechanismAt(ctx context.Context, address string) string {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return ""
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	var greeting [greetingSize]byte
	if _, err = conn.Write([]byte(greetingBegin)); err == nil {
		_, err = io.ReadFull(conn, greeting[:])
	}
	if err != nil || greeting[0] != 0xff {
		return ""
	}
	return string(bytes.TrimRight(greeting[mechanismOffset:mechanismOffset+mechanismSize], "\x00"))
}
