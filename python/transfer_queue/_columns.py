"""Values of Python as columns of the core, and back for Python work that a unit asks for.

A column goes to the core as one ``tq_column`` of ``capi/tq.h``, which points into the caller's memory: nothing is
copied here but what has no plain layout (an inner dimension cut out of a wider one, a conjugate view, a tensor of a
GPU). The core copies all bytes before the submit returns; until then a `Packed` keeps every buffer alive whose address
it lends.

Refusals name the field and come before anything is sent. Order and names of the columns are the caller's.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_int64
from itertools import chain
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Tensor

from transfer_queue._field_schema import FieldSchema, split_shapes
from transfer_queue._values import DTYPES, NUMBERS, Encoded, address_of, encode_objects, memory_at

__all__ = ["Packed", "merge_columns", "pack_lists", "pack_row", "pack_table", "parse_columns"]

TENSOR, OBJECT = 1, 2
STRIDED, OFFSETS, POINTERS, OBJECTS = 1, 2, 3, 4

_FIELDS = "4BIQq6Q"
_COLUMN_BYTES = Struct(f"={_FIELDS}").size
_structs: dict[int, Struct] = {}

_Shape = tuple[int, ...]
# Fields of a tq_column in its order; dims is a shape until all columns are known and addresses can be given.
_Column = tuple[int, int, int, int, int, int, int, Any, int, int, int, int, int]

# Kinds of a tensor class: plain memory, a jagged nested tensor, something that has to be looked at.
_PLAIN, _JAGGED, _OTHER = 0, 1, 2
_classes: dict[type, int] = {Tensor: _PLAIN, torch.nn.Parameter: _PLAIN}


class Packed:
    """Columns ready for the core.

    Attributes:
        names: field of every column.
        rows: rows of every column.
        address: address of the array of ``tq_column``, 0 without columns.
        keep: everything whose memory the columns point into; it lives as long as this object.
    """

    __slots__ = ("_columns", "address", "keep", "names", "rows")

    def __init__(self, names: list[str], columns: list[_Column], rows: int, keep: list[Any]) -> None:
        self.names, self.rows, self.keep, self._columns = names, rows, keep, columns
        dims = array("q", [n for column in columns if type(column[7]) is tuple for n in column[7]])
        at = dims.buffer_info()[0]
        flat: list[int] = []
        for column in columns:
            if type(column[7]) is tuple:
                flat += column[:7]
                flat.append(at)
                flat += column[8:]
                at += 8 * len(column[7])
            else:
                flat += column
        count = len(columns)
        packer = _structs.get(count)
        if packer is None:
            packer = _structs[count] = Struct("=" + _FIELDS * count)
        structs = array("B", packer.pack(*flat))
        self.address = structs.buffer_info()[0] if count else 0
        keep += (dims, structs)

    def __len__(self) -> int:
        """Number of columns."""
        return len(self._columns)

    def schemas(self) -> list[tuple[str, FieldSchema]]:
        """What the columns are, for metadata."""
        described = zip(self.names, self._columns, strict=True)
        return [(name, _schema(column, self.rows)) for name, column in described]


def _schema(column: _Column, rows: int) -> FieldSchema:
    kind, number, _, form, _, _, _, dims, offsets, _, ndims = column[:11]
    dtype = DTYPES[number]
    if kind == OBJECT:
        return FieldSchema.objects()
    if form == STRIDED:
        return FieldSchema.uniform(dtype, dims)
    if form == OFFSETS:
        ends = np.frombuffer(memory_at(offsets, 8 * (rows + 1)), dtype=np.int64)
        schema = FieldSchema.varying(dtype, dims, 0, np.diff(ends))
    else:
        ranks = bytes(memory_at(ndims, rows))
        numbers = np.frombuffer(memory_at(dims, 8 * sum(ranks)), dtype=np.int64).tolist()
        shapes = split_shapes(ranks, numbers)
        if len(set(shapes)) == 1:
            return FieldSchema.uniform(dtype, shapes[0])
        schema = FieldSchema.free(dtype, shapes)
    schema.shape = schema.row_shape(0) if rows else None
    return schema


def pack_table(fields: Any) -> Packed:
    """Packs a TensorDict; the rows are its first batch dimension.

    Raises:
        ValueError: a column has another number of rows, has no plain memory, mixes dtypes, or is a TensorDict itself.
    """
    if not fields.batch_size:
        raise ValueError("fields: a TensorDict without a batch dimension, want batch_size [rows]")
    rows: int = fields.batch_size[0]
    names: list[str] = []
    columns: list[_Column] = []
    keep: list[Any] = [fields]
    for name, value in _items(fields):
        names.append(name)
        if type(value) is Tensor and not value.is_nested:
            columns.append(_dense(name, value, rows, keep))
        else:
            columns.append(_any_column(name, value, rows, keep))
    return Packed(names, columns, rows, keep)


def pack_row(fields: Mapping[str, Any]) -> Packed:
    """Packs one row: tensors as they are, everything else as one opaque object.

    Raises:
        ValueError: a name that is no str, a nested tensor, a TensorDict, or a tensor without plain memory.
    """
    columns: list[_Column] = []
    keep: list[Any] = []
    for name, value in fields.items():
        if type(name) is not str:
            raise ValueError(f"field names must be str, got {name!r} of type {type(name).__name__}")
        if isinstance(value, Tensor):
            if value.is_nested:
                batch = "kv_batch_put or kv_batch_update"
                raise ValueError(f"field {name!r}: a nested tensor holds several samples, use {batch}")
            columns.append(_dense(name, _plain(name, _with_memory(name, value))[1].unsqueeze(0), 1, keep))
        else:
            columns.append(_object_column(name, [_opaque(name, value)], keep))
    return Packed(list(fields), columns, 1, keep)


def pack_lists(names: list[str], values: Sequence[Any], rows: int) -> Packed:
    """Packs columns that Python work made: each a list with one value per row, an array, or a tensor.

    Raises:
        ValueError: as `pack_table`.
    """
    keep: list[Any] = []
    columns = [_any_column(name, value, rows, keep) for name, value in zip(names, values, strict=True)]
    return Packed(list(names), columns, rows, keep)


def _items(fields: Any) -> Iterable[tuple[str, Any]]:
    """(field, value) of a TensorDict; rows of a lazy stack that do not fit one tensor come as a list."""
    if not isinstance(fields, LazyStackedTensorDict) or isinstance(fields, NonTensorStack):
        items: Iterable[tuple[str, Any]] = fields.items()
        return items
    return _lazy_items(fields)


def _lazy_items(fields: Any) -> Iterator[tuple[str, Any]]:
    for name in sorted(fields.keys()):
        try:
            yield name, fields.get(name)
        except RuntimeError:
            yield name, list(fields.get(name, as_list=True))


def _opaque(field: str, value: Any) -> Any:
    if not is_tensor_collection(value):
        return value
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if is_non_tensor(value):
        return value.data
    raise _nested_table(field, value)


def _nested_table(field: str, value: Any) -> ValueError:
    return ValueError(
        f"field {field!r}: a value of type {type(value).__name__} cannot be a column, want one field each"
    )


def _wrong_rows(field: str, got: Any, want: int) -> ValueError:
    return ValueError(f"field {field!r}: {got} rows, want {want}")


def _any_column(field: str, value: Any, rows: int, keep: list[Any]) -> _Column:
    if isinstance(value, Tensor):
        return _tensor_column(field, value, rows, keep)
    if isinstance(value, NonTensorStack):
        value = value.tolist()
    elif isinstance(value, NonTensorData):
        # tensordict keeps an array of objects or strings whole, with one element per row.
        value = value.data
        if not (isinstance(value, np.ndarray) and value.shape[:1] == (rows,)):
            return _constant_column(field, value, rows, keep)
        value = list(value)
    elif is_tensor_collection(value):
        if not is_non_tensor(value):
            raise _nested_table(field, value)
        return _constant_column(field, value.data, rows, keep)
    elif isinstance(value, np.ndarray):
        value = _array_column(value)
        if isinstance(value, Tensor):
            return _dense(field, value, rows, keep)
    if not isinstance(value, list):
        raise ValueError(f"field {field!r}: a value of type {type(value).__name__} cannot be a column")
    if len(value) != rows:
        raise _wrong_rows(field, len(value), rows)
    return _list_column(field, value, keep)


def _array_column(value: np.ndarray[Any, Any]) -> Tensor | list[Any]:
    """Numbers as a tensor, as tensordict would; anything else by row."""
    if value.ndim and value.dtype.kind in "biufc":
        try:
            return torch.from_numpy(value if value.flags.writeable and value.flags.c_contiguous else value.copy("C"))
        except (TypeError, ValueError):  # a type that torch does not have, foreign byte order
            pass
    return list(value)


def _tensor_column(field: str, value: Tensor, rows: int, keep: list[Any]) -> _Column:
    kind = _classes.get(type(value))
    if kind is None:
        kind = _classify(value)
    if kind == _JAGGED:
        return _jagged(field, value, rows, keep)
    value = _with_memory(field, value)
    if value.is_nested:
        parts = list(value.unbind())
        if len(parts) != rows:
            raise _wrong_rows(field, len(parts), rows)
        return _rows_of_tensors(field, parts, 1, keep)
    return _dense(field, value, rows, keep)


def _classify(value: Tensor) -> int:
    """The kind of a tensor class, remembered. A class that handles operators itself has no memory of its own."""
    cls = type(value)
    if value.is_nested and value.layout is torch.jagged:
        kind = _JAGGED
    elif cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        kind = _PLAIN
    else:
        kind = _OTHER
    _classes[cls] = kind
    return kind


def _with_memory(field: str, value: Tensor) -> Tensor:
    """The tensor as one of the base class, refused when it has no plain memory."""
    cls = type(value)
    if cls is Tensor:
        return value
    kind_of_class = _classes.get(cls)
    if (_classify(value) if kind_of_class is None else kind_of_class) == _OTHER:
        fake = sys.modules.get("torch._subclasses.fake_tensor")
        kind = "fake tensor" if fake and isinstance(value, fake.FakeTensor) else "tensor"
        raise ValueError(f"field {field!r}: a {kind} of type {cls.__name__} has no memory to store")
    return value.as_subclass(Tensor)  # type: ignore[no-any-return, unused-ignore]


def _plain(field: str, value: Tensor) -> tuple[int, Tensor]:
    """Number of the dtype, and the tensor on the CPU without pending operations; refused when that cannot be."""
    if value.layout is not torch.strided:
        raise ValueError(f"field {field!r}: a sparse tensor (layout {value.layout}) cannot be stored, use to_dense()")
    if not value.is_cpu:
        if value.device.type == "meta":
            raise ValueError(f"field {field!r}: a tensor on device meta has no memory to store")
        value = value.detach().cpu()
    number = NUMBERS.get(value.dtype)
    if number is None:
        kind = "quantized dtype" if value.is_quantized else "dtype"
        raise ValueError(f"field {field!r}: {kind} {value.dtype} cannot be stored")
    if value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return number, value


def _address(field: str, value: Tensor) -> int:
    """Address of the first element; a tensor inside a transformation of torch.func has none."""
    try:
        address = value.data_ptr()
    except RuntimeError:
        address = 0
    if not address and value.numel():
        raise ValueError(f"field {field!r}: a tensor of type {type(value).__name__} has no memory to store")
    return address


def _dense(field: str, value: Tensor, rows: int, keep: list[Any]) -> _Column:
    """A tensor whose first dimension is the rows."""
    number = NUMBERS.get(value.dtype)
    if number is None or value.layout is not torch.strided or not value.is_cpu or value.is_conj() or value.is_neg():
        number, value = _plain(field, value)
        keep.append(value)
    shape = value.shape
    if not shape or shape[0] != rows:
        raise _wrong_rows(field, shape[0] if shape else "a number without", rows)
    if not value.is_contiguous() and not _rows_contiguous(value):
        value = value.detach().contiguous()
    keep.append(value)
    base = _address(field, value)
    dims = tuple(shape[1:])
    step = value.stride(0) * value.element_size()
    return TENSOR, number, 1 if dims else 0, STRIDED, len(dims), base, step, dims, 0, 0, 0, 0, 0


def _rows_contiguous(value: Tensor) -> bool:
    """True when every row is contiguous, however far apart they are."""
    want = 1
    for size, stride in zip(reversed(value.shape[1:]), reversed(value.stride()[1:]), strict=True):
        if size != 1 and stride != want:
            return value.numel() == 0
        want *= size
    return True


def _jagged(field: str, value: Any, rows: int, keep: list[Any]) -> _Column:
    ragged = value._ragged_idx
    # The attribute is 150 times cheaper than the differentiable values().
    values: Tensor = value._values if hasattr(value, "_values") else value.values()
    offsets, lengths = value.offsets(), value.lengths()
    number, values = _plain(field, _with_memory(field, values))
    if offsets.dtype is not torch.int64 or not offsets.is_cpu:
        offsets = offsets.to("cpu", torch.int64)
    offsets = offsets.contiguous()
    if len(offsets) != rows + 1:
        raise _wrong_rows(field, len(offsets) - 1, rows)
    at = offsets.data_ptr()
    if lengths is None and ragged == 1 and values.is_contiguous():
        first, last = c_int64.from_address(at).value, c_int64.from_address(at + 8 * rows).value
        if first == 0 and last == values.shape[0]:
            keep += (values, offsets)
            dims = tuple(values.shape)
            return TENSOR, number, 1, OFFSETS, len(dims), values.data_ptr(), 0, dims, at, 0, 0, 0, 0
    starts = offsets.tolist()
    sizes = offsets.diff().tolist() if lengths is None else lengths.tolist()
    try:
        parts = [values.narrow(ragged - 1, start, size) for start, size in zip(starts, sizes, strict=False)]
    except RuntimeError as error:
        raise ValueError(f"field {field!r}: offsets of the jagged tensor do not fit its values: {error}") from error
    return _rows_of_tensors(field, parts, ragged, keep)


def _rows_of_tensors(field: str, parts: list[Tensor], ragged: int, keep: list[Any]) -> _Column:
    """A tensor per row, anywhere in memory."""
    dtypes = set(map(attrgetter("dtype"), parts))
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"field {field!r}: tensors of dtypes {names}, want one dtype")
    if not parts:
        raise _wrong_rows(field, "no", 1)
    number = NUMBERS.get(parts[0].dtype, 0)
    odd = not number or not all(map(Tensor.is_contiguous, parts)) or not all(map(attrgetter("is_cpu"), parts))
    if odd or any(map(Tensor.is_conj, parts)) or any(map(Tensor.is_neg, parts)):
        number = _plain(field, parts[0])[0]
        parts = [_plain(field, part)[1].detach().contiguous() for part in parts]
    try:
        addresses = list(map(Tensor.data_ptr, parts))
    except RuntimeError:
        addresses = [0]
    if not all(addresses):
        addresses = [_address(field, part) for part in parts]
    shapes = list(map(attrgetter("shape"), parts))
    pointers = array("Q", addresses)
    ndims = array("B", map(len, shapes))
    dims = array("q", chain.from_iterable(shapes))
    keep += (parts, pointers, ndims, dims)
    ragged = ragged if any(ndims) else 0
    return (
        *(TENSOR, number, ragged, POINTERS, 0, 0, 0),
        *(dims.buffer_info()[0], 0, pointers.buffer_info()[0], ndims.buffer_info()[0], 0, 0),
    )


def _list_column(field: str, values: list[Any], keep: list[Any]) -> _Column:
    """A column of tensors when all values are plain tensors, else of objects."""
    if values and isinstance(values[0], Tensor) and all(isinstance(value, Tensor) for value in values):
        # Attributes are read by map: a thousand small tensors are a usual column.
        layouts = set(map(attrgetter("layout"), values))
        if layouts == {torch.strided} and not any(map(attrgetter("is_nested"), values)):
            if set(map(type, values)) != {Tensor}:
                values = [_with_memory(field, value) for value in values]
            return _rows_of_tensors(field, values, 1, keep)
    return _object_column(field, values, keep)


def _object_column(field: str, values: Sequence[Any], keep: list[Any]) -> _Column:
    return _encoded_column(encode_objects(field, values), keep)


def _constant_column(field: str, value: Any, rows: int, keep: list[Any]) -> _Column:
    """One value for all rows, encoded once."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return _dense(field, _with_memory(field, value).detach().expand(rows, *value.shape), rows, keep)
    one = encode_objects(field, [value])
    start = address_of(one.data) if one.pointers is None else one.pointers[0]
    keep.append(one)
    return _encoded_column(
        Encoded(one.sizes * rows, one.codecs * rows, None, array("Q", [start]) * rows, one.keep), keep
    )


def _encoded_column(column: Encoded, keep: list[Any]) -> _Column:
    codecs = array("B", column.codecs)
    keep += (column, codecs)
    base = address_of(column.data) if column.pointers is None else 0
    pointers = 0 if column.pointers is None else column.pointers.buffer_info()[0]
    sizes = column.sizes.buffer_info()[0]
    return OBJECT, 0, 0, OBJECTS, 0, base, 0, (), 0, pointers, 0, sizes, codecs.buffer_info()[0]


def merge_columns(
    merge_fn: Callable[[Any, Any], Any],
    names: list[str],
    old: Sequence[list[Any]],
    new: Sequence[list[Any]],
    what: Callable[[str, int], str] = "merge_fn failed for field {!r}, row {}".format,
) -> Packed:
    """Packs ``merge_fn(old, new)`` of every cell.

    Args:
        merge_fn: the user's function; what it raises comes out.
        names: field of every column.
        old: stored values by column and row.
        new: the same for the values of the update.
        what: describes a cell, given field and row, for error messages.

    Raises:
        TypeError: a result has another dtype or kind than the stored value.
    """
    merged = []
    for name, olds, news in zip(names, old, new, strict=True):
        values = []
        for row, (was, update) in enumerate(zip(olds, news, strict=True)):
            try:
                value = merge_fn(was, update)
                _check_merged(was, value)
            except BaseException as error:  # SystemExit too must not end a thread of the queue
                raise RuntimeError(what(name, row)) from error
            values.append(value)
        merged.append(values)
    return pack_lists(names, merged, len(merged[0]) if merged else 0)


def _check_merged(was: Any, value: Any) -> None:
    if isinstance(was, Tensor):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if got != was.dtype:
            raise TypeError(f"merge_fn must keep dtype {was.dtype}, got {got}")
        if value.is_nested:
            raise TypeError("merge_fn returned a nested tensor, want one value")
    elif isinstance(value, Tensor):
        raise TypeError("the result of merge_fn must remain non-tensor, got a tensor")


def parse_columns(parser: Any, columns: dict[str, Any], rows: int) -> Packed:
    """Packs what a data_parser makes of the columns of a put; names and rows stay as they were.

    Args:
        parser: the user's function; what it raises comes out.
        columns: field -> tensor with a leading dimension, or list with one value per row.
        rows: number of rows.

    Raises:
        TypeError: the parser cannot be called or does not return a dict.
        ValueError: it changed the keys or the number of elements.
    """
    if not callable(parser):
        raise TypeError(f"data_parser must be callable, got {type(parser).__name__}")
    names = list(columns)
    parsed = parser(columns)
    if not isinstance(parsed, dict):
        raise TypeError(f"data_parser must return a dict, got {type(parsed).__name__}")
    if parsed.keys() != set(names):
        raise ValueError(f"data_parser must not change dict keys: got {sorted(map(str, parsed))}, want {sorted(names)}")
    values = []
    for name in names:
        value = list(parsed[name]) if isinstance(parsed[name], tuple) else parsed[name]
        got = _elements(value)
        if got != rows:
            raise ValueError(f"data_parser changed the number of elements of field {name!r}: got {got}, want {rows}")
        values.append(value)
    return pack_lists(names, values, rows)


def _elements(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return (value.size(0) if isinstance(value, Tensor) else value.shape[0]) if value.ndim else "a single value"
    if isinstance(value, list) or (is_tensor_collection(value) and is_non_tensor(value)):
        return len(value)
    return f"a value of type {type(value).__name__}"
