package merge

import (
	"bufio"
	"encoding/binary"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// conversion is what the checksums of testdata/small.txt are over.
type conversion struct {
	size   int
	nan    uint32 // the code every NaN is counted as
	decode func(uint32) float32
	encode func(float32) uint32
}

func of8(c codec, nan uint32) conversion {
	return conversion{1, nan,
		func(code uint32) float32 { return c.decode(uint8(code)) }, func(x float32) uint32 { return uint32(c.encode(x)) }}
}

func of16(decode func(uint16) float32, encode func(float32) uint16, nan uint32) conversion {
	return conversion{2, nan,
		func(code uint32) float32 { return decode(uint16(code)) }, func(x float32) uint32 { return uint32(encode(x)) }}
}

var conversions = map[string]conversion{
	"float16":         of16(decodeHalf, encodeHalf, 0x7c01),
	"bfloat16":        of16(decodeBrain, encodeBrain, 0x7f81),
	"float8_e4m3fn":   of8(e4m3fn, 0x7f),
	"float8_e5m2":     of8(e5m2, 0x7d),
	"float8_e4m3fnuz": of8(e4m3fnuz, 0x80),
	"float8_e5m2fnuz": of8(e5m2fnuz, 0x80),
	"float8_e8m0fnu":  of8(e8m0fnu, 0xff),
}

// patterns are the lower 24 bits of the float32 values in the checksums, as testdata/generate.py lists them.
func patterns(name string) []uint32 {
	lower := []uint32{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff}
	if name == "float16" {
		for bit := range 16 {
			one := uint32(1) << bit
			lower = append(lower, one, one-1, one+1, 1<<16-one, 3*one&0xffff)
			for high := range uint32(8) {
				lower = append(lower, high<<13|one, high<<13)
			}
		}
	}
	slices.Sort(lower)
	lower = slices.Compact(lower)
	var out []uint32
	for upper := range uint32(256) {
		for _, low := range lower {
			out = append(out, upper<<16|low)
		}
	}
	return out
}

func (c conversion) decodeSum() uint32 {
	var out []byte
	for code := range uint32(1) << (8 * c.size) {
		bits := math.Float32bits(c.decode(code))
		if bits&0x7fffffff > 0x7f800000 {
			bits = 0x7fc00000
		}
		out = binary.LittleEndian.AppendUint32(out, bits)
	}
	return crc32.ChecksumIEEE(out)
}

func (c conversion) encodeSum(top uint32, lower []uint32) uint32 {
	out := make([]byte, 0, 16*len(lower)*c.size)
	for head := top << 4; head < (top+1)<<4; head++ {
		for _, low := range lower {
			code := c.encode(math.Float32frombits(head<<24 | low))
			if x := c.decode(code); x != x {
				code = c.nan
			}
			out = append(out, byte(code))
			if c.size == 2 {
				out = append(out, byte(code>>8))
			}
		}
	}
	return crc32.ChecksumIEEE(out)
}

func TestConversionsAreThoseOfTorch(t *testing.T) {
	file, err := os.Open(filepath.Join("testdata", "small.txt"))
	require.NoError(t, err)
	defer func() { require.NoError(t, file.Close()) }()
	checked := map[string]int{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		words := strings.Fields(lines.Text())
		c, ok := conversions[words[0]]
		require.True(t, ok, words[0])
		want, err := strconv.ParseUint(words[len(words)-1], 16, 32)
		require.NoError(t, err)
		got := uint32(0)
		if words[1] == "decode" {
			got = c.decodeSum()
		} else {
			top, err := strconv.ParseUint(words[2], 16, 4)
			require.NoError(t, err)
			got = c.encodeSum(uint32(top), patterns(words[0]))
		}
		require.Equal(t, uint32(want), got, lines.Text())
		checked[words[0]]++
	}
	require.Len(t, checked, len(conversions))
	for name, lines := range checked {
		require.Equal(t, 17, lines, name)
	}
}

func TestValuesBeyondTheLargestFollowTorch(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		name string
		x    float32
		want uint32
	}{
		{"float16", 65519, 0x7bff},
		{"float16", 65520, 0x7c00},
		{"float16", -inf, 0xfc00},
		{"bfloat16", math.MaxFloat32, 0x7f80},
		{"float8_e5m2", 61439, 0x7b},
		{"float8_e5m2", -61440, 0xfc},
		{"float8_e4m3fn", 480, 0x7e},
		{"float8_e4m3fn", -inf, 0xfe},
		{"float8_e4m3fnuz", 247, 0x7f},
		{"float8_e4m3fnuz", -248, 0x80},
		{"float8_e5m2fnuz", inf, 0x80},
		{"float8_e8m0fnu", inf, 0xff},
	} {
		require.Equal(t, c.want, conversions[c.name].encode(c.x), "%s of %v", c.name, c.x)
	}
}

func TestSubnormalsRoundToNearestEven(t *testing.T) {
	for _, c := range []struct {
		name string
		x    float64
		want uint32
	}{
		{"float16", math.Ldexp(1, -25), 0}, // half of the smallest: a tie, to even
		{"float16", math.Ldexp(1.0001, -25), 1},
		{"float16", math.Ldexp(3, -25), 2},
		{"float16", math.Ldexp(1, -14) - math.Ldexp(1, -26), 0x0400}, // up into the normal values
		{"float8_e4m3fn", math.Ldexp(1, -10), 0},
		{"float8_e4m3fn", math.Ldexp(3, -10), 2},
		{"float8_e5m2", math.Ldexp(1.5, -17), 1},
		{"float8_e8m0fnu", math.Ldexp(1, -127), 0},
		{"float8_e8m0fnu", math.Ldexp(1.5, -126), 2},
	} {
		require.Equal(t, c.want, conversions[c.name].encode(float32(c.x)), "%s of %v", c.name, c.x)
	}
}
