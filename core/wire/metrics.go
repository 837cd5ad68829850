package wire

// MetricsReply is what the controller has counted, and the state it has now. Durations are nanoseconds.
type MetricsReply struct {
	Uptime     int64
	Resident   int64 // memory of the controller's process, bytes
	Allocated  int64 // indexes in use, reserved ones included
	Reusable   int64 // indexes that were in use and are free
	Requests   []RequestMetrics
	Partitions []PartitionMetrics
	Units      []UnitMetrics
	Queues     QueueMetrics
	Bounds     Ints // upper bounds of the buckets of all requests, ascending
	Moves      MoveMetrics
}

// MoveMetrics counts what has moved from one unit to another, and the jobs that drain one now.
type MoveMetrics struct{ Samples, Cells, Bytes, Drains int64 }

// RequestMetrics counts the requests of one kind.
type RequestMetrics struct {
	Type    string
	Errors  int64
	Samples int64
	Arrived int64 // also those that have not ended; units only
	Sum     int64 // of the durations
	Buckets Ints  // of MetricsReply.Bounds and one more, not cumulated
	P50     int64
	P99     int64
}

// PartitionMetrics counts one partition.
type PartitionMetrics struct {
	Name     string
	Samples  int64 // active ones
	Produced int64 // those of them that have a field
	Tasks    Strings
	Consumed Ints // per task
}

// UnitMetrics is a unit with what was asked of it.
type UnitMetrics struct {
	Info     UnitInfo
	Resident int64 // memory pages of its cells, bytes
	Requests []RequestMetrics
}

// QueueMetrics counts what is open or waits.
type QueueMetrics struct {
	Clients     int64
	Waiters     int64 // requests that wait for samples
	Watches     int64
	Writes      int64 // updates and parsed puts in progress, and writes that wait for them
	WaitingPuts int64 // writes that wait for room
	Jobs        int64 // calls of Python functions that no thread has taken
}
