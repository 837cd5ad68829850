package inproc_test

import (
	"testing"

	"transferqueue/core/transport"
	"transferqueue/core/transport/inproc"
	"transferqueue/core/transport/transporttest"
)

func TestConformance(t *testing.T) {
	transporttest.Run(t, func(_ *testing.T, h transport.Handler) transporttest.Net {
		server := inproc.NewServer(h)
		return transporttest.Net{
			Dial: func(peerID uint64) (transport.Conn, error) {
				c, err := server.Dial(peerID)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Close: server.Close,
		}
	})
}
