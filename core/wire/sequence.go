package wire

// A sequence names a request that may come again: high bits are a lane, low bits count the requests of that lane. A client
// uses a lane for one request at a time, so a request says that nobody will ask for the outcome of an earlier one of its
// lane any more. What a server remembers is then bounded by what a client has in flight at a time; with one row of numbers
// and the lowest that is still open, one request that waits for long would keep all later outcomes alive.
const sequenceBits = 40

// Sequence makes the number of a lane's request. Counts start at 1, because a request without a sequence has number 0.
func Sequence(lane, count uint64) uint64 { return lane<<sequenceBits | count }

// SplitSequence returns lane and count.
func SplitSequence(sequence uint64) (lane, count uint64) {
	return sequence >> sequenceBits, sequence & (1<<sequenceBits - 1)
}
