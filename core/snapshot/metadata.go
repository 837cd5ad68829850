package snapshot

import (
	"bytes"
	"encoding/json"
	"io"
	"path/filepath"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

// formatVersion is that of the folder. Every file has one of its own too.
const formatVersion = 1

// maxMetadataBytes bounds what is read of a metadata.json, which its user may edit.
const maxMetadataBytes = 256 << 20

// metadata is the content of metadata.json. A user may leave out anything when editing it; what is there must be true.
type metadata struct {
	StorageSaved  *bool            `json:"storage_saved"`
	UserMetadata  json.RawMessage  `json:"user_metadata"`
	FormatVersion *json.Number     `json:"format_version"`
	Partitions    map[string]int64 `json:"partitions"` // samples of each
}

func samplesOf(s *catalog.State) map[string]int64 {
	out := make(map[string]int64, len(s.Partitions))
	for k := range s.Partitions {
		out[s.Partitions[k].Name] = int64(len(s.Partitions[k].Samples))
	}
	return out
}

// WriteMetadata writes and syncs the metadata.json of a folder. user is JSON as Python writes it, and kept as it is.
func WriteMetadata(f vfs.FS, dir, user string, s *catalog.State) error {
	partitions, err := json.Marshal(samplesOf(s))
	if err != nil {
		return tqerr.Wrap(tqerr.Internal, err, MetadataName)
	}
	text := `{"storage_saved": true, "user_metadata": ` + user + `, "format_version": 1, "partitions": ` + string(partitions) + "}\n"
	return WriteText(f, filepath.Join(dir, MetadataName), text)
}

// Metadata says what the metadata.json of a folder promises about the state beside it.
type Metadata struct {
	path       string
	partitions map[string]int64 // nil: nothing
}

// ReadMetadata reads and checks the metadata.json of a folder.
//
// Errors: FileNotFound; Corruption for what is no such file; VersionMismatch for that of a newer release.
func ReadMetadata(f vfs.FS, dir string) (*Metadata, error) {
	path := filepath.Join(dir, MetadataName)
	file, err := f.Open(path)
	if err != nil {
		return nil, vfs.Wrap(err)
	}
	raw, err := io.ReadAll(io.LimitReader(file, maxMetadataBytes+1))
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return nil, vfs.Wrap(err)
	}
	if len(raw) > maxMetadataBytes {
		return nil, tqerr.New(tqerr.Corruption, "%s: more than %d bytes", path, maxMetadataBytes)
	}
	return parseMetadata(path, raw)
}

func parseMetadata(path string, raw []byte) (*Metadata, error) {
	var m metadata
	raw = bytes.TrimSpace(plainJSON(raw))
	if !bytes.HasPrefix(raw, []byte("{")) {
		return nil, tqerr.New(tqerr.Corruption, "%s: want a JSON object", path)
	}
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, tqerr.New(tqerr.Corruption, "%s: %s", path, err)
	}
	if m.FormatVersion != nil {
		version, err := m.FormatVersion.Int64()
		switch {
		case err != nil || version < 1:
			return nil, tqerr.New(tqerr.Corruption, "%s: format_version %s, want a whole number of at least 1", path, *m.FormatVersion)
		case version > formatVersion:
			return nil, tqerr.New(tqerr.VersionMismatch, "%s: format_version %d, this release reads up to %d", path, version, formatVersion)
		}
	}
	if m.StorageSaved != nil && !*m.StorageSaved {
		return nil, tqerr.New(tqerr.Corruption, "%s: storage_saved is false, want a checkpoint with its values", path)
	}
	if m.UserMetadata != nil && !bytes.HasPrefix(m.UserMetadata, []byte("{")) {
		return nil, tqerr.New(tqerr.Corruption, "%s: user_metadata is no JSON object", path)
	}
	return &Metadata{path, m.Partitions}, nil
}

// Describes checks that the state is the one that was saved with it. Corruption for another one, naming the first partition
// that differs.
func (m *Metadata) Describes(s *catalog.State) error {
	if m.partitions == nil {
		return nil
	}
	have := samplesOf(s)
	names := make([]string, 0, len(have))
	for name := range have {
		names = append(names, name)
	}
	for name := range m.partitions {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		n, saved := m.partitions[name]
		got, known := have[name]
		switch {
		case !known:
			return tqerr.New(tqerr.Corruption, "%s: partition %q is not in %s", m.path, name, StateName)
		case !saved:
			return tqerr.New(tqerr.Corruption, "%s: partition %q of %s is not in it", m.path, name, StateName)
		case n != got:
			return tqerr.New(tqerr.Corruption, "%s: partition %q: %d samples, but %d in %s", m.path, name, n, got, StateName)
		}
	}
	return nil
}

// plainJSON replaces the numbers that Python writes and JSON does not have by null. No value that is checked is one.
func plainJSON(raw []byte) []byte {
	var out []byte
	quoted, copied := false, 0
	for i := 0; i < len(raw); i++ {
		switch {
		case quoted && raw[i] == '\\':
			i++
		case raw[i] == '"':
			quoted = !quoted
		case !quoted:
			for _, word := range []string{"NaN", "Infinity", "-Infinity"} {
				if raw[i] == word[0] && bytes.HasPrefix(raw[i:], []byte(word)) {
					out = append(append(out, raw[copied:i]...), "null"...)
					i += len(word) - 1
					copied = i + 1
					break
				}
			}
		}
	}
	if copied == 0 {
		return raw
	}
	return append(out, raw[copied:]...)
}
