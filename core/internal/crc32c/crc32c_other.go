//go:build !amd64

package crc32c

const wide = false

func updateWide(uint32, []byte) uint32 { panic("crc32c: this processor has no wide registers") }
