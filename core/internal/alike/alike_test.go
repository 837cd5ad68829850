package alike

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

func TestRows(t *testing.T) {
	packed := func(data string, c *schema.Column) func(int) []byte {
		offsets := c.Offsets()
		return func(i int) []byte { return []byte(data)[offsets[i]:offsets[i+1]] }
	}
	uniform := schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Rows: 5, Form: schema.Uniform, Shape: []int64{2}}
	require.Equal(t, []int64{0, 1, 0, 1, 4}, Rows(&uniform, packed("aabbaabbcc", &uniform)))
	require.Nil(t, Rows(&uniform, packed("aabbccddee", &uniform)))
	free := schema.Column{
		Kind: schema.Tensor, DType: schema.Uint8, Rows: 4, Form: schema.Free, NDims: []uint8{2, 2, 1, 2}, Dims: []int64{2, 3, 3, 2, 6, 2, 3},
	}
	require.Equal(t, []int64{0, 1, 2, 0}, Rows(&free, packed("abcdefabcdefabcdefabcdef", &free)), "another shape is another value")
	objects := schema.Column{
		Kind: schema.Object, Rows: 5, Form: schema.Objects, Sizes: []int64{1, 1, 0, 0, 1}, Codecs: []schema.Codec{1, 2, 1, 1, 1},
	}
	require.Equal(t, []int64{0, 1, 2, 3, 0}, Rows(&objects, packed("xxx", &objects)), "another codec too; rows without bytes stay")
	one := []byte("abcd")
	expanded := schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Rows: 3, Form: schema.Uniform, Shape: []int64{4}}
	require.Equal(t, []int64{0, 0, 0}, Rows(&expanded, func(int) []byte { return one }))
	lengths := schema.Column{
		Kind: schema.Tensor, DType: schema.Uint8, Rows: 3, Form: schema.Varying, Shape: []int64{0}, Lengths: []int64{4, 2, 4},
	}
	require.Equal(t, []int64{0, 1, 0}, Rows(&lengths, func(i int) []byte { return one[:lengths.Lengths[i]] }), "a beginning is no equal")
}
