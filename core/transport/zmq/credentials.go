package zmq

import (
	"bytes"
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"

	"transferqueue/core/tqerr"
)

// Credentials are what the two sides of a connection know. Without a key connections authenticate with PLAIN; with one they
// are encrypted and authenticated by CURVE: the client refuses a server that has not the secret key, and the server a client
// that has not the token. The token itself never crosses then, in no form: the client's key pair is derived from it.
type Credentials struct {
	// Token is the secret of the session, see CheckToken.
	Token []byte
	// Key is the secret key at a server and the server's public key at a client: KeySize bytes, or none.
	Key []byte
}

// KeySize is the length of a key of CURVE, secret or public.
const KeySize = 32

// MinToken and MaxToken bound the length of a token.
const (
	MinToken = 16
	MaxToken = 255
)

// CheckToken refuses a token that is too short to be a secret, or that cannot be sent.
func CheckToken(token []byte) error {
	if len(token) < MinToken || len(token) > MaxToken {
		return tqerr.New(tqerr.InvalidArgument, "a token of %d characters, want %d to %d", len(token), MinToken, MaxToken)
	}
	for _, c := range token {
		if c <= ' ' || c > '~' {
			return tqerr.New(tqerr.InvalidArgument, "the token has a character that is not printable ASCII, or a space")
		}
	}
	return nil
}

func (c *Credentials) check() error {
	if len(c.Key) != 0 && len(c.Key) != KeySize {
		return tqerr.New(tqerr.InvalidArgument, "a key of %d bytes, want %d", len(c.Key), KeySize)
	}
	return CheckToken(c.Token)
}

func (c *Credentials) curve() bool { return len(c.Key) > 0 }

// ParseToken reads what a client is given: the token, and behind a space the server's public key in hexadecimal when the
// session uses CURVE. Spaces and line ends around it do not count.
func ParseToken(text []byte) (Credentials, error) {
	token, key, found := bytes.Cut(bytes.TrimSpace(text), []byte{' '})
	c := Credentials{Token: token}
	if found {
		var err error
		if c.Key, err = hex.DecodeString(string(key)); err != nil || len(c.Key) != KeySize {
			return Credentials{}, tqerr.New(tqerr.InvalidArgument, "behind the token: want one space and the server's key, %d hexadecimal digits", 2*KeySize)
		}
	}
	return c, c.check()
}

// Text is what ParseToken reads.
func (c *Credentials) Text() []byte {
	if !c.curve() {
		return c.Token
	}
	return append(append(bytes.Clone(c.Token), ' '), hex.EncodeToString(c.Key)...)
}

// PublicKey is the key that clients are given of a server's secret key, which has KeySize bytes.
func PublicKey(secret []byte) ([]byte, error) {
	key, err := ecdh.X25519().NewPrivateKey(secret)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.InvalidArgument, err, "secret key of a server")
	}
	return key.PublicKey().Bytes(), nil
}

// clientKeys is the key pair by which a client shows that it knows the token. Nobody without the server's secret key sees
// the public half: CURVE sends it encrypted.
func clientKeys(token []byte) (public, secret []byte, err error) {
	mac := hmac.New(sha256.New, token)
	_, _ = mac.Write([]byte("transferqueue: curve key of a client"))
	secret = mac.Sum(nil)
	public, err = PublicKey(secret)
	return public, secret, err
}
