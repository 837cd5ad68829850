package schema

// Stock is cells of one field that a unit has: row i of the column is that of sample i. It says what the cells are, not where
// their bytes lie.
type Stock struct {
	Partition string
	Column    Column // with its field
	Samples   []Sample
}
