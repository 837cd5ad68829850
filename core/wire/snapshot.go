package wire

// SnapshotReply is everything about one partition at one moment; Known is false when there is none of that name.
type SnapshotReply struct {
	Known      bool
	Samples    Samples // active ones, by index
	Tags       List    // of each sample
	Reserved   Ints    // indexes that are not written yet
	Keys       Strings // in order of registration
	KeyIndexes Ints    // of each key
	Fields     []SnapshotField
	Tasks      []SnapshotTask
}

// SnapshotField is a field, in order of registration, with one row of Column per holder.
type SnapshotField struct {
	Holders Ints
	Column  Column
}

// SnapshotTask is a task, by name, with what it has consumed.
type SnapshotTask struct {
	Task     string
	Consumed Ints
}
