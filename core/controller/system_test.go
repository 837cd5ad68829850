//go:build go1.25

package controller_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/controller"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/jobs"
	"transferqueue/core/journal"
	"transferqueue/core/sampler"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// setup says what system a test wants.
type setup struct {
	units   int
	limit   int64 // bytes of each unit
	samples int64
	polling bool
	putWait time.Duration
	sampler sampler.Sampler        // nil: Sequential
	python  string                 // name of a sampler that Python runs
	remote  bool                   // units behind a network of their own, as in other processes
	disk    *unit.Disk             // of each unit; its folder is chosen by start
	diskFor func(i int) *unit.Disk // instead, of one unit
	journal journal.Durability     // 0: none
	failing *vfs.FailingDisk       // where the journal lies; nil: on one that does not fail
	drains  bool                   // the model drains units at random
	durable bool                   // units in the process of the controller keep everything on the disk of its journal
}

// system is a controller with real units behind a network in memory.
type system struct {
	t      *testing.T
	net    *memnet.Network
	server *controller.Server
	units  []*unit.Unit
	hosts  []*host // of remote units
	jobs   *jobs.Queue
	pool   *bufpool.Pool
	users  []*user
	mem    *foreigntest.Memory
	closed bool // the server is closed, so that nothing can be cleared
	last   []func()
	folder string // of disks

	setup  setup
	inside []controller.Unit
	mortal *mortal    // the disk of the journal; nil: there is none
	mu     sync.Mutex // users, server and net, where the server is replaced
}

// afterwards is the test with its end postponed until the system has finished, and with it what runs in the background.
type afterwards struct {
	testing.TB
	s *system
}

func (a afterwards) Cleanup(do func()) { a.s.last = append(a.s.last, do) }

// with runs a test twice, with units in the process of the controller and with units elsewhere, in a bubble where time passes by
// itself, and checks afterwards that everything is consistent, that clearing everything leaves nothing, and that nothing runs on.
func with(t *testing.T, o setup, test func(t *testing.T, s *system)) {
	for name, remote := range map[string]bool{"units here": false, "units elsewhere": true} {
		o.remote = remote
		t.Run(name, func(t *testing.T) { within(t, o, test) })
	}
}

// within runs a test once.
func within(t *testing.T, o setup, test func(t *testing.T, s *system)) {
	leaktest.Check(t)
	synctest.Test(t, func(t *testing.T) {
		stuck := time.AfterFunc(24*time.Hour, func() { panic("a day has passed: somebody waits for what does not come") })
		defer stuck.Stop()
		s := start(t, o)
		t.Cleanup(s.finish)
		test(t, s)
	})
}

func start(t *testing.T, o setup) *system {
	s := &system{t: t, pool: bufpool.New(), mem: foreigntest.New(t, 64<<20)}
	t.Cleanup(func() {
		for _, do := range s.last {
			do()
		}
	})
	s.jobs = jobs.New(s.pool)
	if s.setup = o; o.journal != 0 {
		s.mortal = newMortal(vfs.NewMem(0))
		if o.failing != nil {
			o.failing.Disk, s.mortal.Disk = s.mortal.mem, o.failing
		}
	}
	if o.durable {
		s.folder = t.TempDir()
	}
	for i := range max(o.units, 1) {
		if o.remote {
			s.addHost(i, o, (o.samples+int64(max(o.units, 1))-1)/int64(max(o.units, 1)))
			continue
		}
		s.addUnit(i)
	}
	if o.python != "" {
		o.sampler = sampler.NewPython(o.python, []byte(o.python), s.jobs, time.Minute)
	}
	if o.sampler == nil {
		o.sampler = sampler.Sequential{}
	}
	s.setup.sampler = o.sampler
	s.server = s.open()
	s.net = memnet.New(1, s.handler(s.server))
	s.joinHosts()
	return s
}

// headroom is little, because a unit reads what it has taken in advance whenever it is opened.
const headroom = 64 << 10

// addUnit makes a unit in the process of the controller.
func (s *system) addUnit(i int) {
	o := unit.Options{
		ID: uint32(i), Name: fmt.Sprintf("unit-%d", i), MemoryLimit: s.setup.limit, Disk: s.diskOf(i, s.setup), Jobs: s.jobs,
	}
	if s.setup.durable {
		durability := disktier.Relaxed
		if s.setup.journal == journal.Strict {
			durability = disktier.Strict
		}
		threshold := int64(1)
		if o.Disk != nil {
			threshold = o.Disk.Threshold
		}
		disk := unit.Disk{
			Path: s.folder, Durability: durability, Namespace: "n", Name: o.Name, Threshold: threshold,
			HighWatermark: 0.9, LowWatermark: 0.7, Headroom: headroom,
		}.OnDisk(s.mortal)
		o.Disk = disk
	}
	u, err := unit.New(o)
	require.NoError(s.t, err)
	s.units, s.inside = append(s.units, u), append(s.inside, u)
}

func (s *system) options(log *journal.Log) controller.Options {
	o := s.setup
	return controller.Options{
		Units: s.inside, Sampler: o.sampler, Python: s.jobs, SamplerTime: time.Minute, Polling: o.polling, SampleLimit: o.samples,
		PutWait: o.putWait, Dial: s.dial(), Journal: log, RestartWait: time.Minute,
	}
}

// diskOf is the disk of a unit: all lie in one folder, as those of a session do.
func (s *system) diskOf(i int, o setup) *unit.Disk {
	if o.diskFor != nil {
		return o.diskFor(i)
	}
	if o.disk == nil {
		return nil
	}
	if s.folder == "" {
		s.folder = s.t.TempDir()
	}
	for _, name := range []string{"unit-%d", "unit-%d-1"} { // scratch space is real also when the values are not
		folder := filepath.Join(s.folder, "transfer_queue_ssd_offload", "run", fmt.Sprintf(name, i))
		require.NoError(s.t, os.MkdirAll(folder, 0o700))
	}
	d := *o.disk
	d.Path, d.Run, d.Unit, d.Headroom = s.folder, "run", fmt.Sprintf("unit-%d", i), headroom
	if d.HighWatermark == 0 {
		d.HighWatermark, d.LowWatermark = 0.9, 0.7
	}
	if d.Threshold == 0 {
		d.Threshold = 1 << 40
	}
	return &d
}

// check verifies what must hold at any quiet moment.
func (s *system) check() {
	s.t.Helper()
	require.NoError(s.t, s.server.Verify())
	for _, u := range s.units {
		require.NoError(s.t, u.Store.(interface{ Check() error }).Check())
	}
}

// stats sums what the units hold.
func (s *system) stats() (sum store.Stats) {
	for i, u := range s.units {
		if s.isDead(i) {
			continue
		}
		st := u.Stats()
		sum.MemoryUsed += st.MemoryUsed
		sum.DiskUsed += st.DiskUsed
		sum.Staging += st.Staging
		sum.Scratch += st.Scratch
		sum.Cells += st.Cells
		sum.Staged += st.Staged
		sum.Leases += st.Leases
	}
	return sum
}

func (s *system) finish() {
	if !s.t.Failed() && !s.closed {
		s.leaveNothing()
	}
	for _, u := range s.users {
		_ = u.Close()
	}
	_ = s.net.Close()
	s.jobs.Close()
	s.server.Close()
	synctest.Wait()
	s.closeHosts()
	for _, u := range s.units {
		if err := u.Close(); err != nil {
			s.t.Error(err)
		}
	}
	if live, _ := s.pool.Stats(); live != 0 && !s.t.Failed() {
		s.t.Errorf("%d bytes of the pool were not given back", live)
	}
	s.pool.Close()
}

// leaveNothing clears everything and looks for what is left.
func (s *system) leaveNothing() {
	synctest.Wait()
	s.check()
	admin := s.user()
	var names wire.NamesReply
	admin.ask(wire.OpPartitions, nil, &names)
	for _, name := range names.Names {
		if err := admin.try(wire.OpClearPartition, &wire.PartitionRequest{Partition: name}, nil); err != nil {
			require.Equal(s.t, tqerr.Unavailable, tqerr.CodeOf(err), err)
			admin.ask(wire.OpClearPartition, &wire.PartitionRequest{Partition: name}, nil)
		}
	}
	for _, u := range s.users {
		require.NoError(s.t, u.Close())
	}
	synctest.Wait()
	s.check()
	require.Zero(s.t, s.stats(), "cleared")
	waiters, writes, watches := s.server.Parked()
	require.Zero(s.t, waiters+writes+watches, "nobody waits any more")
	clients, _ := s.server.Clients()
	require.Zero(s.t, clients)
	require.Zero(s.t, client.Held())
}

// user is a client and memory from which it puts.
type user struct {
	*client.Client
	s  *system
	t  *testing.T
	id uint64
}

func (s *system) user(change ...func(*client.Options)) *user {
	u := &user{s: s, t: s.t, id: client.NewID()}
	conn, err := s.net.Dial(u.id)
	require.NoError(s.t, err)
	o := client.Options{Conn: conn, Pool: s.pool}
	for _, fn := range change {
		fn(&o)
	}
	if o.Redial != nil {
		o.Redial = func(ctx context.Context) (transport.Conn, error) { return s.dialAgain(ctx, u.id) }
	}
	u.Client = client.New(o)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users = append(s.users, u)
	return u
}

// dialAgain waits for the controller when it is being replaced.
func (s *system) dialAgain(ctx context.Context, id uint64) (transport.Conn, error) {
	for {
		s.mu.Lock()
		net := s.net
		s.mu.Unlock()
		conn, err := net.Dial(id)
		if err == nil || s.setup.journal == 0 || ctx.Err() != nil {
			return conn, err
		}
		time.Sleep(time.Millisecond)
	}
}

// resending is for a network that loses messages, redialing for one that cuts.
func resending(o *client.Options) { o.Resend = 50 * time.Millisecond }
func redialing(o *client.Options) {
	o.Redial = func(context.Context) (transport.Conn, error) { return nil, nil }
}

// pending is a request on its way.
type pending struct {
	result chan *client.Result
	cancel func()
}

func (p *pending) wait() *client.Result { return <-p.result }

func (p *pending) done() bool { return len(p.result) > 0 }

func (u *user) start(req *client.Request) *pending {
	p := &pending{result: make(chan *client.Result, 1)}
	started, err := u.Start(req, func(r *client.Result) { p.result <- r })
	p.cancel = started.Cancel
	if err != nil {
		p.cancel = func() {}
		p.result <- &client.Result{Err: err}
	}
	return p
}

// begin starts a request other than a put.
func (u *user) begin(op wire.Op, body any, timeout time.Duration) *pending {
	req := &client.Request{Op: op, Timeout: timeout}
	if body != nil {
		var err error
		req.Body, err = wire.Marshal(body)
		require.NoError(u.t, err)
	}
	return u.start(req)
}

// try does a request and decodes its reply.
func (u *user) try(op wire.Op, body, reply any) error {
	return decode(u.begin(op, body, 0).wait(), reply)
}

func decode(r *client.Result, reply any) error {
	if r.Err != nil || reply == nil {
		return r.Err
	}
	return wire.Unmarshal(r.Body, reply)
}

func (u *user) ask(op wire.Op, body, reply any) {
	u.t.Helper()
	require.NoError(u.t, u.try(op, body, reply))
}

// write is the body of a put as Start takes it.
type write struct {
	Partition string
	Keys      wire.Strings
	Samples   *wire.Samples
	Insert    int
	Fields    wire.Strings
	Tags      wire.List
	Update    bool
	Merge     string
	Callable  []byte
	Last      bool
	Dedup     wire.Strings
	Brief     bool
}

// batch is a put or an update with its columns.
type batch struct {
	write
	columns []foreign.Raw
	timeout time.Duration
}

func (b batch) rows() int {
	if b.Samples != nil {
		return len(b.Samples.Indexes)
	}
	return len(b.Keys) + b.Insert
}

func (u *user) beginPut(b batch) *pending {
	body, err := wire.Marshal(&b.write)
	require.NoError(u.t, err)
	return u.start(&client.Request{Op: wire.OpPut, Body: body, Columns: b.columns, Rows: b.rows(), Timeout: b.timeout})
}

func putResult(r *client.Result) (*wire.PutResult, error) {
	var reply wire.PutReply
	if err := decode(r, &reply); err != nil {
		return nil, err
	}
	return reply.Result, nil
}

func (u *user) tryPut(b batch) (*wire.PutResult, error) { return putResult(u.beginPut(b).wait()) }

func (u *user) put(b batch) *wire.PutResult {
	u.t.Helper()
	result, err := u.tryPut(b)
	require.NoError(u.t, err)
	return result
}

const (
	narrow = 4       // elements of a row that is sent inline
	wide   = 9 << 10 // elements of a row that is staged
)

// same makes a column of rows with width equal elements each.
func (s *system) same(width int, values ...int64) foreign.Raw {
	all := make([]int64, 0, width*len(values))
	for _, v := range values {
		for range width {
			all = append(all, v)
		}
	}
	return s.mem.Ints([]int64{int64(width)}, all...)
}

// rows is a put of one value for each key in field "x".
func (s *system) rows(width int, keys []string, values ...int64) batch {
	return batch{write: write{Partition: "p", Keys: keys, Fields: []string{"x"}}, columns: []foreign.Raw{s.same(width, values...)}}
}

// add is an update of field "x" by a native merge.
func (s *system) add(width int, keys []string, values ...int64) batch {
	b := s.rows(width, keys, values...)
	b.Update, b.Merge = true, "add"
	return b
}

// read is a get with everything decoded; columns by name, rows of elements.
type read struct {
	names []string
	ints  map[string][][]int64
	bytes map[string][][]byte
}

func (u *user) tryGet(req *wire.GetRequest, flags client.Flags) (*read, error) {
	req.Inline, req.Views = client.InlineLimit, flags&client.Views != 0
	body, err := wire.Marshal(req)
	require.NoError(u.t, err)
	return u.decoded(u.start(&client.Request{Op: wire.OpGet, Flags: flags, Body: body}).wait())
}

func (u *user) decoded(r *client.Result) (*read, error) {
	if r.Err != nil {
		return nil, r.Err
	}
	out := &read{ints: map[string][][]int64{}, bytes: map[string][][]byte{}}
	for i := range r.Columns {
		c := &r.Columns[i]
		out.names = append(out.names, c.Column.Field)
		offsets := c.Column.Offsets()
		for row := range c.Column.Rows {
			data := slices.Clone(c.Data[offsets[row]:offsets[row+1]])
			if c.Column.Kind == schema.Object {
				out.bytes[c.Column.Field] = append(out.bytes[c.Column.Field], data)
			} else {
				out.ints[c.Column.Field] = append(out.ints[c.Column.Field], elements(data))
			}
		}
		client.Release(c.Token)
		client.Release(c.OffsetsToken)
	}
	return out, nil
}

func elements(data []byte) []int64 {
	out := make([]int64, len(data)/8)
	for i := range out {
		out[i] = int64(binary.NativeEndian.Uint64(data[8*i:]))
	}
	return out
}

func (u *user) get(keys ...string) *read {
	u.t.Helper()
	r, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: keys, Strict: true}, 0)
	require.NoError(u.t, err)
	return r
}

// values returns field "x" of keys whose rows have equal elements.
func (u *user) values(keys ...string) []int64 {
	u.t.Helper()
	rows := u.get(keys...).ints["x"]
	out := make([]int64, len(rows))
	for i, row := range rows {
		require.NotEmpty(u.t, row)
		for _, v := range row {
			require.Equal(u.t, row[0], v, "key %q is one write's", keys[i])
		}
		out[i] = row[0]
	}
	return out
}

func (u *user) keys() []string {
	u.t.Helper()
	var reply wire.ListReply
	p := "p"
	u.ask(wire.OpList, &wire.ListRequest{Partition: &p}, &reply)
	if len(reply.Partitions) == 0 {
		return nil
	}
	return reply.Partitions[0].Keys
}

func (u *user) clear(keys ...string) {
	u.t.Helper()
	u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys}, nil)
}

// python pulls jobs as a Python thread does and lets work compute the results.
func (s *system) python(work func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error)) {
	mem := foreigntest.New(afterwards{s.t, s}, 64<<20)
	go func() {
		for {
			job, err := s.jobs.Next(48 * time.Hour)
			if err != nil {
				return
			}
			mem.Reset()
			columns, err := work(job, mem)
			if err != nil {
				s.jobs.Fail(job.ID, err)
				continue
			}
			s.giveBack(job, columns, job.Rows)
		}
	}()
}

// giveBack ends a job as capi does.
func (s *system) giveBack(job *jobs.Job, columns []foreign.Raw, rows int) {
	var inputs []*foreign.Input
	for i := range columns {
		in, err := foreign.New("", rows, &columns[i])
		if err != nil {
			s.jobs.Fail(job.ID, err)
			return
		}
		inputs = append(inputs, in)
	}
	if err := s.jobs.Done(job.ID, inputs); err != nil {
		s.t.Error(err)
	}
}

// sums is a callable that adds the new rows to the stored ones.
func sums(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
	n := len(job.Columns) / 2
	out := make([]foreign.Raw, n)
	for k := range out {
		old, added := &job.Columns[k], &job.Columns[n+k]
		offsets, all := old.Column.Offsets(), elements(old.Bytes)
		for i, v := range elements(added.Bytes) {
			all[i] += v
		}
		rows := make([][]int64, job.Rows)
		for i := range rows {
			rows[i] = all[offsets[i]/8 : offsets[i+1]/8]
		}
		out[k] = mem.Ragged(rows...)
	}
	return out, nil
}

func keysOf(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("k%d", i)
	}
	return out
}
