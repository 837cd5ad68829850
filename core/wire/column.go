package wire

import (
	"unsafe"

	"transferqueue/core/schema"
)

// MaxRows bounds the rows of a batch: a message that names each of them needs eight bytes for it. It also bounds the
// arrays that a server makes for a column of rows without bytes.
const MaxRows = MaxBody / 8

// columnFields is the number of values of a column on the wire; a longer array is accepted. One whose rows are shared has one
// more.
const columnFields = 13

// appendTo writes [kind, dtype, ragged, rows, form, field, shape, vary, lengths, ndims, dims, codecs, sizes], and the shares when there are some.
func (c *Column) appendTo(b []byte) []byte {
	if c.Share == nil {
		b = appendArrayHeader(b, columnFields)
	} else {
		b = appendArrayHeader(b, columnFields+1)
	}
	b = appendUint(b, uint64(c.Kind))
	b = appendUint(b, uint64(c.DType))
	b = appendUint(b, uint64(c.Ragged))
	b = appendInt(b, int64(c.Rows))
	b = appendUint(b, uint64(c.Form))
	b = appendString(b, c.Field)
	b = appendInts(b, c.Shape)
	b = appendUint(b, uint64(c.Vary))
	b = appendInts(b, c.Lengths)
	b = appendBytes(b, c.NDims)
	b = appendInts(b, c.Dims)
	b = appendBytes(b, codecBytes(c.Codecs))
	if b = appendInts(b, c.Sizes); c.Share == nil {
		return b
	}
	rows := make([]int64, len(c.Share))
	for i, row := range c.Share {
		rows[i] = int64(row)
	}
	return appendInts(b, rows)
}

// codecBytes views codecs as the bytes that they are.
func codecBytes(v []schema.Codec) []byte {
	if v == nil {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v))
}

func (c *Column) parse(s *scanner) error {
	n, absent, err := s.want(kindArray)
	if err != nil {
		return err
	}
	if absent || n < columnFields {
		return s.fail("column of %d values, want %d", n, columnFields)
	}
	*c = Column{}
	if err := c.parseFields(s); err != nil {
		return err
	}
	if n > columnFields {
		n--
		if err := c.parseShare(s); err != nil {
			return err
		}
	}
	for range n - columnFields {
		if err := s.skip(MaxDepth); err != nil {
			return err
		}
	}
	return c.check(s)
}

func (c *Column) parseFields(s *scanner) (err error) {
	byteOf := func() (v uint8) {
		if err == nil {
			var n uint64
			n, err = s.uint(8)
			v = uint8(n)
		}
		return v
	}
	intsOf := func() (v []int64) {
		if err == nil {
			v, err = s.ints()
		}
		return v
	}
	bytesOf := func() (v []byte) {
		if err == nil {
			v, err = s.bytes()
		}
		return v
	}
	c.Kind, c.DType, c.Ragged = schema.Kind(byteOf()), schema.DType(byteOf()), byteOf()
	if err != nil {
		return err
	}
	rows, err := s.int(64)
	if err != nil {
		return err
	}
	c.Rows, c.Form = int(rows), schema.Form(byteOf())
	if err != nil {
		return err
	}
	if c.Field, err = s.string(); err != nil {
		return err
	}
	c.Shape, c.Vary, c.Lengths = intsOf(), byteOf(), intsOf()
	c.NDims, c.Dims = bytesOf(), intsOf()
	if codecs := bytesOf(); codecs != nil {
		c.Codecs = unsafe.Slice((*schema.Codec)(unsafe.Pointer(unsafe.SliceData(codecs))), len(codecs))
	}
	c.Sizes = intsOf()
	return err
}

func (c *Column) parseShare(s *scanner) error {
	rows, err := s.ints()
	if err != nil || rows == nil {
		return err
	}
	c.Share = make([]uint32, len(rows))
	for i, row := range rows {
		if row < 0 || row >= int64(c.Rows) {
			return s.fail("sample %d has row %d of %d", i, row, c.Rows)
		}
		c.Share[i] = uint32(row)
	}
	return nil
}

// check refuses what Validate refuses, more rows than any message can name, and columns without a schema but where
// they mean a field that is registered only.
func (c *Column) check(s *scanner) error {
	if c.Rows > MaxRows {
		return s.fail("field %q: %d rows, limit %d", c.Field, c.Rows, MaxRows)
	}
	if s.bare && c.Form == 0 && c.DType == schema.NoDType {
		return nil
	}
	if err := (*schema.Column)(c).Validate(); err != nil {
		return s.fail("%s", err)
	}
	return nil
}
