"""What the rows of a field are, by column, and choices of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch

from transfer_queue._calls import decode_ints
from transfer_queue._values import DTYPES

__all__ = ["FieldSchema", "Pick", "split_shapes"]

_T = TypeVar("_T")

_Numbers = list[int]

_NOTHING = np.empty(0, dtype=np.int64)


_OBJECT = 2  # core/schema.Kind
_UNIFORM, _VARYING, _FREE = 1, 2, 3  # core/schema.Form


def split_shapes(ranks: Iterable[int], dims: Sequence[int]) -> list[torch.Size]:
    """Cuts the dimensions of rows, written one row after another, into shapes."""
    return [torch.Size(dims[start:end]) for start, end in pairwise(accumulate(ranks, initial=0))]


def _one_varying(shapes: list[Any]) -> tuple[tuple[int, ...], int, np.ndarray[Any, np.dtype[np.int64]]] | None:
    """Base, dimension and lengths of shapes that differ in one dimension at most; None for others."""
    try:
        ranks = set(map(len, shapes))
        numbers = np.array(list(chain.from_iterable(shapes)))
    except (TypeError, ValueError, OverflowError):
        return None
    if len(ranks) != 1 or 0 in ranks or numbers.dtype.kind != "i":
        return None
    rows = numbers.reshape(len(shapes), -1)
    differs = np.flatnonzero((rows != rows[0]).any(axis=0))
    if len(differs) > 1:
        return None
    dim = int(differs[0]) if len(differs) else 0
    base = rows[0].tolist()
    base[dim] = 0
    return tuple(base), dim, rows[:, dim].astype(np.int64)


class FieldSchema:
    """What the rows of one field are: a dtype and their shapes, or that they are Python objects.

    Immutable, so that any number of batches may share it. Shapes are written in the shortest way that fits: one for
    all rows, one with a dimension that varies, or one per row.

    Attributes:
        dtype: element type, None for objects and for a field without a schema.
        shape: shape of every row, or what stands in its place for a nested field (None or the first row's shape).
        is_nested: True when rows may differ in shape.
        is_non_tensor: True for Python objects.
    """

    __slots__ = ("_base", "_dim", "_lengths", "_shapes", "dtype", "is_nested", "is_non_tensor", "shape")

    def __init__(
        self,
        dtype: torch.dtype | None,
        shape: Any,
        *,
        is_nested: bool = False,
        is_non_tensor: bool = False,
        per_sample_shapes: list[Any] | None = None,
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self.is_nested, self.is_non_tensor = is_nested, is_non_tensor
        self._shapes = per_sample_shapes
        self._base: tuple[int, ...] | None = None
        self._dim = 0
        self._lengths: np.ndarray[Any, np.dtype[np.int64]] = _NOTHING

    @classmethod
    def uniform(cls, dtype: torch.dtype | None, shape: Iterable[int]) -> FieldSchema:
        """Tensors of one shape."""
        return cls(dtype, torch.Size(shape))

    @classmethod
    def varying(cls, dtype: torch.dtype | None, shape: Iterable[int], dim: int, lengths: Any) -> FieldSchema:
        """Tensors whose shapes differ in dimension ``dim`` only; ``lengths`` is int64[rows] and not copied."""
        schema = cls(dtype, None, is_nested=True)
        schema._base, schema._dim, schema._shapes = tuple(shape), dim, None
        schema._lengths = np.asarray(lengths, dtype=np.int64)
        return schema

    @classmethod
    def free(cls, dtype: torch.dtype | None, shapes: list[Any]) -> FieldSchema:
        """Tensors of any shape, one per row; the list is not copied."""
        return cls(dtype, None, is_nested=True, per_sample_shapes=shapes)

    @classmethod
    def objects(cls) -> FieldSchema:
        """Python objects."""
        return cls(None, None, is_non_tensor=True)

    @classmethod
    def from_dict(cls, schema: Mapping[str, Any]) -> FieldSchema:
        """Reads the dictionary form of `BatchMeta.field_schema`."""
        shapes = schema.get("per_sample_shapes")
        out = cls(
            schema.get("dtype"),
            schema.get("shape"),
            is_nested=bool(schema.get("is_nested", False)),
            is_non_tensor=bool(schema.get("is_non_tensor", False)),
        )
        if shapes is not None:
            listed = list(shapes)
            found = _one_varying(listed)
            if found is None:
                out._shapes = listed
            else:
                out._base, out._dim, out._lengths = found
        return out

    @classmethod
    def from_wire(cls, column: Sequence[Any]) -> tuple[str, FieldSchema]:
        """Reads a column of a reply: (field, schema). See core/wire/column.go for the order of the values."""
        kind, number, _, _, form, field, shape, vary, lengths, ndims, dims = column[:11]
        dtype = DTYPES[number] if number < len(DTYPES) else None
        if kind == _OBJECT:
            return field, cls.objects()
        if form == _UNIFORM:
            return field, cls.uniform(dtype, decode_ints(shape))
        if form == _VARYING:
            return field, cls.varying(dtype, decode_ints(shape), vary, np.frombuffer(lengths, dtype="<i8"))
        if form == _FREE:
            return field, cls.free(dtype, split_shapes(ndims, decode_ints(dims)))
        return field, cls(None, None)

    @property
    def rows(self) -> int | None:
        """Number of rows described one by one, None when one description is for any number of rows."""
        if self._base is not None:
            return len(self._lengths)
        return None if self._shapes is None else len(self._shapes)

    def shapes(self, rows: int) -> list[Any]:
        """The shape of every row."""
        if self._base is not None and self._shapes is None:
            before, after = self._base[: self._dim], self._base[self._dim + 1 :]
            self._shapes = [torch.Size((*before, n, *after)) for n in self._lengths.tolist()]
        return [self.shape] * rows if self._shapes is None else list(self._shapes)

    def row_shape(self, row: int) -> Any:
        """The shape of one row."""
        if self._shapes is not None:
            return self._shapes[row]
        if self._base is not None:
            return torch.Size((*self._base[: self._dim], int(self._lengths[row]), *self._base[self._dim + 1 :]))
        return self.shape

    def to_dict(self, rows: int) -> dict[str, Any]:
        """The dictionary form of `BatchMeta.field_schema`."""
        out = {
            "dtype": self.dtype,
            "shape": self.shape,
            "is_nested": self.is_nested,
            "is_non_tensor": self.is_non_tensor,
        }
        if self.rows is not None:
            out["per_sample_shapes"] = self.shapes(rows)
        return out

    def take(self, pick: Pick) -> FieldSchema:
        """The schema of the picked rows."""
        if self.rows is None:
            return self
        if self._base is not None:
            out = FieldSchema.varying(self.dtype, self._base, self._dim, pick.array(self._lengths))
        else:
            assert self._shapes is not None
            out = FieldSchema.free(self.dtype, pick.list(self._shapes))
        out.shape, out.is_nested, out.is_non_tensor = self.shape, self.is_nested, self.is_non_tensor
        return out

    @staticmethod
    def concat(parts: Sequence[tuple[FieldSchema, int]]) -> FieldSchema:
        """The schema of all rows of (schema, number of rows), one after another."""
        first = parts[0][0]
        if all(part.rows is None and part._same(first) for part, _ in parts):
            return first
        if any(part.is_non_tensor for part, _ in parts):
            return FieldSchema.objects()
        base = first._base
        if base is not None and all(part._base == base and part._dim == first._dim for part, _ in parts):
            lengths = np.concatenate([part._lengths for part, _ in parts])
            return FieldSchema.varying(first.dtype, base, first._dim, lengths)
        shapes: list[Any] = []
        for part, rows in parts:
            shapes += part.shapes(rows)
        return FieldSchema.free(first.dtype, shapes)

    def _same(self, other: FieldSchema) -> bool:
        return self is other or (
            self.is_nested == other.is_nested
            and self.is_non_tensor == other.is_non_tensor
            and _shape_tuple(self.shape) == _shape_tuple(other.shape)
        )

    def __getstate__(self) -> tuple[Any, ...]:
        shapes = self._shapes if self._base is None else None
        state = (self.dtype, self.shape, self.is_nested, self.is_non_tensor, shapes)
        return *state, self._base, self._dim, np.ascontiguousarray(self._lengths)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        dtype, shape, nested, objects, shapes, *held = state
        FieldSchema.__init__(self, dtype, shape, is_nested=nested, is_non_tensor=objects, per_sample_shapes=shapes)
        self._base, self._dim, self._lengths = held


# Pickles of batches name it where programs import it from.
FieldSchema.__module__ = "transfer_queue.metadata"


def _shape_tuple(shape: Any) -> Any:
    return None if shape is None else tuple(shape)


class Pick:
    """A choice of rows, applied to lists and to arrays: a slice, or positions in any order with repeats."""

    __slots__ = ("_get", "_where", "size")

    def __init__(self, rows: slice | Sequence[int] | np.ndarray[Any, np.dtype[np.int64]], size: int) -> None:
        """``rows`` are valid for sequences of ``size`` rows."""
        self._where: Any = rows
        if isinstance(rows, slice):
            self.size = len(range(*rows.indices(size)))
            self._get: Callable[[Any], Any] = itemgetter(rows)
        else:
            self.size = len(rows)
            self._where = np.asarray(rows, dtype=np.int64)
            if self.size > 1:
                # A number of numpy as an index costs ten times as much as an int.
                self._get = itemgetter(*(rows.tolist() if isinstance(rows, np.ndarray) else rows))
            else:
                self._get = lambda values: [values[row] for row in rows]

    def list(self, values: list[_T]) -> list[_T]:
        picked = self._get(values)
        return picked if type(picked) is list else list(picked)

    def ints(self, values: _Numbers) -> _Numbers:
        """Like `list`, without following pointers to numbers that lie anywhere in memory."""
        if isinstance(self._where, slice):
            return values[self._where]
        picked: _Numbers = np.array(values, dtype=np.int64)[self._where].tolist()
        return picked

    def array(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        picked: np.ndarray[Any, Any] = values[self._where]
        return picked
