//go:build !amd64

package memcopy

func copyNT(dst, src []byte) { copy(dst, src) }
