package merge

import (
	"slices"
	"strconv"
	"strings"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Plan checks every row and describes the result, which shares no array with its arguments that Apply would change. A
// refusal is a Failed error that names the field, the first row it concerns (as rowName calls it) and the rule; then
// nothing of the column can be merged.
func (m Merge) Plan(old, added *schema.Column, rowName func(i int) string) (schema.Column, error) {
	if old.Rows != added.Rows {
		return schema.Column{}, tqerr.New(tqerr.Internal, "field %q: merge %q: %d stored rows, %d new rows",
			old.Field, m.name, old.Rows, added.Rows)
	}
	if old.Rows == 0 {
		return *old, nil
	}
	p := plan{merge: m, old: old, added: added, rowName: rowName}
	if err := p.types(); err != nil {
		return schema.Column{}, err
	}
	switch m.rule {
	case join:
		return p.joined()
	case pairwise:
		if err := p.equalShapes(); err != nil {
			return schema.Column{}, err
		}
		return *old, nil
	default:
		result := *added
		result.Field = old.Field
		return result, nil
	}
}

// plan is one call of Plan.
type plan struct {
	merge      Merge
	old, added *schema.Column
	rowName    func(i int) string
}

func (p *plan) refuse(row int, format string, args ...any) error {
	args = append([]any{p.old.Field, p.rowName(row), p.merge.name}, args...)
	return tqerr.New(tqerr.Failed, "field %q of %q: merge %q: "+format, args...)
}

// types checks what is the same for all rows: kind, dtype, and whether the merge is defined for them.
func (p *plan) types() error {
	switch {
	case p.old.Kind == schema.Object && p.added.Kind != schema.Object:
		return p.refuse(0, "the stored value is a Python object and must remain non-tensor, have a tensor of dtype %s",
			p.added.DType)
	case p.old.Kind == schema.Tensor && p.added.Kind != schema.Tensor:
		return p.refuse(0, "the stored value must remain a tensor of dtype %s, have a Python object", p.old.DType)
	case p.old.DType != p.added.DType:
		return p.refuse(0, "must keep dtype: have %s, want %s", p.added.DType, p.old.DType)
	case p.merge.rule == takeNew:
		return nil
	case p.old.Kind == schema.Object:
		return p.refuse(0, `not defined for Python objects, only "replace" is`)
	case p.merge.rule == pairwise && p.merge.kernels[p.old.DType] == nil:
		return p.refuse(0, "not defined for dtype %s", p.old.DType)
	}
	return nil
}

// equalShapes checks that every stored row has the shape of its new one. A new scalar is not broadcast: a stored row would
// silently take part in arithmetic its writer did not mean.
func (p *plan) equalShapes() error {
	if sameShapes(p.old, p.added) {
		return nil
	}
	next := shapes(p.added)
	for i, have := range p.old.Shapes() {
		if want := next(i); !slices.Equal(have, want) {
			return p.refuse(i, "shapes must be equal: stored %s, new %s", shapeText(have), shapeText(want))
		}
	}
	return nil
}

// sameShapes compares the arrays of two descriptors of the same form. False only means that rows must be compared.
func sameShapes(a, b *schema.Column) bool {
	return a.Form == b.Form && slices.Equal(a.Shape, b.Shape) && a.Vary == b.Vary &&
		slices.Equal(a.Lengths, b.Lengths) && slices.Equal(a.NDims, b.NDims) && slices.Equal(a.Dims, b.Dims)
}

// joined describes the rows of a concat.
func (p *plan) joined() (schema.Column, error) {
	result := schema.Column{
		Field: p.old.Field, Kind: schema.Tensor, DType: p.old.DType, Ragged: p.old.Ragged, Rows: p.old.Rows,
	}
	if p.old.Ragged != p.added.Ragged {
		result.Ragged = 1
	}
	if !p.joinForms(&result) {
		if err := p.joinShapes(&result); err != nil {
			return schema.Column{}, err
		}
	}
	result.Normalize()
	if err := result.Validate(); err != nil {
		return schema.Column{}, tqerr.Wrap(tqerr.Failed, err, "field %q: merge %q", p.old.Field, p.merge.name)
	}
	return result, nil
}

// joinForms is the common case: all rows agree in every dimension but the first. It fills result, or reports that rows
// must be looked at one by one.
func (p *plan) joinForms(result *schema.Column) bool {
	for _, c := range []*schema.Column{p.old, p.added} {
		if len(c.Shape) == 0 || c.Form == schema.Free || (c.Form == schema.Varying && c.Vary != 0) {
			return false
		}
	}
	if !slices.Equal(p.old.Shape[1:], p.added.Shape[1:]) {
		return false
	}
	result.Shape = slices.Clone(p.old.Shape)
	if p.old.Form == schema.Uniform && p.added.Form == schema.Uniform {
		result.Form = schema.Uniform
		result.Shape[0] += p.added.Shape[0]
		return true
	}
	result.Form, result.Lengths = schema.Varying, make([]int64, p.old.Rows)
	for i := range result.Lengths {
		result.Lengths[i] = firstDim(p.old, i) + firstDim(p.added, i)
	}
	return true
}

func firstDim(c *schema.Column, i int) int64 {
	if c.Form == schema.Varying {
		return c.Lengths[i]
	}
	return c.Shape[0]
}

// joinShapes checks and joins the shapes row by row.
func (p *plan) joinShapes(result *schema.Column) error {
	result.Form = schema.Free
	next := shapes(p.added)
	for i, have := range p.old.Shapes() {
		more := next(i)
		switch {
		case len(have) == 0 || len(more) == 0:
			return p.refuse(i, "a tensor of rank 0 cannot be joined: stored %s, new %s", shapeText(have), shapeText(more))
		case !slices.Equal(have[1:], more[1:]):
			return p.refuse(i, "shapes must be equal but for dim 0: stored %s, new %s", shapeText(have), shapeText(more))
		}
		result.NDims = append(result.NDims, uint8(len(have)))
		result.Dims = append(append(result.Dims, have[0]+more[0]), have[1:]...)
	}
	return nil
}

// shapes returns a function that gives the shape of row i when it is asked for the rows in order. A shape is valid until
// the next call.
func shapes(c *schema.Column) func(i int) []int64 {
	at, buf := 0, slices.Clone(c.Shape)
	return func(i int) []int64 {
		switch c.Form {
		case schema.Varying:
			buf[c.Vary] = c.Lengths[i]
		case schema.Free:
			buf = c.Dims[at : at+int(c.NDims[i])]
			at += int(c.NDims[i])
		}
		return buf
	}
}

// shapeText writes a shape as torch users read it: (), (3,), (3, 4).
func shapeText(shape []int64) string {
	parts := make([]string, len(shape))
	for i, d := range shape {
		parts[i] = strconv.FormatInt(d, 10)
	}
	text := strings.Join(parts, ", ")
	if len(parts) == 1 {
		text += ","
	}
	return "(" + text + ")"
}
