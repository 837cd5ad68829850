package table

import (
	"math/rand/v2"
	"testing"

	"transferqueue/core/schema"
)

// The batch of a training step: 1024 rows of 8 fields.
const (
	benchRows   = 1024
	benchFields = 8
)

// perCell reports what one of the batch's cells costs.
func perCell(b *testing.B) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(benchRows*benchFields), "ns/cell")
}

func BenchmarkCommit(b *testing.B) {
	s := New(Options{Memory: openArena(b)})
	columns, samples := uniform(benchFields, benchRows, 512), batch(0, benchRows)
	for b.Loop() {
		b.StopTimer()
		tx, err := s.Stage("p", columns)
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		tx.Commit(samples)
		b.StopTimer()
		s.Delete("p", nil, samples)
		b.StartTimer()
	}
	perCell(b)
	_ = s.Close()
}

func BenchmarkStageAbort(b *testing.B) {
	s := New(Options{Memory: openArena(b)})
	columns := uniform(benchFields, benchRows, 512)
	for b.Loop() {
		tx, err := s.Stage("p", columns)
		if err != nil {
			b.Fatal(err)
		}
		tx.Abort()
	}
	perCell(b)
	_ = s.Close()
}

func BenchmarkOverwrite(b *testing.B) {
	s := New(Options{Memory: openArena(b)})
	columns, samples := uniform(benchFields, benchRows, 512), batch(0, benchRows)
	for b.Loop() {
		put(b, s, columns, samples)
	}
	perCell(b)
	_ = s.Close()
}

func BenchmarkDelete(b *testing.B) {
	s := New(Options{Memory: openArena(b)})
	columns, samples := uniform(benchFields, benchRows, 512), batch(0, benchRows)
	for b.Loop() {
		b.StopTimer()
		put(b, s, columns, samples)
		b.StartTimer()
		s.Delete("p", nil, samples)
	}
	perCell(b)
	_ = s.Close()
}

func benchRead(b *testing.B, s *Table, fields []string, samples []schema.Sample) {
	for b.Loop() {
		l, err := s.Read("p", fields, samples)
		if err != nil {
			b.Fatal(err)
		}
		l.Release()
	}
	perCell(b)
	_ = s.Close()
}

func BenchmarkRead(b *testing.B) {
	shuffled := batch(0, benchRows)
	rand.New(rand.NewPCG(1, 2)).Shuffle(benchRows, func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	ragged := uniform(benchFields, benchRows, 0)
	for i := range ragged {
		c := &ragged[i]
		c.Form, c.Lengths = schema.Varying, make([]int64, benchRows)
		for j := range c.Lengths {
			c.Lengths[j] = int64(j % 700)
		}
	}
	for name, columns := range map[string][]schema.Column{"uniform": uniform(benchFields, benchRows, 512), "ragged": ragged} {
		for order, samples := range map[string][]schema.Sample{"inOrder": batch(0, benchRows), "shuffled": shuffled} {
			b.Run(name+"/"+order, func(b *testing.B) {
				s := New(Options{Memory: openArena(b)})
				put(b, s, columns, batch(0, benchRows))
				benchRead(b, s, names(columns), samples)
			})
		}
		b.Run(name+"/singlePuts", func(b *testing.B) {
			s := New(Options{Memory: openArena(b)})
			for i := range benchRows {
				one := make([]schema.Column, len(columns))
				for j := range one {
					one[j] = columns[j].Slice(i, i+1)
				}
				put(b, s, one, batch(int64(i), 1))
			}
			benchRead(b, s, names(columns), batch(0, benchRows))
		})
	}
}
