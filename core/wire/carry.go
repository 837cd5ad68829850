package wire

import "transferqueue/core/tqerr"

// Frame is the request in a frame that has no id yet. Its bytes are shared.
func (r *Request) Frame(t FrameType) *Frame {
	return &Frame{Type: t, Op: uint16(r.Op), Sequence: r.Sequence, Ack: r.Ack, Timeout: r.Timeout, Body: r.Body, Payload: r.Payload}
}

// Request is what a frame of a request carries.
func (f *Frame) Request() *Request {
	return &Request{Op: Op(f.Op), Sequence: f.Sequence, Ack: f.Ack, Timeout: f.Timeout, Body: f.Body, Payload: f.Payload}
}

// Frame is the reply to the request with an id. Its bytes are shared.
func (r *Reply) Frame(id uint64) *Frame {
	return &Frame{Type: FrameReply, Op: uint16(r.Code), ID: id, Body: r.Body, Payload: r.Payload}
}

// Reply is what the frame of a reply carries.
func (f *Frame) Reply() *Reply {
	return &Reply{Code: tqerr.Code(f.Op), Body: f.Body, Payload: f.Payload}
}
