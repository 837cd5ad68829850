package wire

// LostRequest asks which cells were lost, of one partition or with nil of all.
type LostRequest struct {
	Partition *string
}

// LostReply lists them by field. Keys are those of the indexes; Known tells which have one.
type LostReply struct {
	Cells []LostCells
}

// LostCells are lost cells of one field.
type LostCells struct {
	Partition string
	Field     string
	Indexes   Ints
	Keys      Strings
	Known     []byte
}
