package wire

import (
	"transferqueue/core/tqerr"
)

// ErrorReply makes the reply to a request that failed with err, which is not nil.
func ErrorReply(err error) *Reply {
	body := ErrorBody{Msg: err.Error()}
	if e, ok := err.(*tqerr.Error); ok {
		bare := *e
		bare.Op = ""
		body.Op, body.Msg = e.Op, bare.Error()
	}
	code := tqerr.CodeOf(err)
	if code == tqerr.OK {
		code = tqerr.Internal // an Error that says OK is a bug of the server, and must not look like success
	}
	raw, err := Marshal(&body)
	if err != nil { // a text beyond MaxBody
		raw = nil
	}
	return &Reply{Code: code, Body: raw}
}

// Err returns the failure that the reply reports as *tqerr.Error, nil for OK.
func (r *Reply) Err() error {
	if r.Code == tqerr.OK {
		return nil
	}
	var body ErrorBody
	if err := Unmarshal(r.Body, &body); err != nil {
		return &tqerr.Error{Code: r.Code, Msg: "the server gave no readable reason", Cause: err}
	}
	return &tqerr.Error{Code: r.Code, Op: body.Op, Msg: body.Msg}
}
