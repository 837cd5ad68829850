package session

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/wire"
)

const tokenText = "token-of-the-tests-0123456789"

// ownerIn is an owner with CURVE whose token file is there.
func ownerIn(t *testing.T) *Config {
	dir := t.TempDir()
	cfg := &Config{
		Token: []byte(tokenText), Security: "curve", Listen: "tcp://:0",
		TokenFile: filepath.Join(dir, "n.token"), KeyFile: filepath.Join(dir, "n.key"),
	}
	require.NoError(t, os.WriteFile(cfg.TokenFile, []byte(tokenText+"\n"), 0o600))
	return cfg
}

func TestTheKeyIsMadeOnceAndGoesIntoTheTokenFile(t *testing.T) {
	cfg := ownerIn(t)
	own, public, err := ownCredentials(cfg)
	require.NoError(t, err)
	want, err := zmq.PublicKey(own.Key)
	require.NoError(t, err)
	require.Equal(t, want, public.Key)
	for path, mode := range map[string]os.FileMode{cfg.KeyFile: 0o600, cfg.TokenFile: 0o600} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode())
	}
	content, err := os.ReadFile(cfg.TokenFile)
	require.NoError(t, err)
	given, err := zmq.ParseToken(content)
	require.NoError(t, err)
	require.Equal(t, public, given)

	cfg.Token = content
	again, same, err := ownCredentials(cfg)
	require.NoError(t, err)
	require.Equal(t, own, again)
	require.Equal(t, public, same)
	after, err := os.ReadDir(filepath.Dir(cfg.KeyFile))
	require.NoError(t, err)
	require.Len(t, after, 2, "nothing else is left")
}

func TestAKeyWithoutAFileIsOfOneSession(t *testing.T) {
	cfg := ownerIn(t)
	cfg.KeyFile, cfg.TokenFile = "", ""
	own, public, err := ownCredentials(cfg)
	require.NoError(t, err)
	want, err := zmq.PublicKey(own.Key)
	require.NoError(t, err)
	require.Equal(t, want, public.Key)
	other, _, err := ownCredentials(cfg)
	require.NoError(t, err)
	require.NotEqual(t, own.Key, other.Key)
}

func TestSecretsThatCannotBe(t *testing.T) {
	key := strings.Repeat("0f", zmq.KeySize)
	for name, c := range map[string]struct {
		change func(*testing.T, *Config)
		code   tqerr.Code
		says   string
	}{
		"unknown":     {func(_ *testing.T, c *Config) { c.Security = "tls" }, tqerr.InvalidArgument, `security: got "tls", want "token" or "curve"`},
		"another key": {func(_ *testing.T, c *Config) { c.Token = []byte(tokenText + " " + key) }, tqerr.InvalidArgument, "n.token is not that of key file"},
		"a key without curve": {func(_ *testing.T, c *Config) {
			c.Security, c.Token = "token", []byte(tokenText+" "+key)
		}, tqerr.InvalidArgument, "n.token, so its clients want security: curve"},
		"no folder":     {func(_ *testing.T, c *Config) { c.KeyFile = filepath.Join(c.KeyFile, "x") }, tqerr.IO, "n.key/x"},
		"garbage":       {func(t *testing.T, c *Config) { write(t, c.KeyFile, "garbage", 0o600) }, tqerr.InvalidArgument, "want one line with 64 hexadecimal"},
		"half":          {func(t *testing.T, c *Config) { write(t, c.KeyFile, key[2:], 0o600) }, tqerr.InvalidArgument, "n.key"},
		"open to all":   {func(t *testing.T, c *Config) { write(t, c.KeyFile, key, 0o644) }, tqerr.InvalidState, "n.key can be read by others"},
		"no token file": {func(_ *testing.T, c *Config) { c.TokenFile += "/x" }, tqerr.IO, "n.token/x, which is to get the server's key"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := ownerIn(t)
			c.change(t, cfg)
			_, _, err := ownCredentials(cfg)
			require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.NotContains(t, err.Error(), tokenText)
			content, err := os.ReadFile(filepath.Join(filepath.Dir(cfg.TokenFile), "n.token"))
			if err == nil {
				require.Equal(t, tokenText+"\n", string(content), "the token file is as it was")
			}
		})
	}
	_, err := reachCredentials(&Config{Token: []byte(tokenText), Security: "curve", Address: "tcp://host:5"})
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "tcp://host:5 the server's key is missing")
	given, err := reachCredentials(&Config{Token: []byte(tokenText + " " + key)})
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat([]byte{15}, zmq.KeySize), given.Key, "a key is used also by who does not insist")
}

func write(t *testing.T, path, content string, mode os.FileMode) {
	require.NoError(t, os.WriteFile(path, []byte(content), mode))
}

// FuzzParseServerKey reads arbitrary bytes as a key file.
func FuzzParseServerKey(f *testing.F) {
	f.Add([]byte(strings.Repeat("0f", zmq.KeySize) + "\n"))
	f.Add([]byte(strings.Repeat("0f", zmq.KeySize-1)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		key, err := parseServerKey(raw)
		if err != nil {
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
			return
		}
		require.Len(t, key, zmq.KeySize)
		_, err = zmq.PublicKey(key)
		require.NoError(t, err, "every key of the right length is one")
	})
}

// FuzzParseRendezvous reads arbitrary bytes as a rendezvous file: what it accepts is of this version, says where the session
// is, and is written back as it was read.
func FuzzParseRendezvous(f *testing.F) {
	whole := rendezvous{Format: rendezvousFormat, Protocol: wire.Version, Session: "0123456789abcdef", PID: 7, Socket: "/run/x.sock", Secret: []byte{1, 2, 3}}
	raw, err := json.Marshal(&whole)
	require.NoError(f, err)
	f.Add(raw)
	f.Add(raw[:len(raw)/2])
	f.Add([]byte(`{"format": 99, "socket": "x"}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := parseRendezvous("file", raw)
		if err != nil {
			require.Contains(t, []tqerr.Code{tqerr.Corruption, tqerr.VersionMismatch}, tqerr.CodeOf(err))
			require.ErrorContains(t, err, "rendezvous file file")
			return
		}
		require.Equal(t, rendezvousFormat, r.Format)
		require.NotEmpty(t, r.Socket)
		written, err := json.Marshal(r)
		require.NoError(t, err)
		again, err := parseRendezvous("file", written)
		require.NoError(t, err)
		require.Equal(t, r, again)
	})
}
