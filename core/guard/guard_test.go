package guard

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

// report receives what is printed.
type report chan string

func (r report) Write(p []byte) (int, error) {
	r <- string(p)
	return len(p), nil
}

// poisoned prepares a test that poisons the library.
func poisoned(t *testing.T) report {
	out := make(report, 8)
	stderr = out
	t.Cleanup(func() {
		ResetForTest()
		stderr = os.Stderr
	})
	return out
}

func TestPanicOnGoroutinePoisonsOnce(t *testing.T) {
	out := poisoned(t)
	require.NoError(t, Poisoned())
	cleaned := make(chan struct{})
	Go("reader", func() {
		defer close(cleaned)
		panic("boom")
	})
	<-cleaned
	text := <-out
	require.Contains(t, text, "transfer_queue: panic: boom (in reader)")
	require.Contains(t, text, "guard_test.go", "the stack that panicked is printed")
	Poison("again")
	err := Poisoned()
	require.Equal(t, tqerr.Internal, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "boom (in reader)")
	require.Empty(t, out, "only the first panic is printed")
}

func TestRecoverTurnsAPanicIntoAnError(t *testing.T) {
	out := poisoned(t)
	export := func(fail bool) (err error) {
		defer Recover(&err)
		if fail {
			panic(errors.New("index out of range"))
		}
		return nil
	}
	require.NoError(t, export(false))
	require.NoError(t, Poisoned())
	err := export(true)
	require.Equal(t, tqerr.Internal, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "index out of range")
	require.Equal(t, err, Poisoned())
	require.Contains(t, <-out, "goroutine ")
}

func TestGoWithoutPanicLeavesTheLibraryAlone(t *testing.T) {
	done := make(chan struct{})
	Go("quiet", func() { close(done) })
	<-done
	require.NoError(t, Poisoned())
}
