//go:build go1.25

package wire

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A timeout that is a point of time is what is left of it when the frame is read, wherever the clock's 32 bits begin anew.
func TestATimeoutThatIsAPointOfTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		round := int64(1) << 32
		time.Sleep(time.Duration(round-int64(clock())-500) * time.Millisecond)
		f := full()
		f.Due = true
		written := f.Append(nil)
		f.Timeout = 30 * 24 * time.Hour
		long := f.Append(nil)
		read := func(b []byte) time.Duration {
			var got Frame
			require.NoError(t, ReadFrame(bytes.NewReader(b), &got))
			return got.Timeout
		}
		require.Equal(t, 1500*time.Millisecond, read(written))
		time.Sleep(time.Second)
		require.Equal(t, 500*time.Millisecond, read(written))
		time.Sleep(550 * time.Millisecond)
		require.Equal(t, time.Millisecond, read(written), "a little late")
		time.Sleep(50 * time.Millisecond)
		require.Negative(t, read(written))
		time.Sleep(time.Hour)
		require.Negative(t, read(written))
		require.Equal(t, f.Timeout, read(long), "longer than a point of time can be away")
		f.Timeout = 0
		require.Zero(t, read(f.Append(nil)))
	})
}
