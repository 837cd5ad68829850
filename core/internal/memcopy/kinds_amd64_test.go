package memcopy

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

func init() {
	for name, kind := range map[string]func(dst, src unsafe.Pointer, n uintptr){"AVX512": streamAVX512, "AVX2": streamAVX2, "plain": nil} {
		if name == "AVX512" && !cpu.X86.HasAVX512F || name == "AVX2" && !cpu.X86.HasAVX2 {
			continue
		}
		copiers[name] = func(dst, src []byte) int {
			picked := stream
			stream = kind
			defer func() { stream = picked }()
			return CopyNT(dst, src)
		}
	}
}
