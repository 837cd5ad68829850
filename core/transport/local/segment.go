package local

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

// Segment implements transport.Conn. It asks on a connection of its own, so that descriptors never mix with replies; it
// happens once per segment and client.
func (c *Conn) Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error) {
	select {
	case <-c.Done():
		return -1, 0, c.Why()
	default:
	}
	started := time.Now()
	sock, _, err := connect(ctx, c.path, c.secret, c.peerID, c.limits)
	if err != nil {
		return -1, 0, err
	}
	defer func() { _ = sock.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = sock.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	fd, size, err = askSegment(sock, unit, segment)
	if err == nil {
		return fd, size, nil
	}
	if ctx.Err() != nil {
		return -1, 0, failure.Ended(ctx, started)
	}
	if !failure.Coded(err) {
		err = failure.Lost(c.address(), err)
	}
	return -1, 0, err
}

func askSegment(sock *net.UnixConn, unit, segment uint32) (int, int64, error) {
	if err := wire.WriteFrame(sock, &wire.Frame{Type: wire.FrameSegment, ID: uint64(unit), Sequence: uint64(segment)}); err != nil {
		return -1, 0, err
	}
	r := rightsReader{sock: sock}
	var answer wire.Frame
	err := wire.ReadFrame(&r, &answer)
	if err == nil {
		err = (&wire.Reply{Code: tqerr.Code(answer.Op), Body: answer.Body}).Err()
	}
	if err == nil && (answer.Type != wire.FrameSegment || len(r.fds) != 1) {
		err = tqerr.New(tqerr.Corruption, "segment %d of unit %d: a frame of type %d with %d descriptors", segment, unit, answer.Type, len(r.fds))
	}
	if err == nil {
		err = checkSize(r.fds[0], answer.Ack)
	}
	if err != nil {
		for _, fd := range r.fds {
			_ = unix.Close(fd)
		}
		return -1, 0, err
	}
	return r.fds[0], int64(answer.Ack), nil
}

// checkSize makes sure that who maps size bytes of the descriptor does not die of SIGBUS.
func checkSize(fd int, size uint64) error {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return tqerr.Wrap(tqerr.IO, err, "segment")
	}
	if stat.Size < 0 || size > uint64(stat.Size) {
		return tqerr.New(tqerr.Corruption, "segment of %d bytes, announced as %d", stat.Size, size)
	}
	return nil
}

// rightsReader reads a socket and collects the descriptors that come along, closed on exec.
type rightsReader struct {
	sock *net.UnixConn
	fds  []int
}

func (r *rightsReader) Read(p []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := r.sock.ReadMsgUnix(p, oob)
	if messages, perr := unix.ParseSocketControlMessage(oob[:max(oobn, 0)]); perr == nil {
		for i := range messages {
			if fds, ferr := unix.ParseUnixRights(&messages[i]); ferr == nil {
				r.fds = append(r.fds, fds...)
			}
		}
	}
	return n, err
}
