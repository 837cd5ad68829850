"""Result columns of the core as a TensorDict.

The core allocates and fills the memory of a result; here it only gets tensors around it. A column is one owner object:
a ctypes array at the column's address whose death gives the memory back, which happens when the last view of the
column dies. Columns that lie in the reply itself are copied, because the reply is freed when it has been read.

==============  ==============================================================================
form            column
==============  ==============================================================================
``DENSE``       tensor ``[rows, ...]``
``JAGGED``      jagged nested tensor; equal lengths within a result share one offsets tensor,
                without which torch refuses to combine two columns
``NESTED``      strided nested tensor when all rows have one rank, else a stack of tensors
``OBJECTS``     stack of Python values
==============  ==============================================================================
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter, methodcaller
from struct import Struct
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from transfer_queue._field_schema import split_shapes
from transfer_queue._values import DTYPES, decode_objects, memory_at

__all__ = ["Lease", "ResultColumn", "build", "jagged", "job_values", "parser_input", "read_columns", "table"]

DENSE, JAGGED, NESTED, OBJECT_ROWS = 1, 2, 3, 4

Release = Callable[[int], Any]

_RESULT = Struct("=4BI7Q2q2Q")


class ResultColumn(NamedTuple):
    """One ``tq_result_column`` of ``capi/tq.h``, field by field."""

    kind: int
    dtype: int
    ragged: int
    form: int
    rank: int
    base: int
    size: int
    token: int
    dims: int
    offsets: int
    offsets_token: int
    offsets_id: int
    min_length: int
    max_length: int
    ndims: int
    codecs: int


def read_columns(address: int, count: int) -> list[ResultColumn]:
    """Reads an array of ``tq_result_column``."""
    raw = bytes(memory_at(address, _RESULT.size * count))
    return [ResultColumn._make(fields) for fields in _RESULT.iter_unpack(raw)]


class Lease(ctypes.c_char * (1 << 46)):  # type: ignore[misc]  # mypy sees no class in an array type
    """Memory of the core that a tensor views; its death gives the token back, but not in a forked child.

    One type for all lengths: what a tensor may touch is bounded by the tensor. The finalizer may run on any thread and
    inside the garbage collector, so the release function must neither block nor take a lock. And it has no line of
    Python, between which a signal handler may raise: the error would be ignored, and the memory lost.
    """

    end: Callable[[], Any] = int
    __del__ = property(attrgetter("end"))


class _Releaser:
    """A release function, for as long as this process is the one that may call it."""

    __slots__ = ("__weakref__", "release")

    def __init__(self, release: Release) -> None:
        self.release = release
        _releasers.add(self)


_releasers: weakref.WeakSet[_Releaser] = weakref.WeakSet()
_latest = _Releaser(int)


def _releaser(release: Release) -> _Releaser:
    global _latest
    latest = _latest
    if latest.release is not release:
        _latest = latest = _Releaser(release)
    return latest


def _after_fork() -> None:
    for releaser in _releasers:
        releaser.release = int  # does nothing with a token
    _releasers.clear()


os.register_at_fork(after_in_child=_after_fork)


def _lease(address: int, token: int, releaser: _Releaser) -> Lease:
    lease: Lease = Lease.from_address(address)
    lease.end = functools.partial(methodcaller("release", token), releaser)
    return lease


def _int64s(address: int, count: int) -> list[int]:
    return (ctypes.c_int64 * count).from_address(address)[:] if count else []


def _dtype(number: int) -> torch.dtype:
    dtype = DTYPES[number] if number < len(DTYPES) else None
    if dtype is None:
        raise ValueError(f"dtype number {number} is unknown to torch {torch.__version__}")
    return dtype


class _Reply:
    """The columns of one reply while they are turned into tensors."""

    def __init__(self, columns: Sequence[ResultColumn], rows: int, release: Release) -> None:
        self.columns, self.rows, self.release, self.releaser = columns, rows, release, _releaser(release)
        self._lengths: dict[int, _Lengths] = {}
        # Tokens that no owner object has yet.
        self._open = {token for column in columns for token in (column.token, column.offsets_token) if token}

    def memory(self, address: int, size: int, token: int, dtype: torch.dtype) -> Tensor:
        """One-dimensional tensor over ``size`` bytes, which it owns."""
        if not size:
            self.drop(token)
            return torch.empty(0, dtype=dtype)
        count = size // dtype.itemsize
        if not token:
            return _copy(address, size, dtype)
        if token not in self._open:
            raise ValueError(f"token {token} is given twice in one reply")
        lease = _lease(address, token, self.releaser)
        self._open.discard(token)
        return torch.frombuffer(lease, dtype=dtype, count=count)

    def lengths(self, column: ResultColumn) -> _Lengths:
        """Lengths of the rows of a jagged column: the same object for the same id.

        The offsets are copied: torch hands this very object on to clones of the column, which would otherwise hold
        memory of the result for as long as they live.
        """
        shared = self._lengths.get(column.offsets_id)
        if shared is None:
            shared = _Lengths(
                _copy(column.offsets, 8 * (self.rows + 1), torch.int64), column.min_length, column.max_length, {}
            )
            if column.offsets_id:
                self._lengths[column.offsets_id] = shared
        self.drop(column.offsets_token)
        return shared

    def drop(self, token: int) -> None:
        """Gives a token back at once, unless an owner object has it."""
        if token in self._open:
            self.release(token)
            self._open.discard(token)

    def close(self) -> None:
        """Gives back all tokens that nobody took, after a failure for example."""
        for token in self._open:
            self.release(token)
        self._open.clear()


def build(names: Sequence[str], address: int, rows: int, release: Release) -> TensorDict:
    """Makes a TensorDict of a reply's columns.

    Args:
        names: field of every column.
        address: address of the array of ``tq_result_column``.
        rows: rows of every column.
        release: called once with every token, when the memory behind it is no longer used; see `Lease`.

    Returns:
        Columns sorted by name, batch size ``[rows]``; without columns an empty one of batch size ``[0]``.

    Raises:
        ValueError: a stored Python value cannot be read here.
    """
    columns = read_columns(address, len(names))
    if not columns:
        return TensorDict({}, batch_size=[0])
    reply = _Reply(columns, rows, release)
    try:
        made = {name: _build_column(name, column, reply) for name, column in zip(names, columns, strict=True)}
    finally:
        reply.close()
    return _table(dict(sorted(made.items())), torch.Size([rows]))


def _checked_table(columns: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    return TensorDict(columns, batch_size=batch_size)


# Without its checks, which take longer than the whole rest of a small get. tensordict has it for its own results.
_table: Callable[[dict[str, Any], torch.Size], TensorDict] = getattr(TensorDict, "_new_unsafe", _checked_table)


class _Lengths(NamedTuple):
    """Offsets of the rows of jagged columns, and the shortest and the longest row."""

    offsets: Tensor
    shortest: int
    longest: int
    cache: dict[str, Tensor]  # these two as torch keeps them; it shares them among tensors of the same offsets, too


def _public_jagged(values: Tensor, lengths: _Lengths, ragged: int) -> Tensor:
    jagged: Tensor = torch.nested.nested_tensor_from_jagged(
        values, lengths.offsets, jagged_dim=ragged, min_seqlen=lengths.shortest, max_seqlen=lengths.longest
    )
    return jagged


def _direct_jagged(values: Tensor, lengths: _Lengths, ragged: int) -> Tensor:
    """The same tensor without the dispatch of the public function, which takes three times as long."""
    if not lengths.cache:
        lengths.cache.update(min_seqlen=_length(lengths.shortest), max_seqlen=_length(lengths.longest))
    jagged: Tensor = _nested_class(values, lengths.offsets, _ragged_idx=ragged, _metadata_cache=lengths.cache)
    return jagged


def _works(make: Callable[[Tensor, _Lengths, int], Tensor]) -> bool:
    """Whether torch's internals are as `_direct_jagged` expects them."""
    try:
        made = make(torch.arange(3.0), _Lengths(torch.tensor([0, 1, 3]), 1, 2, {}), 1)
        rows = [row.tolist() for row in made.unbind()]
        return rows == [[0.0], [1.0, 2.0]] and tuple(made.to_padded_tensor(0.0).shape) == (2, 2)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


try:
    from torch.nested._internal.nested_tensor import NestedTensor as _nested_class
    from torch.nested._internal.nested_tensor import _store_val_in_tensor as _length
except ImportError:
    _jagged = _public_jagged
else:
    _jagged = _direct_jagged if _works(_direct_jagged) else _public_jagged


def jagged(values: Tensor, offsets: Tensor, ragged: int, shortest: int, longest: int) -> Tensor:
    """Jagged nested tensor over values and offsets, ragged in dimension ``ragged``, with the limits of its lengths."""
    make = _public_jagged if values.requires_grad else _jagged
    return make(values, _Lengths(offsets, shortest, longest, {}), ragged)


def table(columns: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """A TensorDict of columns that are known to fit."""
    return _table(columns, batch_size) if device is None else TensorDict(columns, batch_size=batch_size, device=device)


def _build_column(name: str, column: ResultColumn, reply: _Reply) -> Any:
    if column.form == OBJECT_ROWS:
        values = _decode_column(name, column, reply.rows)
        reply.drop(column.token)
        return stack_of(values)
    flat = reply.memory(column.base, column.size, column.token, _dtype(column.dtype))
    if column.form == DENSE:
        return flat.reshape(reply.rows, *_int64s(column.dims, column.rank))
    if column.form == JAGGED:
        return _jagged(flat.reshape(_int64s(column.dims, column.rank)), reply.lengths(column), column.ragged)
    if column.form == NESTED:
        return _nested(flat, _free_shapes(column, reply.rows))
    raise ValueError(f"field {name!r}: result form {column.form} is unknown")


def _decode_column(name: str, column: ResultColumn, rows: int) -> list[Any]:
    codecs = bytes(memory_at(column.codecs, rows))
    return decode_objects(column.base, _int64s(column.offsets, rows + 1), codecs, name)


def _free_shapes(column: ResultColumn, rows: int) -> list[torch.Size]:
    """Shape of every row of a nested column."""
    ranks = bytes(memory_at(column.ndims, rows))
    return split_shapes(ranks, _int64s(column.dims, sum(ranks)))


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _nested(flat: Tensor, shapes: Sequence[torch.Size]) -> Any:
    """Rows that differ in more than the ragged dimension, packed in ``flat``."""
    ranks = set(map(len, shapes))
    if len(ranks) != 1 or ranks == {0}:
        return stack_of(_split(flat, shapes))
    view = getattr(torch, "_nested_view_from_buffer", None)
    if view is None:
        return torch.nested.nested_tensor(_split(flat, shapes), layout=torch.strided)
    strides = [[prod(shape[dim + 1 :]) for dim in range(len(shape))] for shape in shapes]
    starts = list(accumulate(map(prod, shapes[:-1]), initial=0))
    return view(flat, torch.tensor(shapes), torch.tensor(strides), torch.tensor(starts))


def _member(value: Any) -> NonTensorData:
    """``NonTensorData(data=value)`` for any value, at a quarter of the price."""
    member: NonTensorData = NonTensorData.__new__(NonTensorData)
    write = object.__setattr__
    write(member, "_tensordict", TensorDict._new_unsafe({}, batch_size=_NO_BATCH, device=None))
    write(member, "_non_tensordict", {"data": value, "_metadata": None, "_is_non_tensor": True})
    write(member, "_is_initialized", True)
    return member


_NO_BATCH = torch.Size([])


def _state(member: Any) -> Any:
    """Everything a NonTensorData consists of, for a comparison."""
    own = dict(member.__dict__)
    inner = own.pop("_tensordict")
    return own, type(inner), dict(inner.__dict__)


def _has_fast_member() -> bool:
    """True when `_member` makes what the constructor of this version of tensordict makes."""
    try:
        return all(_state(_member(value)) == _state(NonTensorData(data=value)) for value in ("a", (1,), {"a": [1]}))
    except (AttributeError, TypeError, KeyError):
        return False


_fast_member = _has_fast_member()


def stack_of(values: list[Any]) -> NonTensorStack:
    """Column of any Python values, one per row; a list stays the value of one row."""
    if not _fast_member:
        return NonTensorStack(*[NonTensorData(data=value) for value in values])
    return NonTensorStack(*map(_member, values))


def job_values(name: str, column: ResultColumn, rows: int) -> list[Any]:
    """The value of every row as user code may have it: a tensor with memory of its own, or an object.

    Args:
        name: field, for error messages.
        column: points into memory that is valid only until the job is done.
        rows: number of rows.
    """
    if column.form == OBJECT_ROWS:
        return _decode_column(name, column, rows)
    flat = _copy(column.base, column.size, _dtype(column.dtype))
    if column.form == DENSE:
        return list(flat.reshape(rows, *_int64s(column.dims, column.rank)).unbind())
    if column.form == JAGGED:
        return list(_split_jagged(flat, column, rows))
    return _split(flat, _free_shapes(column, rows))


def parser_input(name: str, column: ResultColumn, rows: int) -> Any:
    """A column as a data_parser gets it: a tensor when all rows have one shape, else a list of tensors or objects."""
    if column.form == OBJECT_ROWS:
        return _decode_column(name, column, rows)
    flat = _copy(column.base, column.size, _dtype(column.dtype))
    if column.form == NESTED:
        return _split(flat, _free_shapes(column, rows))
    dims = _int64s(column.dims, column.rank)
    if column.form == DENSE:
        return flat.reshape(rows, *dims)
    if column.min_length != column.max_length:
        return list(_split_jagged(flat, column, rows))
    dim = column.ragged - 1
    return flat.reshape(*dims[:dim], rows, column.max_length, *dims[dim + 1 :]).movedim(dim, 0).contiguous()


def _copy(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """One-dimensional tensor with memory of its own."""
    out = torch.empty(size // dtype.itemsize, dtype=dtype)
    if size:
        ctypes.memmove(out.data_ptr(), address, size)
    return out


def _split_jagged(flat: Tensor, column: ResultColumn, rows: int) -> Sequence[Tensor]:
    dims = _int64s(column.dims, column.rank)
    ends = _int64s(column.offsets, rows + 1)
    lengths = [end - start for start, end in pairwise(ends)]
    return torch.split(flat.reshape(dims), lengths, dim=column.ragged - 1)
