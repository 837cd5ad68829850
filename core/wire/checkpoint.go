package wire

// SaveRequest is one step of a save. Paths are absolute, and those of the process that owns the session.
//
//	"begin"   takes the cut of a checkpoint at Path and says where its two parts go
//	"state"   writes the controller's state to the file Path: of the cut that Path is a part of, else of this moment
//	"values"  writes all values to the folder Path, likewise
//	"commit"  puts the checkpoint of Save in its place, which needs both parts
//	"abort"   gives it up
type SaveRequest struct {
	Step     string
	Path     string
	Save     uint64 // number of the save, chosen by the client: of all steps but the parts
	Metadata string // JSON for metadata.json, of "begin"
}

// SaveReply answers the step "begin".
type SaveReply struct {
	State  string // paths for the other steps
	Values string
}

// LoadRequest is a load or a part of one.
//
//	"all"     replaces everything by the checkpoint at Path
//	"values"  checks the folder Path and remembers it for the client's next "state"
//	"state"   replaces everything by the state file Path and the values that were remembered
type LoadRequest struct {
	Step string
	Path string
}

// DumpRequest writes the samples of keys to a new folder.
type DumpRequest struct {
	Path      string
	Partition string
	Keys      Strings
}

// DumpReply counts what was dumped.
type DumpReply struct {
	Rows  int // that have a field
	Files int // of values
	Bytes int64
}

// LoadRowsRequest reads a dump: its index, or all of it into the session.
type LoadRowsRequest struct {
	Path  string
	Index bool
}

// LoadRowsReply has the rows of a dump in the order of the keys that were dumped.
type LoadRowsReply struct {
	Partition string
	Keys      Strings
	Tags      List
	Indexes   Ints
	Sets      []Strings // lists of fields
	SetOf     Ints      // per row, which of Sets it has
}
