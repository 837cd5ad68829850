package wire

import (
	"reflect"
	"sync"

	"transferqueue/core/tqerr"
)

// Messages are read and written by a codec of our own and not by a msgpack library: a length is checked against what
// is left before anything is allocated, str and bin are different, an integer that does not fit is an error, and a
// longer array than we know is fine. The libraries for Go that were looked at do none of these.

// value is a type that writes and reads itself.
type value interface {
	appendTo([]byte) []byte
	parse(*scanner) error
}

// coder writes and reads the values of one Go type.
type coder struct {
	append func([]byte, reflect.Value) []byte
	parse  func(*scanner, reflect.Value) error
	// least is the smallest number of bytes a value has.
	least int
}

var (
	coders    sync.Map // reflect.Type to *coder
	valueType = reflect.TypeFor[value]()
	scratch   = sync.Pool{New: func() any { return new([]byte) }}
)

// maxScratch is the largest buffer that is kept for the next message.
const maxScratch = 1 << 20

// Marshal returns the body of a message: a struct of this package or a pointer to one, or any other struct of bools,
// integers, strings, bytes, and structs, pointers and slices of these. The bytes are the caller's. A body beyond MaxBody
// is InvalidArgument.
func Marshal(v any) ([]byte, error) {
	root := reflect.ValueOf(v)
	if root.Kind() == reflect.Pointer && !root.IsNil() {
		root = root.Elem()
	} else if root.Kind() == reflect.Struct {
		// Fields write themselves through a pointer, which needs a value with an address.
		addressable := reflect.New(root.Type()).Elem()
		addressable.Set(root)
		root = addressable
	}
	c, err := messageCoder(root, v)
	if err != nil {
		return nil, err
	}
	buf := scratch.Get().(*[]byte)
	out := c.append((*buf)[:0], root)
	if len(out) > MaxBody {
		return nil, tqerr.New(tqerr.InvalidArgument, "message %s: %d bytes, limit %d", root.Type().Name(), len(out), MaxBody)
	}
	if cap(out) > maxScratch {
		return out, nil
	}
	*buf = out
	result := append(make([]byte, 0, len(out)), out...)
	scratch.Put(buf)
	return result, nil
}

// Unmarshal reads a body into the struct that v points to. Nothing in it shares data's memory. Values behind the last
// known field are ignored, fields behind the last value are zero, and nil is the zero value. Whatever is malformed is
// InvalidArgument with the name of the message and of the field; the struct is then of no use.
func Unmarshal(data []byte, v any) error {
	root := reflect.ValueOf(v)
	if root.Kind() == reflect.Pointer && !root.IsNil() {
		root = root.Elem()
	}
	c, err := messageCoder(root, v)
	if err != nil {
		return err
	}
	if !root.CanSet() {
		return tqerr.New(tqerr.Internal, "message %T: want a pointer", v)
	}
	s := scanner{data: data}
	switch v.(type) {
	case *MetaReply, *UnitReply:
		s.bare = true
	}
	root.SetZero()
	err = c.parse(&s, root)
	if err == nil {
		err = s.end()
	}
	if put, ok := v.(*PutRequest); ok && err == nil && (put.Insert < 0 || put.Insert > MaxRows) {
		err = &malformed{path: "Insert", what: "the number of rows is negative or beyond the limit", at: s.at}
	}
	if err == nil {
		return nil
	}
	var path string
	if m, ok := err.(*malformed); ok && m.path != "" {
		path = m.path + ": "
	}
	return tqerr.New(tqerr.InvalidArgument, "message %s: %s%s of %d bytes", root.Type().Name(), path, err, len(data))
}

// messageCoder returns the coder of a message, which must be a struct.
func messageCoder(root reflect.Value, v any) (*coder, error) {
	if root.Kind() != reflect.Struct {
		return nil, tqerr.New(tqerr.Internal, "%T is not a message: want a struct", v)
	}
	if c, ok := coders.Load(root.Type()); ok {
		return c.(*coder), nil
	}
	c, err := structCoder(root.Type(), true)
	if err != nil {
		return nil, err
	}
	coders.Store(root.Type(), c)
	return c, nil
}

func newCoder(t reflect.Type) (*coder, error) {
	if reflect.PointerTo(t).Implements(valueType) {
		return valueCoder(t), nil
	}
	switch t.Kind() {
	case reflect.Bool:
		return &boolCoder, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return &intCoder, nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return &uintCoder, nil
	case reflect.String:
		return &stringCoder, nil
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return &bytesCoder, nil
		}
		return sliceCoder(t)
	case reflect.Pointer:
		return pointerCoder(t)
	case reflect.Struct:
		return structCoder(t, false)
	default:
		return nil, tqerr.New(tqerr.Internal, "a value of type %s cannot be part of a message", t)
	}
}

func valueCoder(t reflect.Type) *coder {
	least := 1
	if t == reflect.TypeFor[Column]() {
		least = 1 + columnFields
	}
	return &coder{
		append: func(b []byte, v reflect.Value) []byte { return v.Addr().Interface().(value).appendTo(b) },
		parse:  func(s *scanner, v reflect.Value) error { return v.Addr().Interface().(value).parse(s) },
		least:  least,
	}
}

var (
	boolCoder = coder{
		append: func(b []byte, v reflect.Value) []byte { return appendBool(b, v.Bool()) },
		parse: func(s *scanner, v reflect.Value) error {
			x, err := s.bool()
			v.SetBool(x)
			return err
		},
		least: 1,
	}
	intCoder = coder{
		append: func(b []byte, v reflect.Value) []byte { return appendInt(b, v.Int()) },
		parse: func(s *scanner, v reflect.Value) error {
			x, err := s.int(v.Type().Bits())
			v.SetInt(x)
			return err
		},
		least: 1,
	}
	uintCoder = coder{
		append: func(b []byte, v reflect.Value) []byte { return appendUint(b, v.Uint()) },
		parse: func(s *scanner, v reflect.Value) error {
			x, err := s.uint(v.Type().Bits())
			v.SetUint(x)
			return err
		},
		least: 1,
	}
	stringCoder = coder{
		append: func(b []byte, v reflect.Value) []byte { return appendString(b, v.String()) },
		parse: func(s *scanner, v reflect.Value) error {
			x, err := s.string()
			v.SetString(x)
			return err
		},
		least: 1,
	}
	bytesCoder = coder{
		append: func(b []byte, v reflect.Value) []byte { return appendBytes(b, v.Bytes()) },
		parse: func(s *scanner, v reflect.Value) error {
			x, err := s.bytes()
			v.SetBytes(x)
			return err
		},
		least: 1,
	}
)

func pointerCoder(t reflect.Type) (*coder, error) {
	elem, err := newCoder(t.Elem())
	if err != nil {
		return nil, err
	}
	return &coder{
		append: func(b []byte, v reflect.Value) []byte {
			if v.IsNil() {
				return appendNil(b)
			}
			return elem.append(b, v.Elem())
		},
		parse: func(s *scanner, v reflect.Value) error {
			if s.left() > 0 && s.data[s.at] == 0xc0 {
				s.at++
				return nil
			}
			v.Set(reflect.New(t.Elem()))
			return elem.parse(s, v.Elem())
		},
		least: 1,
	}, nil
}

func sliceCoder(t reflect.Type) (*coder, error) {
	elem, err := newCoder(t.Elem())
	if err != nil {
		return nil, err
	}
	return &coder{
		append: func(b []byte, v reflect.Value) []byte {
			if v.IsNil() {
				return appendNil(b)
			}
			b = appendArrayHeader(b, v.Len())
			for i := range v.Len() {
				b = elem.append(b, v.Index(i))
			}
			return b
		},
		parse: func(s *scanner, v reflect.Value) error {
			n, absent, err := s.want(kindArray)
			if err != nil || absent {
				return err
			}
			// The memory of an item can be many times its bytes, so few are made before they are seen.
			if n*elem.least > s.left() {
				return s.fail("array of %d with %d bytes left", n, s.left())
			}
			v.Set(reflect.MakeSlice(t, 0, min(n, maxPrealloc/16)))
			for i := range n {
				if i == v.Cap() {
					v.Grow(1)
				}
				v.SetLen(i + 1)
				if err := elem.parse(s, v.Index(i)); err != nil {
					return err
				}
			}
			return nil
		},
		least: 1,
	}, nil
}

// field is one value of a struct's array.
type field struct {
	*coder
	index int
	name  string
}

// structCoder makes a coder for the exported fields in their order. The array of a root may be shorter than the
// struct, because an older peer does not know all its fields; one inside a message has them all.
func structCoder(t reflect.Type, root bool) (*coder, error) {
	var fields []field
	least := 1
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			continue
		}
		c, err := newCoder(f.Type)
		if err != nil {
			return nil, err
		}
		fields = append(fields, field{c, i, f.Name})
		least += c.least
	}
	if len(fields) == 0 {
		return nil, tqerr.New(tqerr.Internal, "%s is not a message: it has no exported field", t)
	}
	return &coder{
		append: func(b []byte, v reflect.Value) []byte {
			b = appendArrayHeader(b, len(fields))
			for i := range fields {
				b = fields[i].append(b, v.Field(fields[i].index))
			}
			return b
		},
		parse: func(s *scanner, v reflect.Value) error { return parseStruct(s, v, fields, root) },
		least: least,
	}, nil
}

func parseStruct(s *scanner, v reflect.Value, fields []field, root bool) error {
	n, absent, err := s.want(kindArray)
	if err != nil {
		return err
	}
	if absent || (!root && n < len(fields)) {
		return s.fail("array of %d values, want %d", n, len(fields))
	}
	for i := range fields[:min(n, len(fields))] {
		if err := fields[i].parse(s, v.Field(fields[i].index)); err != nil {
			if m, ok := err.(*malformed); ok {
				m.path = joinPath(fields[i].name, m.path)
			}
			return err
		}
	}
	for range n - len(fields) {
		if err := s.skip(MaxDepth); err != nil {
			return err
		}
	}
	return nil
}

func joinPath(outer, inner string) string {
	if inner == "" {
		return outer
	}
	return outer + "." + inner
}
