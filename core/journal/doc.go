// Package journal keeps what a state machine was told: records are appended one after another, and from time to time the
// state as of one of them is written whole, so that what lies before it can be removed. It knows nothing of what records mean.
//
// # Files
//
//	lock             held while a process uses the folder
//	log-NNNNNNNN     records, appended
//	state-NNNNNNNN   the state as of the beginning of the log of the same number; there is none for the first log
//	*.new            a file that is being written; removed when found
//	ended            nobody wants the journal any more: what is left of it is removed when found
//
// Anything else makes Open refuse the folder. Every file appears under its name when it has a header; integers are little
// endian, CRCs are CRC32C:
//
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| magic "TQ\xf5JRNL\n"                                                  |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| kind   : 2 bytes| version: 2 bytes| number of the file: 4 bytes       |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| identity of the journal: 16 bytes                                     |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| of a state: sequence of the first frame behind it: 8 bytes            |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| zero: 20 bytes                              | CRC of the 60 bytes     |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//
// Behind it follow frames without gaps. A frame is a batch of records: all of it counts or nothing.
//
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| magic "TQj\x01"                   | bytes of the body: 4              |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| sequence of the frame, one more than that of the frame before: 8      |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| sequence of a frame that was durable when this one was made: 8        |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| CRC of identity, the 24 bytes, body | body ...                        |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//
// The body of a frame of a log is a sequence of records, each an unsigned varint with its length and its bytes. A state is made
// of such frames too, counted from 1, and ends with one that has no record. Space behind the frames of a log is zeros that were
// taken in advance.
//
// # Durability
//
// Relaxed: what Append has returned for survives the end of the process. Strict: what Sync has returned for survives a power
// loss. A log may end in bytes that are no frame, which nobody was told of; Recover drops them, and leaves a gap in the sequences
// for what is lost. It does not do so when a later frame says that what is missing was durable, or when all of a frame was written
// and it is not what it should be, see vfs.MayBeTorn: then the journal is damaged, and is refused.
//
// # States
//
// A log is whole or broken: after an fsync that has failed nothing is appended to it, until a new log and a state with
// all that is in it have replaced it.
//
// Locks: Log.syncing is held over an fsync and comes before Log.mu, which is held over a write and is a leaf.
package journal
