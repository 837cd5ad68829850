package session_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/schema"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// A child with this in its environment is many clients: it reads one command a line and answers each with a line.
const crowdConfig = "TQ_TEST_CROWD"

// crowdSize is how many clients one process has, which may have 20,000 descriptors.
const crowdSize = 2048

var crowdToken = []byte("one-token-for-the-crowd")

// BenchmarkCrowd has clients in other processes connect over TCP to an owner in another one, put and get a row each, and then
// ask for their rows, one request of each at a time: all of them, and only a few while the others are just there. It reports what
// the owner's memory grew by for each, the rate, and the processor time of both sides for a request: they share the machine, so
// of the rate alone it cannot be told which of them it is.
func BenchmarkCrowd(b *testing.B) {
	for _, n := range []int{16, 2000, 8192} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchmarkCrowd(b, n) })
	}
}

func benchmarkCrowd(b *testing.B, n int) {
	if n > crowdSize && testing.Short() {
		b.Skip("needs about 4 GiB")
	}
	cfg := &session.Config{Mode: "own", Dir: b.TempDir(), Namespace: "n", TimeoutMS: 60_000, Units: 1, Listen: "tcp://127.0.0.1:0", Token: crowdToken}
	owner := spawn(b, cfg)()
	if owner.Code == tqerr.Unimplemented {
		b.Skip(owner.Err)
	}
	require.Empty(b, owner.Err)
	var crowds []*crowd
	for from := 0; from < n; from += crowdSize {
		crowds = append(crowds, gather(b, owner.Info.Address, from, min(crowdSize, n-from)))
	}
	do := func(command string) (total float64, took time.Duration) {
		began := time.Now()
		for _, c := range crowds {
			_, err := fmt.Fprintln(c.input, command)
			require.NoError(b, err)
		}
		for _, c := range crowds {
			total += c.answer(b)
		}
		return total, time.Since(began)
	}
	before := residentOf(b, owner.Info.PID)
	done, connect := do("connect")
	require.EqualValues(b, n, done)
	done, once := do("once")
	require.EqualValues(b, n, done)
	asked := map[string]*asking{"few": {}, "all": {}}
	for b.Loop() {
		for name, a := range asked {
			active := n
			if name == "few" {
				active = len(crowds) * ((16 + len(crowds) - 1) / len(crowds))
			}
			busy, theirs := busyOf(b, owner.Info.PID), busyOf(b, crowds[0].cmd.Process.Pid)
			done, took := do(fmt.Sprintf("ask %d", active/len(crowds)))
			a.owner += busyOf(b, owner.Info.PID) - busy
			a.clients += busyOf(b, crowds[0].cmd.Process.Pid) - theirs
			a.done += done
			a.rates = append(a.rates, done/took.Seconds())
		}
	}
	for name, a := range asked {
		slices.Sort(a.rates)
		b.ReportMetric(a.rates[len(a.rates)/2], name+"-requests/s")
		b.ReportMetric(float64(a.owner.Microseconds())/a.done, name+"-owner-us/request")
		b.ReportMetric(float64(a.clients.Microseconds())/a.done*float64(len(crowds)), name+"-clients-us/request")
	}
	b.ReportMetric((residentOf(b, owner.Info.PID)-before)/float64(n), "KiB/client")
	b.ReportMetric(float64(connect.Milliseconds()), "connect-ms")
	b.ReportMetric(float64(once.Milliseconds()), "put+get-ms")
	for _, c := range crowds {
		require.NoError(b, c.input.Close())
		require.NoError(b, c.cmd.Wait())
	}
}

// asking is what requests have taken.
type asking struct {
	rates          []float64
	done           float64
	owner, clients time.Duration
}

// residentOf is the memory of a process in KiB.
func residentOf(b *testing.B, pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(b, err)
	_, rest, found := bytes.Cut(text, []byte("VmRSS:"))
	require.True(b, found)
	var size float64
	_, err = fmt.Sscan(string(rest), &size)
	require.NoError(b, err)
	return size
}

// busyOf is the time that a process has spent on processors.
func busyOf(b *testing.B, pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(b, err)
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	var user, system time.Duration
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	require.NoError(b, err)
	return (user + system) * 10 * time.Millisecond // in ticks, of which Linux tells a hundred per second
}

// crowd is a process of clients.
type crowd struct {
	cmd    *exec.Cmd
	input  io.WriteCloser
	output *bufio.Reader
}

func gather(b *testing.B, address string, from, n int) *crowd {
	text, err := json.Marshal(member{Address: address, From: from, N: n})
	require.NoError(b, err)
	c := &crowd{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), crowdConfig+"="+string(text))
	c.cmd.Stderr = os.Stderr
	c.input, err = c.cmd.StdinPipe()
	require.NoError(b, err)
	output, err := c.cmd.StdoutPipe()
	require.NoError(b, err)
	c.output = bufio.NewReader(output)
	require.NoError(b, c.cmd.Start())
	b.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	})
	return c
}

func (c *crowd) answer(b *testing.B) (done float64) {
	line, err := c.output.ReadString('\n')
	require.NoError(b, err)
	_, err = fmt.Sscan(line, &done)
	require.NoError(b, err)
	return done
}

// member is what a process of clients does.
type member struct {
	Address string
	From, N int
	clients []*session.Session
	row     foreign.Raw
}

func inCrowd(text string) {
	m := &member{}
	must(json.Unmarshal([]byte(text), m))
	m.clients, m.row = make([]*session.Session, m.N), oneRow()
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		switch command, active, _ := strings.Cut(commands.Text(), " "); command {
		case "connect":
			fmt.Println(m.each(m.N, 64, m.connect))
		case "once":
			fmt.Println(m.each(m.N, m.N, func(i int) int64 { return min(m.put(i), m.get(i)) }))
		case "ask":
			n, err := strconv.Atoi(active)
			must(err)
			until := time.Now().Add(2 * time.Second)
			fmt.Println(m.each(n, n, func(i int) (done int64) {
				for time.Now().Before(until) {
					done += m.get(i)
				}
				return done
			}))
		}
	}
	m.each(m.N, 64, func(i int) int64 {
		must(m.clients[i].Close(time.Second))
		return 1
	})
}

// each does something for the first n clients, of several at a time, and adds up.
func (m *member) each(n, together int, do func(i int) int64) int64 {
	var next, total atomic.Int64
	var all sync.WaitGroup
	for range min(together, n) {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				total.Add(do(i))
			}
		}()
	}
	all.Wait()
	return total.Load()
}

func (m *member) connect(i int) int64 {
	s, err := session.Open(context.Background(), &session.Config{Address: m.Address, Token: crowdToken, TimeoutMS: 60_000})
	must(err)
	m.clients[i] = s
	return 1
}

// oneRow is a column of one row of 64 bytes, in memory that stays where it is.
func oneRow() foreign.Raw {
	memory, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	must(err)
	memory[0] = 8
	base := uint64(uintptr(unsafe.Pointer(&memory[0])))
	return foreign.Raw{Kind: uint8(schema.Tensor), DType: uint8(schema.Int64), Ragged: 1, Form: uint8(foreign.Strided), Rank: 1,
		Dims: base, Base: base + 64, Stride: 64}
}

func (m *member) keys(i int) wire.Strings { return wire.Strings{fmt.Sprintf("key-%d", m.From+i)} }

func (m *member) put(i int) int64 {
	body, err := wire.Marshal(&putBody{Partition: "crowd", Keys: m.keys(i), Fields: wire.Strings{"x"}})
	must(err)
	return m.do(i, &client.Request{Op: wire.OpPut, Rows: 1, Columns: []foreign.Raw{m.row}, Body: body})
}

func (m *member) get(i int) int64 {
	body, err := wire.Marshal(&wire.GetRequest{Partition: "crowd", Keys: m.keys(i), Inline: client.InlineLimit})
	must(err)
	return m.do(i, &client.Request{Op: wire.OpGet, Body: body})
}

// do sends a request, waits for its result, and gives that back.
func (m *member) do(i int, req *client.Request) int64 {
	done := make(chan *client.Result, 1)
	_, err := m.clients[i].Client.Start(req, func(r *client.Result) { done <- r })
	must(err)
	r := <-done
	must(r.Err)
	for k := range r.Columns {
		client.Release(r.Columns[k].Token)
		client.Release(r.Columns[k].OffsetsToken)
	}
	return 1
}
