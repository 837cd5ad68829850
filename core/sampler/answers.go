package sampler

import (
	"cmp"
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// answers is what a sampler remembers. The zero value is not usable; see newAnswers.
type answers struct {
	name string // of the sampler
	// together says that the answers to the ranks of a batch are decided at once, and so forgotten at once.
	together   bool
	partitions map[string]map[string]*taskAnswers
	recording  bool
	changes    []savedAnswer // since the last Recorded
}

// taskAnswers are the answers to one task of one partition.
type taskAnswers struct {
	batches  map[string]*batch
	promised bitset.Set // in answers that nobody has asked for
}

// batch is the answers to the ranks for one batch number.
type batch struct{ ranks map[int64]*answer }

// answer is what one rank gets. Its samples are distinct.
type answer struct {
	indexes   []int64
	low, high int64 // all indexes lie in [low, high]
	asked     bool
	end       bool
}

func newAnswers(name string) *answers {
	return &answers{name: name, together: name == balancedName, partitions: map[string]map[string]*taskAnswers{}}
}

// Name is the name of the class.
func (a *answers) Name() string { return a.name }

func (a *answers) task(r Request) *taskAnswers { return a.partitions[r.Partition][r.Task] }

// find returns the remembered answer to a rank, nil for none.
func (a *answers) find(r Request, batch string, rank int64) *answer {
	if t := a.task(r); t != nil {
		if b := t.batches[batch]; b != nil {
			return b.ranks[rank]
		}
	}
	return nil
}

// has reports whether there is an answer for a batch, whichever rank it is to.
func (a *answers) has(r Request, batch string) bool {
	t := a.task(r)
	return t != nil && t.batches[batch] != nil
}

// free is what nobody was promised.
func (a *answers) free(ready Ready, r Request) Ready {
	if t := a.task(r); t != nil && t.promised.Count() > 0 {
		return ready.Without(&t.promised)
	}
	return ready
}

// keep remembers an answer, whose samples are promised until it is taken.
func (a *answers) keep(r Request, batchNumber string, rank int64, indexes []int64, end bool) {
	tasks := a.partitions[r.Partition]
	if tasks == nil {
		tasks = map[string]*taskAnswers{}
		a.partitions[r.Partition] = tasks
	}
	t := tasks[r.Task]
	if t == nil {
		t = &taskAnswers{batches: map[string]*batch{}}
		tasks[r.Task] = t
	}
	b := t.batches[batchNumber]
	if b == nil {
		b = &batch{ranks: map[int64]*answer{}}
		t.batches[batchNumber] = b
	}
	b.ranks[rank] = newAnswer(indexes, end)
	t.promised.AddAll(bitset.NewMask(indexes))
	if a.recording {
		a.changes = append(a.changes, savedAnswer{
			Partition: r.Partition, Task: r.Task, Batch: []byte(batchNumber), Rank: rank, Indexes: indexes, End: end, Promised: true,
		})
	}
}

func newAnswer(indexes []int64, end bool) *answer {
	out := &answer{indexes: indexes, end: end}
	if len(indexes) > 0 {
		out.low, out.high = slices.Min(indexes), slices.Max(indexes)
	}
	return out
}

// take returns the remembered answer to a rank as a pick; nothing when there is none.
func (a *answers) take(r Request, batch string, rank int64) Pick {
	found := a.find(r, batch, rank)
	if found == nil {
		return Pick{}
	}
	if !found.asked {
		found.asked = true
		a.task(r).promised.RemoveAll(bitset.NewMask(found.indexes))
		if a.recording {
			a.changes = append(a.changes, savedAnswer{Partition: r.Partition, Task: r.Task, Batch: []byte(batch), Rank: rank, Asked: true})
		}
	}
	return Pick{Sampled: found.indexes, Consumed: found.indexes, End: found.end}
}

// Cleared takes samples out of all answers. Answers that have lost all their samples are forgotten, and with the last of them
// the ends of the stream.
func (a *answers) Cleared(partition string, indexes []int64) {
	tasks := a.partitions[partition]
	if len(tasks) == 0 || len(indexes) == 0 {
		return
	}
	var gone bitset.Set
	mask := bitset.NewMask(indexes)
	gone.AddAll(mask)
	low, high := slices.Min(indexes), slices.Max(indexes)
	for name, t := range tasks {
		t.promised.RemoveAll(mask)
		lost := false
		for number, b := range t.batches {
			lost = b.lose(&gone, low, high, !a.together) || lost
			if b.empty() {
				delete(t.batches, number)
			}
		}
		if lost && !t.holds() {
			delete(tasks, name)
		}
	}
}

// lose takes samples out of the answers of a batch and reports whether there were any; drop forgets an answer that has none
// left.
func (b *batch) lose(gone *bitset.Set, low, high int64, drop bool) (lost bool) {
	for rank, found := range b.ranks {
		if len(found.indexes) == 0 || found.high < low || found.low > high {
			continue
		}
		left := make([]int64, 0, len(found.indexes)) // what was handed out stays as it is
		for _, i := range found.indexes {
			if !gone.Has(i) {
				left = append(left, i)
			}
		}
		switch {
		case len(left) == len(found.indexes):
		case drop && len(left) == 0:
			lost = true
			delete(b.ranks, rank)
		default:
			lost = true
			kept := newAnswer(left, found.end)
			kept.asked = found.asked
			b.ranks[rank] = kept
		}
	}
	return lost
}

// empty reports that no rank has anything left, not even an end.
func (b *batch) empty() bool {
	for _, found := range b.ranks {
		if len(found.indexes) > 0 || found.end {
			return false
		}
	}
	return true
}

// holds reports whether any answer has samples.
func (t *taskAnswers) holds() bool {
	for _, b := range t.batches {
		for _, found := range b.ranks {
			if len(found.indexes) > 0 {
				return true
			}
		}
	}
	return false
}

// Reset ends the promises to a task, or to all tasks.
func (a *answers) Reset(partition, task string) {
	for name, t := range a.partitions[partition] {
		if task == "" || task == name {
			t.promised.Reset()
		}
	}
}

// ClearPartition forgets the answers of a partition.
func (a *answers) ClearPartition(partition string) { delete(a.partitions, partition) }

// savedAnswers is the saved form, a message of package wire.
type savedAnswers struct {
	Sampler string
	Answers []savedAnswer
}

type savedAnswer struct {
	Partition string
	Task      string
	Batch     []byte
	Rank      int64
	Indexes   wire.Ints
	Asked     bool
	End       bool
	Promised  bool
}

// Save returns the answers as a wire message, in an order of their own.
func (a *answers) Save() ([]byte, error) {
	out := savedAnswers{Sampler: a.name}
	for partition, tasks := range a.partitions {
		for task, t := range tasks {
			for number, b := range t.batches {
				for rank, found := range b.ranks {
					out.Answers = append(out.Answers, savedAnswer{
						Partition: partition, Task: task, Batch: []byte(number), Rank: rank, Indexes: found.indexes,
						Asked: found.asked, End: found.end,
						Promised: len(found.indexes) > 0 && t.promised.Has(found.indexes[0]),
					})
				}
			}
		}
	}
	slices.SortFunc(out.Answers, func(x, y savedAnswer) int {
		return cmp.Or(cmp.Compare(x.Partition, y.Partition), cmp.Compare(x.Task, y.Task), slices.Compare(x.Batch, y.Batch), cmp.Compare(x.Rank, y.Rank))
	})
	return wire.Marshal(&out)
}

// Record implements Recorder.
func (a *answers) Record() { a.recording = true }

// Changes implements Recorder.
func (a *answers) Changes() ([]byte, error) {
	if len(a.changes) == 0 {
		return nil, nil
	}
	return wire.Marshal(&savedAnswers{Sampler: a.name, Answers: a.changes})
}

// Recorded implements Recorder.
func (a *answers) Recorded() { a.changes = nil }

// Redo implements Recorder.
func (a *answers) Redo(changes []byte) error {
	var saved savedAnswers
	if err := wire.Unmarshal(changes, &saved); err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "what the sampler %s has answered", a.name)
	}
	for i := range saved.Answers {
		s := &saved.Answers[i]
		r := Request{Partition: s.Partition, Task: s.Task}
		switch {
		case s.Promised:
			a.keep(r, string(s.Batch), s.Rank, s.Indexes, s.End)
		case a.find(r, string(s.Batch), s.Rank) == nil:
			return tqerr.New(tqerr.Corruption, "the sampler %s has no answer that it has given", a.name)
		default:
			a.take(r, string(s.Batch), s.Rank)
		}
	}
	a.changes = nil
	return nil
}

// Load replaces the answers. InvalidArgument for a state of another sampler and for one that contradicts itself.
func (a *answers) Load(state []byte) error {
	var saved savedAnswers
	if err := wire.Unmarshal(state, &saved); err != nil {
		return tqerr.Wrap(tqerr.InvalidArgument, err, "state of the sampler %s", a.name)
	}
	if saved.Sampler != a.name {
		return tqerr.New(tqerr.InvalidArgument, "state of a sampler %q, want %q", saved.Sampler, a.name)
	}
	fresh := newAnswers(a.name)
	for i := range saved.Answers {
		s := &saved.Answers[i]
		if sorted := slices.Sorted(slices.Values(s.Indexes)); len(sorted) > 0 && (sorted[0] < 0 || len(slices.Compact(sorted)) < len(s.Indexes)) {
			return tqerr.New(tqerr.InvalidArgument, "state of the sampler %s: partition %q has an answer with repeated or negative indexes", a.name, s.Partition)
		}
		r := Request{Partition: s.Partition, Task: s.Task}
		fresh.keep(r, string(s.Batch), s.Rank, s.Indexes, s.End)
		if !s.Promised {
			fresh.task(r).promised.RemoveAll(bitset.NewMask(s.Indexes))
		}
		fresh.find(r, string(s.Batch), s.Rank).asked = s.Asked
	}
	a.partitions = fresh.partitions
	return nil
}
