package bufpool

import (
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
)

func TestClassesWasteLittle(t *testing.T) {
	last := int64(0)
	for size := int64(1); size < 1<<36; size += size/17 + 1 {
		c := class(size)
		require.GreaterOrEqual(t, c, size)
		require.Zero(t, c%4096)
		require.LessOrEqual(t, c-size, max(size/8, 4096), "size %d", size)
		require.Equal(t, c, class(c), "the class of a class is itself")
		require.GreaterOrEqual(t, c, last)
		last = c
	}
}

// address tells buffers apart.
func address(data []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(data))) }

func open(t *testing.T) *Pool {
	leaktest.Check(t)
	p := New()
	t.Cleanup(func() {
		p.Close()
		live, idle := p.Stats()
		require.Zero(t, live)
		require.Zero(t, idle)
	})
	return p
}

func get(t *testing.T, p *Pool, size int64) []byte {
	t.Helper()
	data, err := p.Get(size)
	require.NoError(t, err)
	require.Len(t, data, int(size))
	data[0], data[size-1] = 1, 1
	return data
}

func TestABufferIsUsedAgain(t *testing.T) {
	p := open(t)
	for _, size := range []int64{1, 4096, 4097, 1<<20 - 1, 1 << 20, 3<<20 + 5} {
		first := get(t, p, size)
		live, idle := p.Stats()
		require.Equal(t, []int64{class(size), 0}, []int64{live, idle})
		p.Put(first)
		live, idle = p.Stats()
		require.Equal(t, []int64{0, class(size)}, []int64{live, idle})
		again := get(t, p, class(size))
		require.Equal(t, address(first), address(again))
		other := get(t, p, size)
		require.NotEqual(t, address(again), address(other))
		p.Put(again)
		p.Put(other)
		p.trim(time.Now().Add(time.Hour))
	}
}

func TestLargeBuffersStartOnAHugePage(t *testing.T) {
	p := open(t)
	for _, size := range []int64{1 << 20, 5<<20 + 1, 64 << 20} {
		data := get(t, p, size)
		require.Zero(t, address(data)%hugePage)
		p.Put(data)
	}
}

func TestIdleBuffersAreGivenBack(t *testing.T) {
	p := open(t)
	old := get(t, p, 8192)
	fresh := get(t, p, 8192)
	p.Put(old)
	between := time.Now()
	p.mu.Lock()
	p.mu.free[8192][0].since = between.Add(-time.Minute)
	p.mu.Unlock()
	p.Put(fresh)
	p.trim(between.Add(-time.Second))
	_, idle := p.Stats()
	require.EqualValues(t, 8192, idle, "the one that was idle for long is gone")
	require.NotNil(t, p.mu.trimmer, "somebody comes again for the other")
	require.Equal(t, address(fresh), address(get(t, p, 8192)))
	p.trim(time.Now().Add(time.Hour))
	require.Nil(t, p.mu.trimmer, "nothing is idle")
	p.Put(fresh)
	require.NotNil(t, p.mu.trimmer)
}

func TestABufferMayComeBackAfterClose(t *testing.T) {
	leaktest.Check(t)
	p := New()
	data, kept := get(t, p, 1<<20), get(t, p, 100)
	p.Put(kept)
	p.Close()
	live, idle := p.Stats()
	require.Equal(t, []int64{1 << 20, 0}, []int64{live, idle})
	data[5] = 1
	p.Put(data)
	live, idle = p.Stats()
	require.Zero(t, live+idle)
}

func TestMoreThanThereIs(t *testing.T) {
	p := open(t)
	for _, size := range []int64{1 << 50, 1 << 62} {
		_, err := p.Get(size)
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
		live, _ := p.Stats()
		require.Zero(t, live)
	}
}

// Nobody else writes to a buffer between Get and Put.
func TestABufferHasOneOwner(t *testing.T) {
	p := open(t)
	parallel(8, func(g int) {
		for i := range 400 {
			data, err := p.Get(int64(1 + (i*7919+g*31)%20000))
			if err != nil {
				t.Error(err)
				return
			}
			mark := byte(g*16 + i%16)
			for k := range data {
				data[k] = mark
			}
			for k := range data {
				if data[k] != mark {
					t.Errorf("byte %d belongs to two", k)
					return
				}
			}
			p.Put(data)
		}
	})
}

// parallel runs do n times at once.
func parallel(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Add(1)
		go func() {
			defer all.Done()
			do(i)
		}()
	}
	all.Wait()
}
