package unit

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
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
	// keptSuffix ends the names of folders whose files outlive their processes. No session's name has it.
	keptSuffix = ".units"
	// maxFileName bounds the name of a file on the usual file systems.
	maxFileName = 255
	// abandonedAfter is how old the folder of a run must be before it is looked at whether its process has died.
	abandonedAfter = time.Minute
)

// Disk configures the local disk of a unit. Without durability its files lie in
// <Path>/transfer_queue_ssd_offload/<Run>/<Unit>, and are scratch: they end with the unit. Otherwise they lie in
// <Path>/transfer_queue_ssd_offload/<Namespace>.units/<Name>, where the next unit of that name finds them; what it cannot read
// in full, or somebody else uses, makes it refuse to start.
type Disk struct {
	Path          string // folder of the user, created when missing, never removed
	Run           string // of one session
	Unit          string
	Durability    disktier.Durability
	Namespace     string
	Name          string
	Limit         int64 // bytes, 0: none
	Threshold     int64 // values of at least that many bytes go to disk when they are put
	HighWatermark float64
	LowWatermark  float64
	Headroom      int64 // bytes of disk that the tier takes in advance, see disktier.Options; 0: its own choice

	files vfs.Disk // of the values; nil: that of the system
}

// OnDisk returns the same with another file system below the values, for tests. Folders and scratch space stay where they are.
func (d Disk) OnDisk(files vfs.Disk) *Disk {
	d.files = files
	return &d
}

func (d *Disk) run() string {
	if d.durable() {
		return filepath.Join(d.Path, offloadFolder, d.Namespace+keptSuffix)
	}
	return filepath.Join(d.Path, offloadFolder, d.Run)
}

func (d *Disk) folder() string {
	if d.durable() {
		return filepath.Join(d.run(), fileName(d.Name))
	}
	return filepath.Join(d.run(), d.Unit)
}

func (d *Disk) durable() bool { return d.Durability != disktier.None }

// fileName writes the name of a unit so that it names a file, and no other unit's.
func fileName(name string) string {
	escaped := url.PathEscape(name)
	if strings.HasPrefix(escaped, ".") {
		escaped = "%2E" + escaped[1:]
	}
	return escaped
}

func (d *Disk) checkName() error {
	if d.durable() && (d.Name == "" || len(fileName(d.Name)) > maxFileName) {
		return tqerr.New(tqerr.InvalidArgument, "unit name %q: want one of which a folder can be named, because the unit is durable", d.Name)
	}
	return nil
}

// open checks and makes the folders and opens the store.
func (d *Disk) open(memory *arena.Arena, limit int64) (*tiered.Store, error) {
	if err := d.checkName(); err != nil {
		return nil, err
	}
	if err := d.makeFolders(); err != nil {
		return nil, err
	}
	d.sweep()
	if err := d.makeRun(); err != nil {
		return nil, err
	}
	s, err := tiered.New(tiered.Options{
		Memory: memory, MemoryLimit: limit, DiskLimit: d.Limit, Threshold: d.Threshold, HighWatermark: d.HighWatermark,
		LowWatermark: d.LowWatermark,
		Disk:         disktier.Options{Dir: d.folder(), Durability: d.Durability, HeadroomBytes: d.Headroom}.OnDisk(d.files),
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

// makeRun makes the folder of a durable unit's folder, and with strict durability lets the names of all folders above it
// survive a power loss.
func (d *Disk) makeRun() error {
	if !d.durable() {
		return nil
	}
	if err := os.Mkdir(d.run(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return tqerr.Wrap(tqerr.IO, err, "%s: %s", pathKey, d.run())
	}
	if err := os.Mkdir(d.folder(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return tqerr.Wrap(tqerr.IO, err, "%s: %s", pathKey, d.folder())
	}
	if d.Durability != disktier.Strict {
		return nil
	}
	for _, dir := range []string{d.run(), filepath.Join(d.Path, offloadFolder), d.Path, filepath.Dir(d.Path)} {
		if err := (vfs.OSDisk{}).SyncDir(dir); err != nil {
			return tqerr.Wrap(tqerr.IO, err, "%s: fsync of %s", pathKey, dir)
		}
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
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < abandonedAfter || run == d.run() || strings.HasSuffix(run, keptSuffix) {
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
