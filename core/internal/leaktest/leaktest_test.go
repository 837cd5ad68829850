package leaktest

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFindsAGoroutine(t *testing.T) {
	Check(t)
	before := take()
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-stop
	}()
	left := wait(before, time.Millisecond)
	require.Len(t, left, 1)
	require.Contains(t, left[0], "TestFindsAGoroutine")
	close(stop)
	<-ended
	require.Empty(t, wait(before, patience))
}

func TestFindsADescriptor(t *testing.T) {
	Check(t)
	before := take()
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	left := wait(before, time.Millisecond)
	require.Equal(t, []string{"descriptor"}, []string{strings.Fields(left[0])[0]})
	require.Contains(t, left[0], os.DevNull)
	require.NoError(t, f.Close())
	require.Empty(t, wait(before, patience))
}

// failing counts the failures of a check instead of failing.
type failing struct {
	testing.TB
	cleanup func()
	errors  int
}

func (f *failing) Helper()               {}
func (f *failing) Cleanup(fn func())     { f.cleanup = fn }
func (f *failing) Errorf(string, ...any) { f.errors++ }

func TestCheckFailsTheTest(t *testing.T) {
	clean := &failing{TB: t}
	Check(clean)
	clean.cleanup()
	require.Zero(t, clean.errors)

	defer func(before time.Duration) { patience = before }(patience)
	patience = time.Millisecond
	leaking := &failing{TB: t}
	Check(leaking)
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	leaking.cleanup()
	require.Equal(t, 1, leaking.errors)
}
