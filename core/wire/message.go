package wire

import "transferqueue/core/tqerr"

// ParseFrame reads a frame that is a message of its own, as the sockets of ZeroMQ carry it. Body and Payload are parts of
// data. Anything but exactly one frame is Corruption.
func ParseFrame(data []byte, f *Frame) error {
	if copy(f.head[:], data) < HeaderSize {
		return tqerr.New(tqerr.Corruption, "message of %d bytes, a header has %d", len(data), HeaderSize)
	}
	body, payload, err := f.parseHeader()
	if err != nil {
		return err
	}
	rest := data[HeaderSize:]
	if len(rest) != body+payload {
		return tqerr.New(tqerr.Corruption, "message of %d bytes, its header says %d", len(data), HeaderSize+body+payload)
	}
	if body > 0 {
		f.Body = rest[:body:body]
	}
	if payload > 0 {
		f.Payload = rest[body:]
	}
	return nil
}

// Admission is the body of the welcome to a connection that carries payload on streams beside it.
type Admission struct {
	Port   int    // of the streams, on the host that was dialled
	Ticket []byte // of the stream that lives as long as the connection
	Pin    []byte // SHA-256 of the certificate of the streams; none when they are not encrypted
}
