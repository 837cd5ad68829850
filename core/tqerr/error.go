package tqerr

import (
	"context"
	"errors"
	"fmt"
)

// Error is a failure with a code. Op is the public operation ("put", "get"); it is set once, where the operation is
// known, and printed in front of the message.
type Error struct {
	Code  Code
	Op    string
	Msg   string
	Cause error
}

// Error returns "op: message" without a trailing full stop.
func (e *Error) Error() string {
	text := e.Msg
	if e.Op != "" {
		text = e.Op + ": " + text
	}
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches another *Error by code, so errors.Is(err, tqerr.New(tqerr.NotFound, "")) works.
func (e *Error) Is(target error) bool {
	var other *Error
	return errors.As(target, &other) && other.Code == e.Code && other.Msg == ""
}

// New makes an error with a formatted message.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// Wrap puts a code and a message in front of a cause. A nil cause gives nil.
func Wrap(code Code, cause error, format string, args ...any) error {
	if cause == nil {
		return nil
	}
	return &Error{Code: code, Msg: fmt.Sprintf(format, args...), Cause: cause}
}

// WithOp names the operation of an error that does not name one yet.
func WithOp(op string, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		if e.Op != "" {
			return err
		}
		named := *e
		named.Op = op
		return &named
	}
	return &Error{Code: CodeOf(err), Op: op, Msg: err.Error()}
}

// CodeOf returns the code of an error: OK for nil, the context codes for context errors, Internal for strangers.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return Cancelled
	default:
		return Internal
	}
}
