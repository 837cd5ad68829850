package session

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport/zmq"
)

// Values of Config.Security.
const (
	securityToken = "token" // also ""
	securityCurve = "curve"
)

// reachCredentials are those of a client: what it was given, and CURVE when it insists on it.
func reachCredentials(cfg *Config) (zmq.Credentials, error) {
	given, err := zmq.ParseToken(cfg.Token)
	if err == nil {
		err = checkSecurity(cfg)
	}
	if err == nil && cfg.Security == securityCurve && len(given.Key) == 0 {
		err = tqerr.New(tqerr.InvalidArgument,
			"security: curve, but behind the token for %s the server's key is missing, see the token file of the owner", cfg.Address)
	}
	return given, err
}

func checkSecurity(cfg *Config) error {
	switch cfg.Security {
	case "", securityToken, securityCurve:
		return nil
	}
	return tqerr.New(tqerr.InvalidArgument, "security: got %q, want %q or %q", cfg.Security, securityToken, securityCurve)
}

// ownCredentials are those of an owner that listens, and public is what clients must be given of them. The key of CURVE stays
// for the next start, as the token does, so that clients find a restarted owner again.
func ownCredentials(cfg *Config) (own, public zmq.Credentials, err error) {
	given, err := zmq.ParseToken(cfg.Token)
	if err == nil {
		err = checkSecurity(cfg)
	}
	if err != nil {
		return own, public, err
	}
	if cfg.Security != securityCurve {
		if len(given.Key) > 0 {
			err = tqerr.New(tqerr.InvalidArgument,
				"a server's key stands behind the token%s, so its clients want security: curve: configure that, or give the token alone", from(cfg.TokenFile))
		}
		return given, given, err
	}
	own.Token = given.Token
	if own.Key, err = serverKey(cfg.KeyFile); err != nil {
		return own, public, err
	}
	public.Token = given.Token
	if public.Key, err = zmq.PublicKey(own.Key); err != nil {
		return own, public, err
	}
	if len(given.Key) > 0 && !bytes.Equal(given.Key, public.Key) {
		return own, public, tqerr.New(tqerr.InvalidArgument,
			"the server's key behind the token%s is not that of key file %s", from(cfg.TokenFile), cfg.KeyFile)
	}
	if len(given.Key) == 0 && cfg.TokenFile != "" {
		err = placeFile(cfg.TokenFile, append(public.Text(), '\n'), os.Rename)
		err = tqerr.Wrap(tqerr.IO, err, "token file %s, which is to get the server's key", cfg.TokenFile)
	}
	return own, public, err
}

func from(file string) string {
	if file == "" {
		return ""
	}
	return " in " + file
}

// newKey is a secret key that nobody else has.
func newKey() []byte {
	key := make([]byte, zmq.KeySize)
	_, _ = rand.Read(key) // never fails, says crypto/rand
	return key
}

// serverKey reads the secret key of an owner, and makes it when it is not there. Without a file it is of this session alone.
func serverKey(path string) ([]byte, error) {
	if path == "" {
		return newKey(), nil
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return readServerKey(path)
	}
	key := newKey()
	err := placeFile(path, fmt.Appendf(nil, "%x\n", key), os.Link)
	if errors.Is(err, os.ErrExist) { // somebody else has made one meanwhile
		return readServerKey(path)
	}
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "key file %s", path)
	}
	return key, nil
}

// keyFileSize is more than a key file has.
const keyFileSize = 4 << 10

func readServerKey(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "key file %s", path)
	}
	defer func() { _ = file.Close() }() // it was only read
	info, err := file.Stat()
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return nil, tqerr.New(tqerr.InvalidState, "key file %s can be read by others, want mode 600", path)
	}
	text, rerr := io.ReadAll(io.LimitReader(file, keyFileSize))
	if err = errors.Join(err, rerr); err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "key file %s", path)
	}
	key, err := parseServerKey(text)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.CodeOf(err), err, "key file %s", path)
	}
	return key, nil
}

func parseServerKey(text []byte) ([]byte, error) {
	key, err := hex.DecodeString(string(bytes.TrimSpace(text)))
	if err != nil || len(key) != zmq.KeySize {
		return nil, tqerr.New(tqerr.InvalidArgument, "want one line with %d hexadecimal digits", 2*zmq.KeySize)
	}
	return key, nil
}

// placeFile writes a private file beside its place, and then puts it there with os.Rename, or with os.Link when there must be none: who
// reads it finds all of it.
func placeFile(path string, content []byte, place func(from, to string) error) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
	if err = errors.Join(err, temp.Close()); err == nil {
		err = place(temp.Name(), path)
	}
	if gone := os.Remove(temp.Name()); !errors.Is(gone, os.ErrNotExist) { // it is after a rename
		err = errors.Join(err, gone)
	}
	return err
}
