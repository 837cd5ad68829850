// Package disktier keeps values of a unit in files of one folder. Tier is the disk of a table (package table), which says
// what lies there; Store is such a table by itself.
//
// # Files
//
//	lock           held while a process uses the folder
//	reserve        space for compaction on a full disk, no content
//	values-NNNNNNNN   a segment: values, appended, never changed
//	index-NNNNNNNN    what the values are: frames, appended; the highest number counts. Not with durability None
//	*.new          an index that is being written; removed when found
//
// Anything else makes Open refuse the folder. Every values and index file begins with the same header; integers are little
// endian, CRCs are CRC32C:
//
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| magic "TQ\xf5DISK\n"                                                  |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| kind   : 2 bytes| version: 2 bytes| number of the file: 4 bytes       |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| identity of the store: 16 bytes                                       |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| zero: 28 bytes                              | CRC of the 60 bytes     |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//
// In a values file values follow from byte 4096 on, bare. Blocks of 64 KiB and more start on a page, others on 8 bytes; the
// rows of a block lie tightly. In an index file frames follow from byte 64 on, without gaps:
//
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| magic "TQf\x01"                   | bytes of the body: 4              |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| number of the frame, one more than that of the frame before: 8        |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| number of a frame that was durable when this one was made: 8          |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//	| CRC of the 24 bytes before and of the body   | body ...               |
//	+--------+--------+--------+--------+--------+--------+--------+--------+
//
// The first frame of an index holds the whole state as of its number. A frame is a batch: all of it counts or nothing. Its
// body is a sequence of entries (v: unsigned varint, z: zigzag varint):
//
//	bind: 1 | partition: v bytes | field: v bytes | rows: v | rows × (index, less the one before and 1: z | generation: v)
//	        | segment: v | offset: v | kind | dtype | ragged | form | shape: v × v | vary | rows × length: v    (Varying)
//	        | rows × (rank: v | rank × v)  (Free) | rows × (codec: 1 | size: v)  (Objects) | rows × CRC of the value: 4
//	drop: 2 | partition | field | rows | rows × sample    cells of the disk tier that have ended
//	owner: 3 | owner: v bytes                             whose values they are, see Tier.SetOwner
//	change: 4 | number: v                                 the last change of the owner that is executed, see Tier.Mark
//	hold: 5 | number: v | bind    rows that are staged, of the write's rows instead of samples, see store.Holder
//	release: 6 | number: v        all that is held under the number is bound by now, or never will be
//
// # Durability
//
// None: the folder is emptied at Open, nothing but values is written. Relaxed: a write that has been committed and a delete
// that has returned survive a killed process. Strict: what Sync has returned for survives a power loss. A frame is written
// after the values that it names; space is given back after the frame that drops what was there. A tier that follows a journal
// (Tier.Follow) makes no frame durable before the journal is, as far as it was written when the frame was noted.
//
// # Space
//
// A segment counts the live bytes of each of its pages. Runs of at least 16 pages without any are punched at once; a segment
// without live bytes is removed, or emptied when it is the one that is appended to. Compact copies what lives in segments
// where much is dead but not punched.
//
// The segment that is appended to takes its space before the values are written, from 8 MiB on with an eighth of what is there
// ahead, at most 8 MiB: finding space block by block during a write takes as long as the copy. What is ahead is given back when
// the segment is full or empty, at Close, and at the next Open after a crash. A full disk gives none, and no value is refused
// for that.
//
// # States
//
// A segment is open (appended to), full, or sealed (its fsync failed: nothing is written to it any more). The index is whole
// or broken (a write or fsync failed); a broken one is replaced by a new one that holds the state of the table, and until that
// succeeds Prepare and Sync fail.
//
// Locks: Tier.places (allocation, page counts) and Tier.files (writing of the index) are held over file calls and never
// under the table's lock, except that files is taken before it to write a new index. Tier.mu is taken under the table's lock, and
// nothing under it but that of the journal. files is held while the journal is made durable.
package disktier
