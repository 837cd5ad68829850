// Package snapshot is the format of checkpoints and dumps: files that are streams of checked records, and the folder that
// holds them, which appears and is replaced as a whole. Nothing in it is code or a pickle; Python objects are opaque bytes.
//
// # A file
//
//	+----------------+---------+--------+---------+
//	| magic          | version | kind   | crc32c  |   version 1; kind: 1 state, 2 index, 3 values, 4 rows
//	| 8 bytes        | u16     | u16    | u32     |   crc32c of the 12 bytes before it
//	+----------------+---------+--------+---------+
//	| record 0 | record 1 | ... | end record       |   nothing follows the end record
//	+----------+----------+-----+------------------+
//
// All numbers are little-endian.
//
// # A record
//
//	+------+---------+------+--------+--------+--------+------------------+
//	| type | packing | 0    | stored | raw    | crc32c | stored bytes     |
//	| u8   | u8      | u16  | u32    | u32    | u32    |                  |
//	+------+---------+------+--------+--------+--------+------------------+
//
// The checksum covers the number of the record in the file (u64), the 12 bytes before the checksum, and the stored bytes;
// so a record that is changed, missing, repeated or moved is found. Packing is 0 for bytes as they are, 1 for zstd. The end
// record (type 255) has the number of records before it and the raw bytes in them, so a file that was cut off anywhere is
// found too. The digest of a file is the crc32c of its header and of all record heads; together with the size it pins the
// file.
//
// The body of a record is a msgpack array as package wire writes it, but for a data record (type 1), which is a piece of a
// byte stream: behind a rows record come data records with the bytes of all its columns, one column after another, cut
// anywhere; rows that several samples share (Column.Share) come once, in the order of the first sample of each. A piece is packed when a sample of it shrinks to half and packing is not much slower than the disk.
//
// # A folder
//
//	metadata.json          a checkpoint: for the user; its presence says that it is complete
//	controller_state.tq    state: partitions, keys, tags, fields, consumption, sampler
//	row_index.tq           a dump instead: the keys and tags of the rows that were chosen
//	storage/index.tq       index: names, sizes and digests of the value files
//	storage/values-0.tq    values of some of the samples; another one per unit
//
// State and index carry the number of the cut that they are from (16 random bytes); those of one checkpoint are equal.
//
// A folder is written under a name of its own beside its place (.name.tq-save-…), synced, and then takes its place at once.
// The one that writes holds the lock of that folder, so that what a dead process has left behind is known as such and
// removed. Where two names cannot be exchanged at once, the old folder is called .name.tq-old for a moment; when a process
// dies in that moment, whoever comes next gives it its name back.
package snapshot
