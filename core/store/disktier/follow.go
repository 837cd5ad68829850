package disktier

// Journal is where the owner of a tier writes down what it does before it does it.
type Journal interface {
	// Last is the number of the last change that is written down.
	Last() uint64
	// Durable reports whether a change survives a power loss, and Sync returns when it does.
	Durable(change uint64) bool
	Sync(change uint64) error
}

// Follow keeps frames from becoming durable before the changes that were written down before them: else a power loss could
// leave a change in one of several tiers and nowhere else. Only Strict has a need for that. It holds for as long as the journal
// works; one that is broken is replaced by a state, which is not written before the tier is durable.
func (t *Tier) Follow(j Journal) {
	if t.opts.Durability != Strict {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.journal = j
}

// aheadLocked reports whether there are frames that the journal does not cover yet, up to which change.
func (t *Tier) aheadLocked() (change uint64, ahead bool) {
	j, change := t.mu.journal, t.mu.change
	return change, j != nil && !j.Durable(change)
}

// lockCovered takes mu when the journal covers all frames.
func (t *Tier) lockCovered() {
	for {
		t.mu.Lock()
		change, ahead := t.aheadLocked()
		if !ahead {
			return
		}
		j := t.mu.journal
		t.mu.Unlock()
		if j.Sync(change) != nil {
			t.mu.Lock()
			return
		}
	}
}
