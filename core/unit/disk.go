package unit

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"transferqueue/core/arena"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/store/tiered"
	"transferqueue/core/tqerr"
)

const (
	// offloadFolder is where units of all sessions put their files, inside the folder that a user has named.
	offloadFolder = "transfer_queue_ssd_offload"
	// abandonedAfter is how old the folder of a run must be before it is looked at whether its process has died.
	abandonedAfter = time.Minute
)

// Disk configures the local disk of a unit. Its files lie in <Path>/transfer_queue_ssd_offload/<Run>/<Unit>, and are scratch:
// they end with the unit.
type Disk struct {
	Path          string // folder of the user, created when missing, never removed
	Run           string // of one session
	Unit          string
	Limit         int64 // bytes, 0: none
	Threshold     int64 // values of at least that many bytes go to disk when they are put
	HighWatermark float64
	LowWatermark  float64

	files vfs.Disk // of the values; nil: that of the system
}

// OnDisk returns the same with another file system below the values, for tests.
func (d Disk) OnDisk(files vfs.Disk) *Disk {
	d.files = files
	return &d
}

func (d *Disk) run() string    { return filepath.Join(d.Path, offloadFolder, d.Run) }
func (d *Disk) folder() string { return filepath.Join(d.run(), d.Unit) }

// open checks and makes the folders and opens the store.
func (d *Disk) open(memory *arena.Arena, limit int64) (*tiered.Store, error) {
	if err := d.makeFolders(); err != nil {
		return nil, err
	}
	d.sweep()
	s, err := tiered.New(tiered.Options{
		Memory: memory, MemoryLimit: limit, DiskLimit: d.Limit, Threshold: d.Threshold, HighWatermark: d.HighWatermark,
		LowWatermark: d.LowWatermark, Disk: disktier.Options{Dir: d.folder()}.OnDisk(d.files),
	})
	if err != nil {
		d.cleanUp()
		return nil, err
	}
	return s, nil
}

const pathKey = "backend.SimpleStorage.ssd_offload.path"

// makeFolders refuses what is not a folder, and a child that leads somewhere else.
func (d *Disk) makeFolders() error {
	if d.Path == "" {
		return tqerr.New(tqerr.InvalidArgument, "%s: want a folder when ssd_offload is enabled", pathKey)
	}
	if info, err := os.Stat(d.Path); err == nil && !info.IsDir() {
		return tqerr.New(tqerr.InvalidArgument, "%s: %s is not a directory", pathKey, d.Path)
	}
	if err := os.MkdirAll(d.Path, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTDIR) {
			return tqerr.New(tqerr.InvalidArgument, "%s: %s is not a directory: %v", pathKey, d.Path, err)
		}
		return tqerr.Wrap(tqerr.IO, err, "%s: %s", pathKey, d.Path)
	}
	child := filepath.Join(d.Path, offloadFolder)
	if err := os.Mkdir(child, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return tqerr.Wrap(tqerr.IO, err, "%s: %s", pathKey, child)
	}
	info, err := os.Lstat(child)
	if err != nil {
		return tqerr.Wrap(tqerr.IO, err, "%s: %s", pathKey, child)
	}
	if !info.IsDir() {
		return tqerr.New(tqerr.InvalidArgument, "%s: %s is not a directory of its own (a symbolic link is refused)", pathKey, child)
	}
	return nil
}

// cleanUp removes the folders of the unit and of the run when nothing is in them.
func (d *Disk) cleanUp() {
	_ = os.Remove(d.folder())
	_ = os.Remove(d.run())
}

// sweep removes the files of units whose process has died. What is not scratch of a disk tier is left alone, and so is what
// somebody holds the lock of, or may be about to.
func (d *Disk) sweep() {
	runs, _ := filepath.Glob(filepath.Join(d.Path, offloadFolder, "*"))
	for _, run := range runs {
		info, err := os.Lstat(run)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < abandonedAfter || run == d.run() {
			continue
		}
		units, _ := filepath.Glob(filepath.Join(run, "*"))
		for _, folder := range units {
			if _, err := os.Lstat(filepath.Join(folder, "lock")); err != nil {
				continue
			}
			if tier, err := disktier.Open(disktier.Options{Dir: folder}); err == nil {
				_ = tier.Close()
			}
		}
		_ = os.Remove(run)
	}
}

// Pin implements store.Pinner.
func (u *Unit) Pin(partition string, fields []string, samples []schema.Sample) (store.Lease, error) {
	if p, ok := u.Store.(store.Pinner); ok {
		return p.Pin(partition, fields, samples)
	}
	return u.Read(partition, fields, samples)
}

// StageOnDisk implements store.DiskStager.
func (u *Unit) StageOnDisk(partition string, columns []schema.Column) (store.Staged, error) {
	return u.Store.(store.DiskStager).StageOnDisk(partition, columns)
}

// Counters counts what the tiers hold and what has moved between them.
func (u *Unit) Counters() store.Counters {
	n := u.Store.(interface{ Counters() store.Counters }).Counters()
	n.MemoryPhysical = u.Resident()
	return n
}

// Advise lets somebody say what samples are needed for, when cells have to move to disk.
func (u *Unit) Advise(a store.Advisor) {
	if u.tiers != nil {
		u.tiers.Advise(a)
	}
}
