package controller

import (
	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// The kinds of records of the journal, the first byte of each. Numbers are format: new ones are only appended. What a request
// changes is one frame; the state is a sequence of such records too.
const (
	recordSession   = iota + 1 // who it is
	recordSampler              // which sampler picks, from here on
	recordMemory               // everything that the sampler remembers
	recordUnit                 // a unit has joined
	recordConfig               // the configuration was replaced
	recordPut                  // rows were written
	recordTags                 // tags were replaced
	recordClear                // samples disappear, or cells
	recordFinish               // units have deleted what was cleared
	recordFetch                // samples were handed out
	recordReset                // consumption was forgotten
	recordPartition            // a partition was made
	recordOutcome              // the answer to a request that may come again
	recordState                // a piece of the catalog's state
	recordPlaces               // where the samples of that state live
	recordClearing             // and what was being cleared then
	recordStock                // a unit has told what it holds
	recordGiveBack             // samples that were handed out have reached nobody
	recordMove                 // samples live on another unit
	recordDuty                 // a unit takes samples, or does not
	recordDrain                // a drain has begun, or has ended
	recordMoving               // so many moves that are no drains are under way
	recordSwap                 // a number for what units do when a checkpoint takes the place of everything; by itself it changes nothing
)

// origin names the request that a record carries out, so that its outcome is known when it comes again. Both are 0 for what
// nobody may ask again.
type origin struct{ Client, Sequence uint64 }

type sessionRecord struct {
	Session string
	Secret  []byte // with which clients of the host join
}

type samplerRecord struct {
	Name         string
	Group, Ranks int
	Pickled      []byte
}

func (r *samplerRecord) spec() sampler.Spec {
	return sampler.Spec{Name: r.Name, Group: r.Group, Ranks: r.Ranks, Pickled: r.Pickled}
}

type memoryRecord struct {
	Name  string
	State []byte
}

// unitRecord is a unit: one of the controller's process, or one that is reached by its socket or its address.
type unitRecord struct {
	ID          uint32
	Name        string
	Host        string
	SampleLimit int64
	Inside      bool
	Machine     string
	Socket      string
	Secret      []byte
	Address     string // for controllers of other hosts
	Key         []byte
	Incarnation uint64
	Replaces    int64 // number of the unit whose place it takes, -1: none
	Missed      bool  // it was not found by a life of the controller, and has not joined again
	Owed        []owedRecord
}

// stockRecord is what a unit has told that it holds.
type stockRecord struct {
	Unit  uint32
	Stock []wire.UnitStock
}

func newStockRecord(unit uint32, stock []schema.Stock) *stockRecord {
	r := &stockRecord{Unit: unit}
	for i := range stock {
		r.Stock = append(r.Stock, wire.UnitStock{
			Partition: stock[i].Partition, Column: wire.Column(stock[i].Column), Samples: *wireSamples(stock[i].Samples),
		})
	}
	return r
}

type configRecord struct{ Config []byte }

// putRecord is a write that was valid, with the units on which its rows are staged, as pairs of a number of rows and a unit.
type putRecord struct {
	Origin    origin
	Partition string
	Keys      wire.Strings
	Samples   *wire.Samples
	Insert    int
	Columns   []wire.Column
	Tags      wire.List
	Update    bool
	Last      bool
	Units     wire.Ints
	Reply     uint8        // what it is answered with, see replyOf
	Fields    wire.Strings // of the answer to an insert
	Staged    []stagedRecord
	Disks     wire.Ints // the unit of the controller's process to whose disk all of it goes that outlives the process
}

// stagedRecord is a part of a write that a unit keeps under a number after the death of the controller: what a unit in another
// process has staged, or one of the controller's process holds. Rows are pairs [from, to).
type stagedRecord struct {
	Unit uint32
	Txn  uint64
	Rows wire.Ints
}

// What a write is answered with.
const (
	replyNothing = iota
	replyResult
	replyColumns // the result with the columns as they are stored
	replyInserted
)

type tagsRecord struct {
	Origin    origin
	Partition string
	Samples   wire.Samples
	Tags      wire.List
}

// clearRecord is a clear of keys, or of samples, or of a whole partition; with fields only of these.
type clearRecord struct {
	Origin    origin
	Partition string
	Whole     bool
	Keys      wire.Strings
	Samples   *wire.Samples
	Fields    wire.Strings
}

type finishRecord struct {
	Partition string
	Samples   wire.Samples
	Whole     bool
}

// fetchRecord is what a sampler has picked, and what it has begun to remember by that.
type fetchRecord struct {
	Origin    origin
	Partition string
	Fields    wire.Strings
	N         int
	Task      string
	Sampled   wire.Ints
	Consumed  wire.Ints
	End       bool
	Sampler   string
	Changes   []byte // of the memory of a sampler
	Memory    []byte // all of it, of one that Python runs
}

// giveBackRecord is a part of what a fetch has taken, whose outcome is that it was called off.
type giveBackRecord struct {
	Origin    origin
	Partition string
	Task      string
	Samples   wire.Samples
}

type resetRecord struct {
	Origin    origin
	Partition string
	Task      string
}

type partitionRecord struct{ Partition string }

type outcomeRecord struct {
	Origin origin
	Code   uint32
	Body   []byte
}

type stateRecord struct{ Piece []byte }

type placesRecord struct {
	Epoch uint64
	Units []placesUnit
	Slots []placesPartition
}

type placesUnit struct {
	ID    uint32
	Host  string
	Slots wire.Ints
	Turn  int
	Limit int64
	Duty  uint8
}

// moveRecord is samples that have moved to a unit which has committed their cells.
type moveRecord struct {
	Partition string
	Samples   wire.Samples
	From, To  uint32
}

type dutyRecord struct {
	Origin origin
	Unit   uint32
	Duty   uint8
}

type movingRecord struct{ Moves int }

// drainRecord is a drain: what was asked for, and what has become of it.
type drainRecord struct {
	Origin  origin
	Request wire.DrainRequest
	Status  wire.JobReply
	SpentMS int64 // of its deadline
}

type placesPartition struct {
	Slots   wire.Ints
	Leaving bool
}

type clearingRecord struct {
	Partition string
	Samples   wire.Samples
	Slots     wire.Ints
	Keys      wire.Strings
	Keyed     []byte
}

// encodeRecord makes the bytes of a record.
func encodeRecord(kind byte, message any) ([]byte, error) {
	body, err := wire.Marshal(message)
	if err != nil {
		return nil, err
	}
	return append(append(make([]byte, 0, len(body)+1), kind), body...), nil
}

// decodeRecord reads the message of a record.
func decodeRecord(record []byte, message any) error {
	if err := wire.Unmarshal(record[1:], message); err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "a record of kind %d", record[0])
	}
	return nil
}

// newPutRecord describes a write that is about to be applied.
func newPutRecord(o origin, w *catalog.Write, units []uint32, reply uint8) *putRecord {
	r := &putRecord{
		Origin: o, Partition: w.Partition, Keys: w.Keys, Insert: w.Insert, Tags: w.Tags, Update: w.Update, Last: w.Last, Reply: reply,
	}
	if w.Samples != nil {
		r.Samples = wireSamples(w.Samples)
	}
	r.Columns = make([]wire.Column, len(w.Columns))
	for i := range w.Columns {
		r.Columns[i] = wire.Column(w.Columns[i])
	}
	for from := 0; from < len(units); {
		to := from
		for to < len(units) && units[to] == units[from] {
			to++
		}
		r.Units = append(r.Units, int64(to-from), int64(units[from]))
		from = to
	}
	return r
}

// write returns the write and the unit of each of its rows.
func (r *putRecord) write() (*catalog.Write, []uint32, error) {
	w := &catalog.Write{
		Partition: r.Partition, Keys: r.Keys, Insert: r.Insert, Tags: r.Tags, Update: r.Update, Last: r.Last, Unwatched: true,
	}
	rows := max(len(r.Keys), r.Insert)
	if r.Samples != nil {
		w.Samples = samplesOf(r.Samples)
		rows = len(w.Samples)
	}
	for i := range r.Columns {
		w.Columns = append(w.Columns, schema.Column(r.Columns[i]))
	}
	units := make([]uint32, 0, rows)
	for k := 0; k+1 < len(r.Units); k += 2 {
		if r.Units[k] < 1 || r.Units[k] > int64(rows-len(units)) {
			return nil, nil, tqerr.New(tqerr.Corruption, "a write of %d rows has units for more", rows)
		}
		for range r.Units[k] {
			units = append(units, uint32(r.Units[k+1]))
		}
	}
	return w, units, nil
}

func wireSamples(samples []schema.Sample) *wire.Samples {
	indexes, generations := indexLists(samples)
	return &wire.Samples{Indexes: indexes, Generations: generations}
}
