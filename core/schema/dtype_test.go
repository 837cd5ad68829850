package schema

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDTypesAreWireFormat(t *testing.T) {
	sizes := map[string]int64{
		"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
		"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
		"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
	}
	names := Names()
	require.Len(t, names, len(sizes)+1)
	require.Equal(t, "none", names[0])
	for i, name := range names[1:] {
		d := DType(i + 1)
		require.True(t, d.Valid())
		require.Equal(t, name, d.String())
		require.Contains(t, sizes, name)
		require.Equal(t, sizes[name], d.Size(), name)
	}
	// Numbers that peers and files already use.
	require.Equal(t, []DType{1, 9, 12, 21}, []DType{Bool, Int64, Float32, Float8E8M0FNU})
}

func TestUnknownDTypes(t *testing.T) {
	for _, d := range []DType{NoDType, numDTypes, 255} {
		require.False(t, d.Valid())
		require.Zero(t, d.Size())
	}
	require.Equal(t, "invalid", DType(255).String())
}
