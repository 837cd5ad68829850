//go:build zmq

package session_test

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
)

const denseSize = 256 << 20

// plain is a TCP stream over loopback into a buffer that is there already: what the network of this machine can do.
type plain struct {
	b       *testing.B
	conn    net.Conn
	from    []byte
	into    chan []byte
	arrived chan error
}

func newPlain(b *testing.B) *plain {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	p := &plain{b: b, from: make([]byte, denseSize), into: make(chan []byte), arrived: make(chan error)}
	go func() {
		conn, err := l.Accept()
		for into := range p.into {
			if err == nil {
				_, err = io.ReadFull(conn, into)
			}
			p.arrived <- err
		}
	}()
	p.conn, err = net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	b.Cleanup(func() {
		close(p.into)
		_ = p.conn.Close()
		_ = l.Close()
	})
	return p
}

func (p *plain) send(into []byte) {
	p.into <- into
	_, err := p.conn.Write(p.from)
	require.NoError(p.b, err)
	require.NoError(p.b, <-p.arrived)
}

// untouched is memory like a unit's, none of whose pages is there.
func untouched(b *testing.B) (memory []byte, free func()) {
	fd, err := unix.MemfdCreate("plain", unix.MFD_CLOEXEC)
	require.NoError(b, err)
	require.NoError(b, unix.Ftruncate(fd, denseSize))
	memory, err = unix.Mmap(fd, 0, denseSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(b, err)
	require.NoError(b, unix.Close(fd))
	return memory, func() { require.NoError(b, unix.Munmap(memory)) }
}

// spent is what one thing has taken, each time: on the clock, and of all processors in the processes that take part. Other
// work on the machine makes the first one useless and leaves the second one nearly alone.
type spent struct{ wall, busy []time.Duration }

// meter measures things in turns.
type meter struct {
	b      *testing.B
	others []int // processes that take part, beside this one
	spent  map[string]*spent
}

func (m *meter) busy() (total time.Duration) {
	var used unix.Rusage
	require.NoError(m.b, unix.Getrusage(unix.RUSAGE_SELF, &used))
	total = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	for _, pid := range m.others {
		total += busyOf(m.b, pid)
	}
	return total
}

func (m *meter) take(name string, step func()) {
	s := m.spent[name]
	if s == nil {
		s = &spent{}
		m.spent[name] = s
	}
	busy, began := m.busy(), time.Now()
	step()
	s.wall = append(s.wall, time.Since(began))
	s.busy = append(s.busy, m.busy()-busy)
}

// report gives medians, and by how much faster or cheaper the plain stream is: 1 is as good, 0.5 half as fast.
func (m *meter) report(name, reference string) {
	s, r := m.spent[name], m.spent[reference]
	m.b.ReportMetric(float64(median(s.wall).Microseconds()), name+"-us")
	m.b.ReportMetric(float64(median(s.busy).Microseconds()), name+"-cpu-us")
	if r != s {
		m.b.ReportMetric(float64(median(r.wall))/float64(median(s.wall)), name+"/plain")
		m.b.ReportMetric(float64(median(r.busy))/float64(median(s.busy)), name+"/plain-cpu")
	}
}

// benchmarkDense compares with a plain stream what is like it: memory whose pages are there with memory whose pages are there, and
// such that was never touched, which costs several times the copy, with such.
func benchmarkDense(b *testing.B, c *caller, others []int) {
	stream := newPlain(b)
	b.Run("256MiB", func(b *testing.B) {
		c.b, stream.b = b, b
		m := &meter{b: b, others: others, spent: map[string]*spent{}}
		put, get := remoteRequests(b, "dense", 64, denseSize/64/8)
		read := func() { c.release(c.do(get)) }
		into := make([]byte, denseSize)
		clear(into)
		c.do(put)
		read()
		for b.Loop() {
			m.take("plain", func() { stream.send(into) })
			c.do(put) // the next one gets the memory that this one has replaced, before it goes back to the system
			m.take("put", func() { c.do(put) })
			m.take("get", read)
		}
		for _, name := range []string{"plain", "put", "get"} {
			m.report(name, "plain")
		}
	})
	b.Run("256MiB untouched", func(b *testing.B) {
		c.b, stream.b = b, b
		m := &meter{b: b, others: others, spent: map[string]*spent{}}
		put, _ := remoteRequests(b, "dense", 64, denseSize/64/8)
		for i := 0; b.Loop(); i++ {
			into, free := untouched(b)
			m.take("plain", func() { stream.send(into) })
			free()
			put.Body = marshal(b, &putBody{Partition: fmt.Sprintf("untouched-%d", i), Keys: keysOf(64), Fields: []string{"x"}})
			m.take("put", func() { c.do(put) })
		}
		m.report("plain", "plain")
		m.report("put", "plain")
	})
}

func (c *caller) release(r *client.Result) {
	for i := range r.Columns {
		client.Release(r.Columns[i].Token)
		client.Release(r.Columns[i].OffsetsToken)
	}
}
