// Package wire defines the messages between clients and servers, and how they become bytes. It knows no sockets.
//
// A message is a frame: a fixed header, a msgpack body, and optionally a payload of raw cell bytes behind it. Bodies are
// msgpack arrays of the fields of a struct, in the order below; new fields are only appended, and a decoder accepts a
// longer array than it knows. Large lists do not go through msgpack element by element: Ints is a bin of little-endian
// int64, Strings and List are bins that hold one msgpack array.
package wire

import (
	"time"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Version is the protocol version. A peer with another major version is refused with VersionMismatch.
const Version = 2

// Op names a request.
type Op uint16

// Requests. Numbers are wire format: new ones are only appended.
const (
	OpPut Op = iota + 1
	OpCommit
	OpAbort
	OpGet
	OpRelease
	OpClear
	OpClearPartition
	OpList
	OpWait
	OpWatchOpen
	OpWatchNext
	OpWatchClose
	OpMeta
	OpRetrieveMeta
	OpRetrieveKeys
	OpSetTags
	OpConsumption
	OpResetConsumption
	OpProduction
	OpPartitions
	OpUnits
	OpConfig
	OpStatus
	OpSnapshot
	OpRegisterSampler
	OpSaveCheckpoint
	OpLoadCheckpoint
	OpDumpRows
	OpLoadRows
	OpMetrics
	OpJoinUnits
	OpCreatePartition
	OpStoreConfig
	OpStream
	OpProgress
	OpUnitOpen
	OpUnitStage
	OpUnitCommit
	OpUnitAbort
	OpUnitRead
	OpUnitRelease
	OpUnitDelete
	OpUnitTransform
	OpUnitStats
	OpUnitPrepare
	OpUnitInventory
	OpUnitDiscard
	OpLost
	OpUnitAdvise
	OpUnitPiece
	OpReachUnit
	OpUnitTicket
	OpUnitSettle
	OpDrain
	OpUncordon
	OpJob
	OpMove
	OpRebalance
)

// Request is what a client asks. Sequence names a request that changes or grants something (0: none; see Sequence): one that
// arrives again with the same sequence returns the first outcome. Ack is 0 but between a controller and a unit, see units.go.
type Request struct {
	Op       Op
	Sequence uint64
	Ack      uint64
	Timeout  time.Duration // 0: none
	Body     []byte
	Payload  []byte
}

// Reply answers a request. With another code than OK the body is an ErrorBody.
type Reply struct {
	Code    tqerr.Code
	Body    []byte
	Payload []byte
}

// Ints is a list of integers that crosses as a bin of little-endian int64.
type Ints []int64

// Strings is a list of strings that crosses as a bin holding a msgpack array of str. nil and empty are different.
type Strings []string

// List is a list of opaque msgpack values (tag dicts, mostly) that crosses as a bin holding a msgpack array. nil and empty are
// different.
type List [][]byte

// Column is a schema.Column on the wire.
type Column schema.Column

// ErrorBody is the body of a failed reply.
type ErrorBody struct {
	Op  string
	Msg string
}

// Samples names rows by index and generation.
type Samples struct {
	Indexes     Ints
	Generations Ints
}

// PutRequest writes rows. Exactly one of Keys, Samples and Insert names them. With columns whose bytes are not in the
// payload the reply grants memory, and OpCommit finishes the write.
type PutRequest struct {
	Partition string
	Keys      Strings  // rows by key; a key that does not exist is created, but for an update
	Samples   *Samples // rows by sample, which must exist
	Insert    int      // this many new samples without a key
	Columns   []Column
	Tags      List      // one msgpack map per row, merged onto the stored one; nil: none
	Update    bool      // stored = merge(stored, new); rows and fields must exist
	Merge     string    // native merge of an update: "concat", "add", "replace", "max", "min"; "": Callable
	Callable  []byte    // pickled merge function of an update, or data parser of a put
	Inline    bool      // the payload holds the bytes of all columns, one after another
	Last      bool      // production of the partition is complete with this write
	Shared    []Sharing // of columns whose equal rows are stored once: row i has the bytes of row Rows[i], the first that has them
	Dedup     Strings   // fields of a parsed put whose equal results are stored once
	Brief     bool      // the result leaves the tags out when they are stored as they were sent
}

// Sharing is a list of rows of a column, by its number.
type Sharing struct {
	Column int
	Rows   Ints
}

// PutReply grants memory (Txn != 0) or holds the result.
type PutReply struct {
	Txn    uint64
	Parts  []Part
	Result *PutResult
	Shared []PartRows // parts of which the blocks of some columns have other rows than the part
	Grants []UnitGrant
}

// Part is the share of a write that one unit stores.
type Part struct {
	Unit   uint32
	Rows   Ints // pairs [from, to) of rows of the batch; the unit's rows are these, in this order
	Blocks []Block
}

// PartRows is the rows of one column that one part stores, in pairs as in Part.
type PartRows struct {
	Part   int
	Column int
	Rows   Ints
}

// RowsOf is the rows of a column that lie in the block of a part, in pairs.
func (r *PutReply) RowsOf(part, column int) Ints {
	for i := range r.Shared {
		if at := &r.Shared[i]; at.Part == part && at.Column == column {
			return at.Rows
		}
	}
	return r.Parts[part].Rows
}

// Block is a byte range of a unit's segment.
type Block struct {
	Segment uint32
	Offset  int64
	Size    int64
}

// PutResult is what a finished write reports.
type PutResult struct {
	Indexes     Ints
	Generations Ints
	Fields      Strings  // sorted fields that all rows have
	Tags        List     // stored tags of each row
	Columns     []Column // of an update or a parsed put: the written columns as they are stored
	AsSent      bool     // the tags are those of the request, and left out
}

// TxnRequest is the body of OpCommit and OpAbort. Txn is the sequence of the OpPut that began the write. OpAbort calls off
// any request by its sequence: what that has granted is taken back, one that is running is cancelled, and one that has not
// arrived is refused when it does. Its reply is the outcome of the request: Cancelled says that nothing has happened.
type TxnRequest struct {
	Txn uint64
}

// GetRequest reads rows named by keys or by samples.
type GetRequest struct {
	Partition string
	Keys      Strings
	Samples   *Samples
	Fields    Strings // nil: the fields that all rows have
	Strict    bool    // a missing key or field is an error
	Views     bool    // one lease per column instead of one for all
	Inline    int64   // answer with the bytes in the payload when all columns together have at most this many
}

// GetReply says where the rows lie, or carries them.
type GetReply struct {
	Rows    int
	Columns []GetColumn
	Lease   uint64 // 0: the payload holds the bytes of all columns, one after another
	Grants  []UnitGrant
}

// UnitGrant says under which number a unit on another host than the controller's lends what a write has staged or a read has
// leased there. Of a read with Views every column has a number; they count up from this one.
type UnitGrant struct {
	Unit uint32
	ID   uint64
}

// GetColumn is one column of a get.
type GetColumn struct {
	Column Column
	Runs   []Run
	Lease  uint64 // with Views
}

// Run is a number of consecutive rows in one block of a unit.
type Run struct {
	Rows  int
	Unit  uint32
	Block Block
}

// ReleaseRequest ends leases; it has no reply.
type ReleaseRequest struct {
	Leases Ints
}

// ClearRequest removes rows (Fields nil) or fields of rows, named by keys or by samples.
type ClearRequest struct {
	Partition string
	Keys      Strings
	Samples   *Samples
	Fields    Strings
}

// PartitionRequest names a partition.
type PartitionRequest struct {
	Partition string
}

// ListRequest lists keys and tags. Filters narrow; nil or empty means no filter.
type ListRequest struct {
	Partition *string // nil: all
	Keys      Strings // nil: no filter
	Prefix    string
	Tags      []byte // msgpack map; a key matches when it has all these entries
	Fields    Strings
}

// ListReply has partitions in creation order, keys in registration order.
type ListReply struct {
	Partitions []ListedPartition
}

// ListedPartition is one partition of a ListReply.
type ListedPartition struct {
	Name string
	Keys Strings
	Tags List
}

// WaitRequest waits until all Keys (nil: at least Count keys) exist with all Fields and Tags.
type WaitRequest struct {
	Partition string
	Keys      Strings
	Fields    Strings
	Count     int
	Tags      []byte
}

// WaitReply has the keys that were waited for.
type WaitReply struct {
	Keys   Strings
	Tags   List
	Fields Strings // sorted fields that all of them have
}

// WatchReply opens a watch.
type WatchReply struct {
	Watch uint64
}

// WatchRequest is the body of OpWatchNext and OpWatchClose.
type WatchRequest struct {
	Watch uint64
}

// EventsReply has the changes since the last OpWatchNext, at least one.
type EventsReply struct {
	Events []Event
}

// Event is one change of a sample with a key.
type Event struct {
	Kind   string // "put", "update", "clear"
	Key    string
	Fields Strings
	Tags   []byte // msgpack map, nil for a clear
}

// MetaRequest is get_meta. Mode is "insert", "fetch" or "force_fetch".
type MetaRequest struct {
	Partition string
	Mode      string
	Fields    Strings
	BatchSize int
	Task      string
	Sampling  []byte // msgpack map of sampling_config, nil: none
}

// RetrieveMetaRequest looks keys up, optionally creating those that are missing.
type RetrieveMetaRequest struct {
	Partition string
	Keys      Strings
	Create    bool
}

// MetaReply describes rows.
type MetaReply struct {
	Indexes     Ints
	Generations Ints
	Columns     []Column // schema of the fields, in the order of the rows; DType NoDType and Form 0: registered, no schema
	Status      []byte   // production status per row, 0 or 1
	Tags        List
	End         bool // of a fetch: the stream has ended, there are no rows
}

// IndexesRequest names samples of a partition by index.
type IndexesRequest struct {
	Partition string
	Indexes   Ints
}

// KeysReply has one key per index; Known tells which indexes have one.
type KeysReply struct {
	Keys  Strings
	Known []byte
}

// SetTagsRequest replaces the tags of samples. Samples of an unknown partition or another generation are ignored.
type SetTagsRequest struct {
	Partition string
	Samples   Samples
	Tags      List
}

// TaskRequest asks for or resets consumption. An empty task of a reset means all tasks.
type TaskRequest struct {
	Partition string
	Task      string
}

// ProductionRequest asks which samples have which fields.
type ProductionRequest struct {
	Partition string
	Fields    Strings
}

// StatusReply is a consumption vector (Width 1) or a production table, row by row.
type StatusReply struct {
	Known   bool
	Indexes Ints
	Width   int
	Status  []byte
}

// ProgressReply counts the samples of a partition, and those of them that a task has consumed.
type ProgressReply struct {
	Known    bool
	Samples  int
	Consumed int
}

// NamesReply lists names.
type NamesReply struct {
	Names Strings
}

// UnitsReply lists the units.
type UnitsReply struct {
	Units []UnitInfo
}

// UnitInfo is one line of list_units.
type UnitInfo struct {
	ID          string
	State       string
	Host        string
	MemoryUsed  int64
	MemoryLimit int64
	DiskUsed    int64
	DiskLimit   int64
	Samples     int64
	SampleLimit int64
	Cells       int64
	Leases      int64
	Staged      int64

	DiskCells      int64
	DiskPhysical   int64
	SpilledBytes   int64
	PromotedBytes  int64
	CompactedBytes int64
	FallbackCells  int64

	DiskLogical    int64 // bytes of values, those that cells share counted for each
	MemoryCells    int64
	MemoryLogical  int64
	MemoryPhysical int64
	WrittenCells   int64 // went to disk when they were put
	WrittenBytes   int64
	SpilledCells   int64
	PromotedCells  int64

	LostCells int64  // that were lost with an earlier process of the unit, and neither written nor cleared since
	Number    uint32 // by which replies name the unit; one that has come back has a higher one
}

// ConfigReply has the configuration of the session as its owner stored it.
type ConfigReply struct {
	Config  []byte
	Session string // identity of the session
	PID     int    // of its owner
	Host    string
	// RestartMS is how long a client that has lost the session waits for it to be started again; 0: it will not be.
	RestartMS int64
}

// CreatedReply tells whether a partition was created or existed.
type CreatedReply struct {
	Created bool
}

// StoreConfigRequest replaces the configuration of the session.
type StoreConfigRequest struct {
	Config []byte
}

// StatusSummary is the body of OpStatus's reply.
type StatusSummary struct {
	Version    string
	PID        int
	Uptime     int64 // seconds
	Clients    int
	Partitions []PartitionSummary
	Units      []UnitInfo
}

// PartitionSummary counts one partition.
type PartitionSummary struct {
	Name     string
	Samples  int
	Keys     int
	Fields   Strings
	Tasks    Strings
	Consumed Ints // per task
}
