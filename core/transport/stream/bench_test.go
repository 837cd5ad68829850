package stream

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// BenchmarkTransfer moves 256 MiB between memory that is there, over several streams at once, and with a plain stream in turns:
// the cost of the sums, pieces and deadlines. Processor time is that of both ends.
func BenchmarkTransfer(b *testing.B) {
	const size = 256 << 20
	from, into := make([]byte, size), make([]byte, size)
	clear(from)
	clear(into)
	s, err := Listen("127.0.0.1", 0, DefaultLimits, nil)
	require.NoError(b, err)
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port()))
	l := &lender{memory: into}
	p := &Pool{Dial: func(ctx context.Context) (net.Conn, error) {
		return Open(ctx, address, s.Ticket(serving(l), func() {}), nil)
	}}
	filled := make(chan error)
	plain, err := Open(b.Context(), address, s.Ticket(func(conn net.Conn) {
		for {
			_, err := io.ReadFull(conn, into)
			if filled <- err; err != nil {
				return
			}
		}
	}, func() {}), nil)
	require.NoError(b, err)
	defer func() {
		require.NoError(b, plain.Close())
		require.Error(b, <-filled)
		p.Close()
		require.NoError(b, s.Close())
	}()
	for n := 1; n <= maxStreams; n *= 2 {
		b.Run(fmt.Sprintf("%d streams", n), func(b *testing.B) {
			b.SetBytes(size)
			ours, theirs, wall := time.Duration(0), time.Duration(0), time.Duration(0)
			for b.Loop() {
				busy := processorTime(b)
				_, err := plain.Write(from)
				require.NoError(b, err)
				require.NoError(b, <-filled)
				theirs += processorTime(b) - busy
				busy = processorTime(b)
				began := time.Now()
				var all sync.WaitGroup
				for i := range n {
					all.Add(1)
					go func() {
						defer all.Done()
						at := size / n * i
						err := p.part(b.Context(), &transfer{kindWrite, 0, uint64(at), uint64(size / n)}, [][]byte{from[at : at+size/n]})
						if err != nil {
							b.Error(err)
						}
					}()
				}
				all.Wait()
				wall += time.Since(began)
				ours += processorTime(b) - busy
			}
			b.ReportMetric(float64(ours.Microseconds())/float64(b.N), "cpu-us/op")
			b.ReportMetric(float64(wall.Microseconds())/float64(b.N), "wall-us/op")
			b.ReportMetric(float64(theirs)/float64(ours), "plain-cpu/ours")
		})
	}
}

func processorTime(b *testing.B) time.Duration {
	var used unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
