package wire

import "encoding/hex"

// The requests between a controller and a storage unit in a process of its own. A unit executes those of its controller
// in the order in which they were sent, which their sequence counts from 1: a read that was sent behind a commit sees it.
// OpUnitTransform, OpUnitPrepare and reads of cells on disk go on beside others after they have begun. The controller chooses the numbers of transactions and
// leases, so it can end what it has not been told of; by these numbers clients name what they move over streams.

// JoinUnitsRequest makes units part of the session. A unit that has joined already is left as it is.
type JoinUnitsRequest struct {
	Units []UnitAddress
}

// UnitAddress says how a unit is reached.
type UnitAddress struct {
	Name   string
	Socket string
	Secret []byte
	Host   string

	Address string // tcp://HOST:PORT for controllers of other hosts, who show the Token of the secret; "": it serves its own host
	Machine string // where the socket is; see internal/machine
	Key     []byte // of CURVE, public; none: what crosses is not encrypted
}

// Token is the secret as connections between hosts show it.
func (a *UnitAddress) Token() []byte { return UnitToken(a.Secret) }

// UnitToken makes the token of a unit that listens for other hosts out of its secret.
func UnitToken(secret []byte) []byte { return hex.AppendEncode(nil, secret) }

// ReachUnitRequest asks a controller how to reach a unit that has granted something; with Ticket, for a payload stream too.
type ReachUnitRequest struct {
	Unit   uint32
	Ticket bool
}

// ReachUnitReply says where a unit is. A client of the same machine tries its socket first.
type ReachUnitReply struct {
	Name    string
	Machine string
	Socket  string
	Secret  []byte
	Streams string // HOST:PORT, with a ticket
	Ticket  []byte
	Pin     []byte // of the certificate of the streams; none when they are not encrypted
}

// UnitTicket lets its bearer open one payload stream to a unit.
type UnitTicket struct {
	Port   int // on the unit's host
	Ticket []byte
	Pin    []byte // of the certificate of the streams; none when they are not encrypted
}

// UnitOpenRequest is the first request of a controller. A unit that holds cells of another session drops them, or when it is
// durable refuses. Those of this session are kept by a durable unit, and with Keep by any. With Hold what is staged and leased
// stays when the connection breaks, until a controller of the session that keeps the cells has sent OpUnitSettle.
type UnitOpenRequest struct {
	Session uint64
	Keep    bool
	Resume  bool // the controller repeats requests after a lost connection; Request.Ack is one whose answer it has, 0: none
	Hold    bool // what is staged and leased stays when the controller is gone
}

// UnitSettleRequest ends what an earlier controller of the session has left staged, and with Leases what it has leased.
type UnitSettleRequest struct {
	Leases bool
}

// UnitOpened tells a controller whom it has reached.
type UnitOpened struct {
	Name        string
	Incarnation uint64 // differs from one start of the unit to the next
	PID         int
	SampleLimit int64 // 0: none
	Durable     bool  // the answer to a commit or a delete says that it will survive what the unit is to survive

	// Of what an earlier controller of the session has sent: the last numbered change that was executed, and the highest number of
	// a write or a lease.
	Changed uint64
	Highest uint64
}

// UnitStageRequest reserves memory for columns. With Filled the payload holds their bytes, one after another.
type UnitStageRequest struct {
	Txn       uint64
	Partition string
	Columns   []Column
	Filled    bool
	OnDisk    bool // all of it goes to disk
}

// UnitPrepareRequest writes to disk what goes there of a staged write. With Shed its bytes are not in memory any more.
type UnitPrepareRequest struct {
	Txn  uint64
	Shed bool
}

// UnitCommitRequest makes staged columns visible: row i is that of sample i. OpUnitAbort takes a TxnRequest.
type UnitCommitRequest struct {
	Txn     uint64
	Samples Samples
	Change  uint64 // number of the change in the controller's journal, 0: it has none
}

// UnitReadRequest leases cells under the number Lease, or one number per field from Lease on when Apart. When all columns
// together have at most Inline bytes, the reply carries them, and there is no lease unless Keep.
type UnitReadRequest struct {
	Lease     uint64
	Partition string
	Fields    Strings
	Samples   Samples
	Apart     bool
	Inline    int64
	Keep      bool
	Later     bool // what lies on disk is not loaded; OpUnitPiece reads it
}

// UnitPieceRequest asks for bytes of a column of a lease, whose rows may lie on disk: see store.Streamer.
type UnitPieceRequest struct {
	Lease  uint64
	Column int
	Offset int64
	Size   int64
	Sum    uint32
}

// UnitDeleteRequest removes cells; Fields nil means all fields.
type UnitDeleteRequest struct {
	Partition string
	Fields    Strings
	Samples   Samples
	Change    uint64 // as in a commit
}

// UnitTransformRequest computes an update, or parses a put, and stages the result as Txn. The operands are the payload, or
// staged as Operand. OpUnitAbort of Txn cancels it while it runs.
type UnitTransformRequest struct {
	Txn       uint64
	Partition string
	Samples   Samples // of an update
	Keys      Strings
	Rows      int
	Columns   []Column
	Operand   uint64 // 0: the payload
	Update    bool
	Merge     string
	Callable  []byte
	WaitMS    int64   // how long the result may wait for memory
	Dedup     Strings // as in a PutRequest
}

// UnitStatsRequest asks for what the unit holds; with Wait, for the moment when that is less memory or disk than the given.
type UnitStatsRequest struct {
	Wait   bool
	Memory int64
	Disk   int64
}

// UnitDiscardRequest drops all cells of a session that has ended for good.
type UnitDiscardRequest struct {
	Session uint64
}

// UnitInventoryRequest asks for cells that the unit holds: from the given place of its list on, as many as fit a message. The list
// is made when From is 0.
type UnitInventoryRequest struct {
	From int
}

// UnitStock is cells of one field that a unit holds.
type UnitStock struct {
	Partition string
	Column    Column
	Samples   Samples
}

// UnitAdviseRequest lies at a unit until that has to move cells and asks what their samples are needed for. It brings the answer
// to the question before: one store.Use per sample.
type UnitAdviseRequest struct {
	Question uint64 // 0: none
	Uses     []byte
}

// UnitQuestion asks what samples are needed for.
type UnitQuestion struct {
	Number    uint64
	Partition string
	Samples   Samples
}

// UnitReply answers every request of a controller that did not fail. Stats are those after the request.
type UnitReply struct {
	Stats   UnitStats
	Blocks  []Block      // of a stage: one per column
	Columns []UnitColumn // of a read or a transformation
	Filled  bool         // of a read: the payload holds the bytes of all columns
	Missing *MissingCell // of a read that found a cell missing, and leased nothing
	Opened  *UnitOpened
	Writes  bool         // of a stage: OpUnitPrepare, which takes a TxnRequest, has to come before the commit
	Damaged *DamagedCell // of a read or a transformation that has failed for it
	Stock   []UnitStock  // of an inventory
	More    int          // of an inventory: where the rest begins, 0: that was all

	Question *UnitQuestion // of an OpUnitAdvise
	Sum      uint32        // of an OpUnitPiece
	Ticket   *UnitTicket
}

// UnitStats counts what a unit holds. A higher Count was taken later.
type UnitStats struct {
	Count       uint64
	MemoryUsed  int64
	MemoryLimit int64
	DiskUsed    int64
	DiskLimit   int64
	Cells       int64
	Staged      int64
	Leases      int64
	Staging     int64
	Scratch     int64
	Disk        UnitDisk
}

// UnitDisk is what a unit counts about its tiers.
type UnitDisk struct {
	Cells, Physical, Spilled, Promoted, Compacted, Fallback int64

	Logical, MemoryCells, MemoryLogical, MemoryPhysical, WrittenCells, Written, SpilledCells, PromotedCells int64
}

// UnitColumn is one column of a read or of a result.
type UnitColumn struct {
	Column Column
	Runs   []UnitRun
}

// UnitRun is a number of consecutive rows in one block.
type UnitRun struct {
	Rows   int
	Block  Block
	OnDisk bool
}

// DamagedCell says which cell's bytes on disk cannot be read.
type DamagedCell struct {
	Field      string
	Index      int64
	Generation int64
	Cause      string
}

// MissingCell says which cell a read did not find.
type MissingCell struct {
	Field      string
	Index      int64
	Generation int64
	Stale      bool
}
