package arena

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func BenchmarkAllocFree(b *testing.B) {
	a := open(b, Options{})
	for _, size := range []int64{100, 64 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			for b.Loop() {
				free(a, alloc(b, a, size))
			}
		})
	}
}

// BenchmarkFreeRows frees single rows in random order, among a million of them.
func BenchmarkFreeRows(b *testing.B) {
	a := open(b, Options{})
	const row, rows = 128, 1 << 20
	order := rand.New(rand.NewPCG(1, 2)).Perm(rows)
	block, next := Block{}, 0
	for b.Loop() {
		if next == 0 {
			b.StopTimer()
			block = alloc(b, a, row*rows)
			b.StartTimer()
		}
		a.Free(block.Segment, block.Offset+int64(order[next])*row, row)
		next = (next + 1) % rows
	}
	b.StopTimer()
	for _, i := range order[next:] {
		if next > 0 {
			a.Free(block.Segment, block.Offset+int64(i)*row, row)
		}
	}
}

// BenchmarkPunch returns a random half of 1 GiB of 32 KiB rows to the system.
func BenchmarkPunch(b *testing.B) {
	const row, rows = 32 << 10, 32 << 10
	a := open(b, Options{})
	order := rand.New(rand.NewPCG(1, 2)).Perm(rows)
	b.SetBytes(row * rows / 2)
	for b.Loop() {
		b.StopTimer()
		block := alloc(b, a, row*rows)
		if err := unix.Fallocate((*a.segments.Load())[0].fd, 0, block.Offset, block.Size); err != nil {
			b.Fatal(err)
		}
		for _, i := range order[:rows/2] {
			a.Free(0, block.Offset+int64(i)*row, row)
		}
		b.StartTimer()
		for did, now := true, time.Now().Add(quiet); did; {
			did, _ = a.sweepOnce(now)
		}
		b.StopTimer()
		b.ReportMetric(float64(resident(b, a))/(row*rows), "resident/all")
		for _, i := range order[rows/2:] {
			a.Free(0, block.Offset+int64(i)*row, row)
		}
		b.StartTimer()
	}
}

// BenchmarkLease lends 256 MiB, reads all of it, writes one page and ends the lease.
func BenchmarkLease(b *testing.B) {
	const size = 256 * mib
	a := open(b, Options{})
	m := mapOf(b, a, 0)
	block := alloc(b, a, size)
	if err := a.Write(0, block.Offset, make([]byte, size)); err != nil {
		b.Fatal(err)
	}
	for _, read := range []bool{false, true} {
		b.Run(fmt.Sprintf("read=%v", read), func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				view, ok := m.Lease(block.Offset, size)
				if !ok {
					b.Fatal("refused")
				}
				if read {
					bytes.Count(view, []byte{1})
				}
				view[12345] = 1
				m.EndLease(block.Offset, size)
			}
		})
	}
	free(a, block)
}

// BenchmarkWrite copies 256 MiB into pages in each state a writer may find them in.
func BenchmarkWrite(b *testing.B) {
	const size = 256 * mib
	src := make([]byte, size)
	for i := range src {
		src[i] = byte(i)
	}
	for _, state := range []string{"hole/copy", "hole/Write", "hole+ahead/copy", "hole+ahead/Write", "resident/copy", "resident/Write", "mapped/copy", "mapped/Write"} {
		b.Run(state, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				b.StopTimer()
				kind, how, _ := strings.Cut(state, "/")
				benchWrite(b, kind, how, src)
			}
		})
	}
}

func benchWrite(b *testing.B, kind, how string, src []byte) {
	a := open(b, Options{PopulateAhead: kind == "hole+ahead"})
	m := mapOf(b, a, 0)
	ctx := b.Context()
	go a.Run(ctx)
	var block Block
	switch kind {
	case "hole", "hole+ahead":
		b.StartTimer()
		block = alloc(b, a, int64(len(src)))
	case "resident":
		block = alloc(b, a, int64(len(src)))
		_ = a.Write(0, block.Offset, src)
		b.StartTimer()
	case "mapped":
		block = alloc(b, a, int64(len(src)))
		_ = unix.Madvise(m.Shared()[block.Offset:block.Offset+block.Size], 23)
		b.StartTimer()
	}
	if how == "copy" {
		copy(m.Shared()[block.Offset:block.Offset+block.Size], src)
	} else if err := m.Write(block.Offset, src); err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	free(a, block)
	_ = a.Close()
	_ = m.Close()
	b.StartTimer()
}
