// Package memcopy moves payload. A plain store reads the destination's cache line before it writes it, and leaves what
// was copied in the cache; a non-temporal store does neither, so a large copy moves two thirds of the bytes and does not
// evict what other code uses. It loses where the reader wants the bytes at once and they would have fitted the cache:
// hence two thresholds, one for each direction.
package memcopy

// Sizes from which a copy uses non-temporal stores: a put writes memory that somebody else reads later; a get writes memory
// that its caller reads next, and decides by the size of all its pieces (see arena).
const (
	PutThreshold = 64 << 10
	GetThreshold = 1 << 20
)

// Copy copies src to the beginning of dst, like the builtin, and returns the number of bytes. The slices must not
// overlap in any function of this package; dst must be at least as long as src.
func Copy(dst, src []byte) int { return copy(dst[:len(src)], src) }

// CopyNT copies src to the beginning of dst with non-temporal stores where the processor has them. The bytes are visible
// to other processors, in program order with later stores, when it returns.
func CopyNT(dst, src []byte) int {
	copyNT(dst[:len(src)], src)
	return len(src)
}

// Put copies a writer's bytes into unit memory.
func Put(dst, src []byte) int {
	if len(src) >= PutThreshold {
		return CopyNT(dst, src)
	}
	return Copy(dst, src)
}
