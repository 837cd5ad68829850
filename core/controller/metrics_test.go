//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// counted is how often requests of a kind have ended, failed, and how many samples they touched.
type counted struct{ count, errors, samples int64 }

func countedOf(r *wire.RequestMetrics) counted {
	c := counted{errors: r.Errors, samples: r.Samples}
	for _, n := range r.Buckets {
		c.count += n
	}
	return c
}

func (u *user) metrics() *wire.MetricsReply {
	u.t.Helper()
	var reply wire.MetricsReply
	u.ask(wire.OpMetrics, nil, &reply)
	return &reply
}

func requestsOf(list []wire.RequestMetrics) map[string]counted {
	out := map[string]counted{}
	for i := range list {
		if c := countedOf(&list[i]); c.count > 0 {
			out[list[i].Type] = c
		}
	}
	return out
}

func TestRequestsAreCountedByTheNamesOfThePeer(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		u.put(s.rows(wide, keysOf(4), 1, 2, 3, 4))
		u.put(batch{write: write{Partition: "p", Keys: keysOf(1), Tags: wire.List{{0x80}}}})
		u.get(keysOf(2)...)
		u.clear("k0", "k1", "none")
		u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keysOf(3), Fields: wire.Strings{"x"}}, nil)
		u.keys()
		u.ask(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "force_fetch", Fields: wire.Strings{"x"}}, nil)
		require.Error(t, u.try(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "wrong"}, nil))
		u.ask(wire.OpRetrieveMeta, &wire.RetrieveMetaRequest{Partition: "p", Keys: keysOf(1)}, nil)
		u.ask(wire.OpRetrieveKeys, &wire.IndexesRequest{Partition: "p"}, nil)
		u.ask(wire.OpSetTags, &wire.SetTagsRequest{Partition: "p"}, nil)
		u.ask(wire.OpConsumption, &wire.TaskRequest{Partition: "p", Task: "t"}, nil)
		u.ask(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: "t"}, nil)
		u.ask(wire.OpProduction, &wire.ProductionRequest{Partition: "p", Fields: wire.Strings{"x"}}, nil)
		u.ask(wire.OpPartitions, nil, nil)
		u.ask(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, nil)
		got := requestsOf(u.metrics().Requests)
		require.Equal(t, map[string]counted{
			"NOTIFY_DATA_UPDATE":  {3, 0, 8},
			"RESERVE_DATA":        {1, 0, 0},
			"RELEASE":             {1, 0, 0},
			"GET_DATA":            {1, 0, 2},
			"CLEAR_META":          {1, 0, 2},
			"KV_CLEAR_FIELDS":     {1, 0, 1},
			"KV_LIST":             {1, 0, 0},
			"GET_META":            {2, 1, 0},
			"KV_RETRIEVE_META":    {1, 0, 0},
			"KV_RETRIEVE_KEYS":    {1, 0, 0},
			"SET_CUSTOM_META":     {1, 0, 0},
			"GET_CONSUMPTION":     {1, 0, 0},
			"RESET_CONSUMPTION":   {1, 0, 0},
			"GET_PRODUCTION":      {1, 0, 0},
			"GET_LIST_PARTITIONS": {1, 0, 0},
			"CLEAR_PARTITION":     {1, 0, 2},
		}, got)
		require.Equal(t, counted{1, 0, 0}, requestsOf(u.metrics().Requests)["METRICS"], "one that asks is counted when it has ended")
	})
}

func TestUnitsAreCountedOneByOne(t *testing.T) {
	with(t, setup{units: 2, samples: 8}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(6), 1, 2, 3, 4, 5, 6))
		u.put(s.rows(wide, keysOf(2), 1, 2))
		u.put(s.add(narrow, []string{"k2"}, 1))
		u.get(keysOf(2)...)
		u.clear("k5")
		reply := u.metrics()
		require.Len(t, reply.Units, 2)
		sum := map[string]counted{}
		for _, one := range reply.Units {
			require.Len(t, one.Requests, 4, "also those that nobody has asked for")
			for name, c := range requestsOf(one.Requests) {
				all := sum[name]
				sum[name] = counted{all.count + c.count, all.errors + c.errors, all.samples + c.samples}
			}
			require.EqualValues(t, 4, one.Info.SampleLimit)
			require.GreaterOrEqual(t, one.Resident, one.Info.MemoryUsed)
		}
		require.EqualValues(t, 8, sum["PUT_DATA"].samples, "an update stores without a put")
		require.EqualValues(t, 2, sum["GET_DATA"].samples)
		require.Equal(t, counted{1, 0, 1}, sum["CLEAR_DATA"])
		require.Equal(t, counted{1, 0, 1}, sum["UPDATE_DATA"])
		for _, one := range reply.Units {
			for i := range one.Requests {
				require.Equal(t, countedOf(&one.Requests[i]).count, one.Requests[i].Arrived)
			}
		}
	})
}

// Durations are those of the clock of the bubble, so they are exact.
func TestDurationsIncludeTheWait(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
		u := full(t, s)
		late := s.user().beginPut(s.rows(wide, []string{"new"}, 1))
		fetch := s.user().begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Keys: wire.Strings{"new"}}, time.Minute)
		watcher := s.user()
		watcher.ask(wire.OpWatchOpen, &wire.PartitionRequest{Partition: "other"}, nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		queues := u.metrics().Queues
		require.EqualValues(t, 1, queues.WaitingPuts)
		require.EqualValues(t, 1, queues.Waiters)
		require.EqualValues(t, 1, queues.Watches)
		require.EqualValues(t, 4, queues.Clients)
		u.clear("b")
		require.NoError(t, late.wait().Err)
		require.NoError(t, fetch.wait().Err)
		reply := u.metrics()
		require.Zero(t, reply.Queues.WaitingPuts)
		require.Zero(t, reply.Queues.Waiters)
		for i, r := range reply.Requests {
			if r.Type == "WAIT" {
				require.InDelta(t, float64(2*time.Second), r.Sum, float64(100*time.Millisecond))
				require.EqualValues(t, 1, r.Buckets[9], "more than a second, less than five")
				require.EqualValues(t, 3*time.Second, reply.Requests[i].P50, "the middle of the bucket")
			}
		}
		require.Contains(t, requestsOf(reply.Requests), "WAIT")
		require.GreaterOrEqual(t, reply.Uptime, int64(2*time.Second))
		require.Positive(t, reply.Resident)
		require.Len(t, reply.Bounds, 10)
		require.EqualValues(t, 5*time.Second, reply.Bounds[9])
	})
}

func TestCallsThatAreGivenUpAreNoErrors(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		waiting := u.begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Count: 1}, time.Minute)
		synctest.Wait()
		waiting.cancel()
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(waiting.wait().Err))
		require.Error(t, decode(u.begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Count: 1}, time.Second).wait(), nil))
		synctest.Wait()
		require.Equal(t, counted{2, 1, 0}, requestsOf(u.metrics().Requests)["WAIT"])
	})
}

func TestPartitionsAreCountedUntilTheyAreGone(t *testing.T) {
	with(t, setup{polling: true}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
		u.ask(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "insert", BatchSize: 1}, nil)
		u.ask(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: wire.Strings{"x"}, BatchSize: 1, Task: "train"}, nil)
		reply := u.metrics()
		require.Equal(t, []wire.PartitionMetrics{
			{Name: "p", Samples: 5, Produced: 4, Tasks: wire.Strings{"train"}, Consumed: wire.Ints{1}},
		}, reply.Partitions)
		require.Equal(t, []int64{5, 0}, []int64{reply.Allocated, reply.Reusable})
		u.ask(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, nil)
		reply = u.metrics()
		require.Empty(t, reply.Partitions)
		require.Equal(t, []int64{0, 5}, []int64{reply.Allocated, reply.Reusable})
	})
}

func TestWhatAttachingClientsAreToldIsTheStoredConfiguration(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.ask(wire.OpStoreConfig, &wire.StoreConfigRequest{Config: []byte("new")}, nil)
		var reply wire.ConfigReply
		s.user().ask(wire.OpConfig, nil, &reply)
		require.Equal(t, "new", string(reply.Config))
	})
}
