"""A core of a few lines: it reads packed columns from memory and lays results out as ``capi/tq.h`` says.

Nothing of the package is used for it but the addresses under test, so that both sides cannot agree on a mistake.
Memory of a result is filled with garbage when its token comes back, so that a tensor that uses it too long is noticed.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

COLUMN = struct.Struct("=BBBBIQqQQQQQQ")
RESULT = struct.Struct("=BBBBIQQQQQQQqqQQ")

# Bytes of an element by dtype number; the numbers are wire format.
ITEM_BYTES = [0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1]

TENSOR, OBJECT = 1, 2
DENSE, JAGGED, NESTED, OBJECT_ROWS = 1, 2, 3, 4


class Cell(NamedTuple):
    shape: tuple[int, ...]
    data: bytes
    codec: int


class Column(NamedTuple):
    kind: int
    dtype: int
    ragged: int
    form: int
    cells: list[Cell]


def _ints(address: int, count: int) -> list[int]:
    return (ctypes.c_int64 * count).from_address(address)[:] if count else []


def _bytes(address: int, count: int) -> bytes:
    return bytes((ctypes.c_char * count).from_address(address)) if count else b""


def take(packed: Any) -> dict[str, Column]:
    """Copies what the packed columns point to."""
    size = COLUMN.size
    return {
        name: _take(COLUMN.unpack(_bytes(packed.address + i * size, size)), packed.rows)
        for i, name in enumerate(packed.names)
    }


def _take(raw: tuple[int, ...], rows: int) -> Column:
    kind, dtype, ragged, form, rank, base, step, dims, offsets, pointers, ndims, sizes, codecs = raw
    item = ITEM_BYTES[dtype]
    cells = []
    if form == 1:
        shape = tuple(_ints(dims, rank))
        cells = [Cell(shape, _bytes(base + i * step, prod(shape) * item), 0) for i in range(rows)]
    elif form == 2:
        shape, ends = tuple(_ints(dims, rank)), _ints(offsets, rows + 1)
        row_bytes = prod(shape[1:]) * item
        for start, end in itertools.pairwise(ends):
            assert 0 <= start <= end <= shape[0]
            cells.append(
                Cell((end - start, *shape[1:]), _bytes(base + start * row_bytes, (end - start) * row_bytes), 0)
            )
    elif form == 3:
        at = 0
        for address, ndim in zip(_ints(pointers, rows), _bytes(ndims, rows), strict=True):
            shape = tuple(_ints(dims + 8 * at, ndim))
            at += ndim
            cells.append(Cell(shape, _bytes(address, prod(shape) * item), 0))
    elif form == 4:
        starts = _ints(pointers, rows) if pointers else None
        at = base
        for i, (count, codec) in enumerate(zip(_ints(sizes, rows), _bytes(codecs, rows), strict=True)):
            cells.append(Cell((), _bytes(starts[i] if starts else at, count), codec))
            at += count
    else:
        raise AssertionError(f"form {form}")
    assert (kind == OBJECT) == (form == 4)
    return Column(kind, dtype, ragged, form, cells)


class Core:
    """Memory of results, by token."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Any, int, int]] = {}
        self.released: list[int] = []
        self._tokens = itertools.count(1)

    def release(self, token: int) -> None:
        assert token in self.held, f"token {token} released twice or never given"
        buffer, address, size = self.held.pop(token)
        ctypes.memset(address, 0xDD, size)
        self.released.append(token)
        del buffer

    def hold(self, data: bytes) -> tuple[int, int]:
        """(address, token) of memory with this content, aligned to 64 bytes."""
        if not data:
            return 0, 0
        buffer = (ctypes.c_char * (len(data) + 64))()
        address = (ctypes.addressof(buffer) + 63) // 64 * 64
        ctypes.memmove(address, data, len(data))
        token = next(self._tokens)
        self.held[token] = (buffer, address, len(data))
        return address, token

    def reply(
        self, columns: Sequence[Column], *, inline: bool = False, shape: Callable[..., Any] | None = None
    ) -> Reply:
        """Result columns as the core computes them; inline ones lie in the reply and have no token."""
        return Reply(self, list(columns), inline, shape or result_form)


def result_form(column: Column) -> tuple[int, int]:
    """(form, ragged) of a result column."""
    shapes = [cell.shape for cell in column.cells]
    ranks = set(map(len, shapes))
    if column.kind == OBJECT:
        return OBJECT_ROWS, 0
    if ranks == {0}:
        return DENSE, 0
    if len(ranks) > 1:
        return NESTED, 0
    ragged = column.ragged if 0 < column.ragged <= len(shapes[0]) else 1
    differ = {dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1}
    if differ <= {ragged - 1}:
        return JAGGED, ragged
    return (JAGGED, 1) if differ == {0} else (NESTED, 0)


def dense_form(column: Column) -> tuple[int, int]:
    """As `result_form` with TQ_DENSE_LAYOUT."""
    if column.kind == TENSOR and len({cell.shape for cell in column.cells}) == 1:
        return DENSE, 0
    return result_form(column)


def job_form(column: Column) -> tuple[int, int]:
    """The form of a column of Python work."""
    form, _ = dense_form(column)
    return (NESTED if form == JAGGED else form), 0


class Reply:
    """An array of result columns at ``address``."""

    def __init__(
        self, core: Core, columns: list[Column], inline: bool, shape: Callable[[Column], tuple[int, int]]
    ) -> None:
        self._core, self._inline = core, inline
        self.rows = len(columns[0].cells) if columns else 0
        self._keep: list[Any] = []
        self._offsets: dict[tuple[int, ...], tuple[int, int]] = {}
        packed = b"".join(self._pack(column, *shape(column)) for column in columns)
        self.address = self._lay(packed)

    def _lay(self, data: bytes) -> int:
        """Address of data inside the reply."""
        if not data:
            return 0
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        self._keep.append(buffer)
        return ctypes.addressof(buffer)

    def _memory(self, data: bytes) -> tuple[int, int]:
        return (self._lay(data), 0) if self._inline else self._core.hold(data)

    def _pack(self, column: Column, form: int, ragged: int) -> bytes:
        shapes = [cell.shape for cell in column.cells]
        data = b"".join(cell.data for cell in column.cells)
        dims: list[int] = []
        offsets = token = number = least = most = ndims = codecs = 0
        if form == DENSE:
            dims = list(shapes[0])
        elif form == JAGGED:
            dims = list(shapes[0])
            lengths = tuple(shape[ragged - 1] for shape in shapes)
            dims[ragged - 1], least, most = sum(lengths), min(lengths), max(lengths)
            offsets, token, number = self._shared_offsets(lengths)
            data = _interleave(column, ragged - 1)
        elif form == NESTED:
            dims = [n for shape in shapes for n in shape]
            ndims = self._lay(bytes(map(len, shapes)))
        else:
            ends = list(itertools.accumulate((len(cell.data) for cell in column.cells), initial=0))
            offsets = self._lay(struct.pack(f"{len(ends)}q", *ends))
            codecs = self._lay(bytes(cell.codec for cell in column.cells))
        base, owner = self._memory(data)
        at = self._lay(struct.pack(f"{len(dims)}q", *dims))
        head = (column.kind, column.dtype, ragged, form, len(dims), base, len(data), owner, at)
        return RESULT.pack(*head, offsets, token, number, least, most, ndims, codecs)

    def _shared_offsets(self, lengths: tuple[int, ...]) -> tuple[int, int, int]:
        """(address, token, id): the token belongs to the first column that has these lengths."""
        if lengths in self._offsets:
            address, number = self._offsets[lengths]
            return address, 0, number
        ends = list(itertools.accumulate(lengths, initial=0))
        address, token = self._memory(struct.pack(f"{len(ends)}q", *ends))
        number = len(self._offsets) + 1
        self._offsets[lengths] = (address, number)
        return address, token, number


def _interleave(column: Column, dim: int) -> bytes:
    """``values()`` of a jagged tensor: rows side by side along a dimension."""
    if dim == 0:
        return b"".join(cell.data for cell in column.cells)
    out = []
    outer = prod(column.cells[0].shape[:dim])
    for part in range(outer):
        for cell in column.cells:
            size = len(cell.data) // outer
            out.append(cell.data[part * size : (part + 1) * size])
    return b"".join(out)
