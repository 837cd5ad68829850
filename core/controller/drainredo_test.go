package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/wire"
)

// A job that an older program has written down, which did not say when it began, goes on; its deadline begins anew once.
func TestADrainOfAnOlderProgramIsRead(t *testing.T) {
	type older struct {
		Origin  origin
		Request wire.DrainRequest
		Status  wire.JobReply
	}
	request := wire.DrainRequest{Unit: "unit-0", MaxSlots: 4, MaxBytes: 1 << 20, DeadlineMS: 60_000, Attempts: 3, Tiers: keepTier}
	record, err := encodeRecord(recordDrain, &older{Request: request, Status: wire.JobReply{Job: 7}})
	require.NoError(t, err)
	s := blank(Options{})
	require.NoError(t, (&recovering{s: s}).drain(1, record))
	d := s.mu.drains.byID[7]
	require.Equal(t, request, d.request)
	require.InDelta(t, 0, time.Since(d.options().Began).Seconds(), 30)
	d.began = d.began.Add(-time.Hour)
	record, err = encodeRecord(recordDrain, d.record(origin{}))
	require.NoError(t, err)
	s = blank(Options{})
	require.NoError(t, (&recovering{s: s}).drain(1, record))
	require.InDelta(t, time.Hour.Seconds(), time.Since(s.mu.drains.byID[7].options().Began).Seconds(), 30)
}
