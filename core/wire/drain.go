package wire

// DrainRequest moves everything that a unit holds to others. It is answered at once by the status of the job that does it.
type DrainRequest struct {
	Unit       string
	Targets    Strings // names of units, nil: all others
	MaxSlots   int     // batches at a time
	MaxBytes   int64   // of these together
	Rate       int64   // bytes per second, 0: no limit
	DeadlineMS int64   // 0: none
	Attempts   int     // tries of a cell
	Tiers      string  // "preserve", "memory" or "disk"
	DryRun     bool    // only say what would be moved
}

// UncordonRequest lets a unit take samples again.
type UncordonRequest struct{ Unit string }

// JobRequest asks for the status of a job: at once, or with Wait when it has ended; with Cancel it ends soon.
type JobRequest struct {
	Job    uint64
	Wait   bool
	Cancel bool
}

// JobTier counts the cells of a job in one tier.
type JobTier struct {
	CellsTotal, CellsMoved, BytesTotal, BytesMoved int64
	CellsFit, BytesFit                             int64 // of a dry run: what other units have room for
}

// JobBlocked says how many samples or bytes do not move at the moment, and why.
type JobBlocked struct {
	Reason string
	Count  int64
}

// JobCell is a cell that could not be moved. Keyed tells whether its sample has a key, which may be "".
type JobCell struct {
	Partition string
	Key       string
	Keyed     bool
	Index     int64
	Field     string
	Attempts  int
	Reason    string
}

// JobReply is the status of a job. Times are milliseconds; an ETA of -1 is not known.
type JobReply struct {
	Job       uint64
	Unit      string
	State     string
	Phase     string
	Memory    JobTier
	Disk      JobTier
	Dropped   int64
	Failed    int64
	Remain    int64
	Attempts  int64
	Blocked   []JobBlocked
	Cells     []JobCell
	ElapsedMS int64
	ETAMS     int64
	Err       string
}

// MoveRequest moves samples to a unit. It is answered when they are there.
type MoveRequest struct {
	Partition string
	Keys      Strings // nil: all samples of the partition
	To        string  // name of a unit
}

// RebalanceRequest moves samples from units that hold more than the others to those that hold less. With DryRun it only says
// what it would move.
type RebalanceRequest struct{ DryRun bool }

// Moved is what has moved from one unit to another, or of a dry run the bytes that would.
type Moved struct {
	From, To              string
	Samples, Cells, Bytes int64
}

// MoveReply answers both.
type MoveReply struct{ Moved []Moved }
