package unit

import (
	"transferqueue/core/schema"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
)

// Durable reports whether what the unit has on disk outlives its process.
func (u *Unit) Durable() bool { return u.tiers != nil && u.tiers.Durable() }

// Secure returns when all that has happened is as durable as the unit promises; at once without durability.
func (u *Unit) Secure() error {
	if !u.Durable() {
		return nil
	}
	return u.tiers.Secure()
}

// Changed is the number of the last change of the owner that the unit has executed, as far as it touched the disk; 0: none.
func (u *Unit) Changed() uint64 {
	if !u.Durable() {
		return 0
	}
	return u.tiers.Tier().Marked()
}

// Follow lets what is done on disk become durable only after the journal of the controller knows of it for good.
func (u *Unit) Follow(j disktier.Journal) {
	if u.Durable() {
		u.tiers.Tier().Follow(j)
	}
}

// Holds reports whether an earlier process has held something under a number that Recommit would make visible.
func (u *Unit) Holds(txn uint64) bool { return u.Durable() && u.tiers.Held(txn) }

// Recommit makes visible what an earlier process has prepared and held under a number, unless it has done so itself.
func (u *Unit) Recommit(txn uint64, samples []schema.Sample, change uint64) error {
	if !u.Durable() {
		return nil
	}
	return u.tiers.CommitHeld(txn, samples, change)
}

// DropHeld frees what an earlier process has held, and is not to be committed.
func (u *Unit) DropHeld() {
	if u.Durable() {
		u.tiers.DropHeld()
	}
}

// ownedBy is what a folder says whose cells are those of this unit in a session: the units of one cannot change folders.
func (u *Unit) ownedBy(session string) string { return session + " of unit " + u.opts.Name }

// Owns reports whether what is on disk, if only that there is nothing, is what this unit has left there in a session.
func (u *Unit) Owns(session string) bool {
	return u.Durable() && u.tiers.Tier().Owner() == u.ownedBy(session)
}

// Own makes the cells on disk those of this unit in a session. AlreadyExists when there are some of another one: nobody but that
// knows what they are, so they are neither used nor removed.
func (u *Unit) Own(session string) error {
	if !u.Durable() || u.Owns(session) {
		return nil
	}
	tier := u.tiers.Tier()
	if cells := u.Stats().Cells; cells > 0 {
		return tqerr.New(tqerr.AlreadyExists, "unit %q: %s holds %d values of session %s; give this unit another name or path, or remove that folder if they are not needed",
			u.opts.Name, u.opts.Disk.folder(), cells, named(tier.Owner()))
	}
	u.DropHeld()
	return tier.SetOwner(u.ownedBy(session))
}

func named(session string) string {
	if session == "" {
		return "that is not known"
	}
	return session
}

// Discard drops all cells of a session, because that has ended for good and nobody knows them any more. Those that somebody else
// has left in a durable unit stay.
func (u *Unit) Discard(session string) error {
	if u.Durable() && (session == "" || !u.Owns(session)) {
		return nil
	}
	for _, s := range u.Inventory() {
		u.Delete(s.Partition, []string{s.Column.Field}, s.Samples)
	}
	if !u.Durable() {
		return nil
	}
	if err := u.Secure(); err != nil {
		return err
	}
	return u.tiers.Tier().Scrap()
}

// flush writes what is in memory to disk.
func (u *Unit) flush() error {
	if u.tiers.Closed() {
		return nil
	}
	if err := u.tiers.Flush(); err != nil {
		return tqerr.Wrap(tqerr.CodeOf(err), err, "unit %q: values that were in memory are lost", u.opts.Name)
	}
	return nil
}

// ParseDurability reads the name of a durability.
func ParseDurability(name string) (disktier.Durability, error) {
	switch name {
	case "", "none":
		return disktier.None, nil
	case "relaxed":
		return disktier.Relaxed, nil
	case "strict":
		return disktier.Strict, nil
	}
	return 0, tqerr.New(tqerr.InvalidArgument, "durability %q: want \"none\", \"relaxed\" or \"strict\"", name)
}
