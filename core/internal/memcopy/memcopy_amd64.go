package memcopy

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

const line = 64

// stream copies n bytes, a multiple of 64, to a line-aligned destination and fences. It is nil on a processor without
// AVX2, which then copies plainly.
var stream = pickStream()

func pickStream() func(dst, src unsafe.Pointer, n uintptr) {
	switch {
	case cpu.X86.HasAVX512F:
		return streamAVX512
	case cpu.X86.HasAVX2:
		return streamAVX2
	default:
		return nil
	}
}

//go:noescape
func streamAVX512(dst, src unsafe.Pointer, n uintptr)

//go:noescape
func streamAVX2(dst, src unsafe.Pointer, n uintptr)

// copyNT brings the destination to a line with a plain copy; the source may stay unaligned, loads do not mind.
func copyNT(dst, src []byte) {
	if stream == nil || len(src) < 4*line {
		copy(dst, src)
		return
	}
	head := int(-uintptr(unsafe.Pointer(unsafe.SliceData(dst))) & (line - 1))
	copy(dst[:head], src)
	body := (len(src) - head) &^ (line - 1)
	copy(dst[head+body:], src[head+body:])
	stream(unsafe.Pointer(&dst[head]), unsafe.Pointer(&src[head]), uintptr(body))
}
