package vfs

// sector is the least that a disk writes as a whole.
const sector = 512

// MayBeTorn reports whether what is found of a write at an offset of a file may be a part of it, where zeros had been: the process
// was killed, and the end is missing, or power was lost, and so are whole sectors. Otherwise all of it was written, and when it is
// not what it should be, it was damaged since.
func MayBeTorn(found []byte, at int64) bool {
	if n := len(found); n == 0 || found[n-1] == 0 {
		return true
	}
	for from, to := 0, 0; from < len(found); from = to {
		to = min(len(found), from+sector-int((at+int64(from))%sector))
		if zeros(found[from:to]) {
			return true
		}
	}
	return false
}

func zeros(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
