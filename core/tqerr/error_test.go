package tqerr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryCodeHasItsName(t *testing.T) {
	// One line per code, in the order of the numbers, which are wire format.
	want := []string{
		"OK", "InvalidArgument", "InvalidState", "NotFound", "AlreadyExists", "SchemaMismatch", "ResourceExhausted",
		"DeadlineExceeded", "Cancelled", "Unavailable", "IO", "Corruption", "VersionMismatch", "Unimplemented", "Internal",
		"Failed", "Conflict", "NotInitialized", "SampleGone", "WrongType", "CapacityExceeded",
		"FileNotFound", "FileExists", "DataLost",
	}
	require.Equal(t, want, Names())
	require.Equal(t, len(want)-1, int(DataLost), "the last code has the last name")
	require.Equal(t, "Internal", Internal.String())
	require.Equal(t, "Unknown", Code(len(want)).String())
}

func TestRetryable(t *testing.T) {
	for code := OK; code <= DataLost; code++ {
		want := code == Unavailable || code == ResourceExhausted || code == DeadlineExceeded || code == Conflict
		require.Equal(t, want, code.Retryable(), code.String())
	}
}

func TestText(t *testing.T) {
	err := WithOp("put", New(SchemaMismatch, "partition %q: dtype %s", "a", "int8"))
	require.EqualError(t, err, `put: partition "a": dtype int8`)
	require.EqualError(t, WithOp("get", err), err.Error(), "the first operation stays")
	wrapped := Wrap(IO, io.ErrUnexpectedEOF, "segment %d", 3)
	require.EqualError(t, wrapped, "segment 3: unexpected EOF")
	require.ErrorIs(t, wrapped, io.ErrUnexpectedEOF)
	require.NoError(t, Wrap(IO, nil, "segment"))
	require.NoError(t, WithOp("put", nil))
}

func TestWithOpLeavesTheOriginalAlone(t *testing.T) {
	original := New(NotFound, "no key")
	named := WithOp("get", original)
	require.Empty(t, original.Op)
	require.EqualError(t, named, "get: no key")
	stranger := WithOp("get", errors.New("boom"))
	require.EqualError(t, stranger, "get: boom")
	require.Equal(t, Internal, CodeOf(stranger))
}

func TestIsComparesCodes(t *testing.T) {
	err := fmt.Errorf("unit 3: %w", New(NotFound, "no key"))
	require.ErrorIs(t, err, New(NotFound, ""))
	require.NotErrorIs(t, err, New(Internal, ""))
	require.NotErrorIs(t, err, New(NotFound, "another key"), "a message makes it a different error")
}

func TestCodeOf(t *testing.T) {
	for want, err := range map[Code]error{
		OK:               nil,
		NotFound:         fmt.Errorf("outer: %w", New(NotFound, "x")),
		DeadlineExceeded: fmt.Errorf("outer: %w", context.DeadlineExceeded),
		Cancelled:        context.Canceled,
		Internal:         io.EOF,
	} {
		require.Equal(t, want, CodeOf(err))
	}
}
