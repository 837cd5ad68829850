// Package failure words the errors that every transport reports in the same way.
package failure

import (
	"context"
	"errors"
	"time"

	"transferqueue/core/tqerr"
)

// Ended is the error of a call whose context ended before its reply came: DeadlineExceeded or Cancelled, with the time
// that the call has waited.
func Ended(ctx context.Context, started time.Time) error {
	waited := time.Since(started).Round(time.Millisecond)
	if code := tqerr.CodeOf(ctx.Err()); code == tqerr.DeadlineExceeded {
		return tqerr.New(code, "no reply after %s", waited)
	}
	return tqerr.New(tqerr.Cancelled, "cancelled after %s without a reply", waited)
}

// Lost is the error of a call whose connection is gone. The cause may be nil.
func Lost(address string, cause error) error {
	return &tqerr.Error{Code: tqerr.Unavailable, Msg: "the connection to " + address + " is gone", Cause: cause}
}

// Coded tells an error of ours from a plain one, of a socket.
func Coded(err error) bool {
	var ours *tqerr.Error
	return errors.As(err, &ours)
}
