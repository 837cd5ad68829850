package zmq

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

const sixteen = "0123456789abcdef"

func TestTokenAndKey(t *testing.T) {
	key := strings.Repeat("0f", KeySize)
	c, err := ParseToken([]byte("  " + sixteen + " \n"))
	require.NoError(t, err)
	require.Equal(t, Credentials{Token: []byte(sixteen)}, c)
	c, err = ParseToken([]byte(sixteen + " " + key + "\n"))
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat([]byte{15}, KeySize), c.Key)
	require.Equal(t, sixteen+" "+key, string(c.Text()))
	for name, bad := range map[string]string{
		"nothing": "", "spaces": " \n ", "short": "short", "half a key": sixteen + " " + key[2:],
		"a key and a half": sixteen + " " + key + key, "no number": sixteen + " " + strings.Repeat("xy", KeySize),
		"two spaces": sixteen + "  " + key, "three words": sixteen + " " + key + " " + key, "a zero": sixteen + "\x00 " + key,
		"long": strings.Repeat("x", MaxToken+1),
	} {
		_, err := ParseToken([]byte(bad))
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
		require.NotContains(t, err.Error(), sixteen, "the secret does not get into messages")
	}
}

// The keys of a token are part of the protocol: two releases must derive the same.
func TestKeysOfAClient(t *testing.T) {
	public, secret, err := clientKeys([]byte(sixteen))
	require.NoError(t, err)
	other, _, err := clientKeys([]byte(sixteen + "0"))
	require.NoError(t, err)
	require.NotEqual(t, public, other)
	again, err := PublicKey(secret)
	require.NoError(t, err)
	require.Equal(t, public, again)
	_, err = PublicKey(make([]byte, 5))
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
}

// FuzzParseToken reads arbitrary bytes as the contents of a token file: what it accepts it can send, and writes back as it was.
func FuzzParseToken(f *testing.F) {
	f.Add([]byte(sixteen))
	f.Add([]byte(sixteen + " " + strings.Repeat("0f", KeySize) + "\n"))
	f.Add([]byte(sixteen + " " + strings.Repeat("0F", KeySize-1)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := ParseToken(raw)
		if err != nil {
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
			return
		}
		require.NoError(t, c.check())
		require.True(t, strings.EqualFold(string(bytes.TrimSpace(raw)), string(c.Text())))
		again, err := ParseToken(c.Text())
		require.NoError(t, err)
		require.Equal(t, c, again)
	})
}
