"""How one Python value becomes bytes in a unit, and how the bytes become the value again.

A value keeps its type and is equal bit for bit. Which codec wrote it is kept beside it, so a column may mix them. The
numbers and the formats are storage format: they stay readable for ever, new ones are appended.

======  =========================================================================================================
codec   bytes
======  =========================================================================================================
0       pickle, protocol 5; tensors by their own elements, classes and functions of ``__main__`` by value
1       a str in UTF-8; lone surrogates pass
2       bytes as they are
3       none at all: the value is None
4       a numpy array: header (below), then its elements in C or Fortran order
======  =========================================================================================================

::

    array header, little-endian        0      1      2        4           8
                                       | 1 u8 | flags | ndim u16 | n u32 | ndim * i64 | dtype n bytes | zeros to 16 |
    flags: 1 Fortran order, 2 the dtype is a pickle instead of its ``str``

Codecs 1 to 4 are for exactly these types. Their subclasses and everything else are pickled.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from transfer_queue._dtypes import NAMES

__all__ = ["DTYPES", "NUMBERS", "Encoded", "address_of", "decode_objects", "encode_objects", "memory_at"]

PICKLE, STR, BYTES, NONE, NDARRAY = range(5)

# torch's dtype of every number of core/schema.DType, None where this torch has no such type; and the way back.
DTYPES: tuple[torch.dtype | None, ...] = (None, *(getattr(torch, name, None) for name in NAMES[1:]))
NUMBERS: dict[torch.dtype, int] = {dtype: number for number, dtype in enumerate(DTYPES) if dtype is not None}

# Values of at least so many bytes are not joined with their neighbours: copying them twice costs more than a pointer.
_LARGE_BYTES = 1 << 16

_ARRAY_HEADER = struct.Struct("<BBHI")
_FORTRAN, _PICKLED_DTYPE = 1, 2


class _Memory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]  # mypy sees no class in an array type
    """Memory of any size; one type for all, because a ctypes array type per length would be made again and again."""


def memory_at(address: int, size: int) -> memoryview:
    """Bytes at an address. Nothing keeps them alive."""
    return memoryview(_Memory.from_address(address)).cast("B")[:size] if size else memoryview(b"")


def address_of(buffer: Any) -> int:
    """Address of the first byte of an object with the buffer protocol, 0 when it is empty."""
    view = memoryview(buffer)
    if not view.nbytes:
        return 0
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


class Encoded(NamedTuple):
    """A column of encoded values. The parts must live as long as their addresses are used."""

    sizes: array[int]  # int64[rows], bytes of each value
    codecs: bytes  # uint8[rows]
    data: Any  # all values one after another, or None when there are pointers
    pointers: array[int] | None  # uint64[rows]
    keep: Any  # what the pointers point into


def tensor_from_bytes(dtype: str, shape: tuple[int, ...], data: bytearray) -> torch.Tensor:
    """Tensor over elements read from a pickle, which refers to this function by name."""
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    tensor: torch.Tensor = torch.frombuffer(data, dtype=kind).reshape(shape)
    return tensor


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Pickles what a tensor shows: not its storage, gradient or device."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    raw: Any = b""
    if tensor.numel():
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy for 3.11 says so
    return tensor_from_bytes, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, which writes what the reader cannot import by value, with our own form of tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def _pickle_rows(field: str, values: Sequence[Any], rows: Sequence[int]) -> tuple[io.BytesIO, list[int]]:
    """Pickles some values one after another into one buffer; returns it and where each ends.

    One pickler for all rows: making one costs more than pickling a small dict.
    """
    out = io.BytesIO()
    pickler = _Pickler(out, 5)
    dump, forget, tell = functools.partial(pickle.Pickler.dump, pickler), pickler.clear_memo, out.tell
    ends = []
    row = -1
    try:
        for row in rows:
            dump(values[row])
            forget()
            ends.append(tell())
    except MemoryError:
        raise
    except Exception as error:  # whatever a __reduce__ of the user raises
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
        raise ValueError(
            f"field {field!r}: row {row}: a value of type {type(values[row]).__name__} cannot be stored: {reason}"
        ) from error
    return out, ends


@functools.lru_cache(maxsize=256)
def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    flags = _FORTRAN if fortran else 0
    name = dtype.str.encode()
    if dtype.names is not None or dtype.metadata is not None or np.dtype(dtype.str) != dtype:
        flags, name = flags | _PICKLED_DTYPE, pickle.dumps(dtype, 5)
    head = _ARRAY_HEADER.pack(1, flags, len(shape), len(name)) + struct.pack(f"<{len(shape)}q", *shape) + name
    return head + bytes(-len(head) % 16)


def _encode_array(value: np.ndarray[Any, Any]) -> Any:
    """Header and elements in one piece, with one copy of the elements."""
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    make = _array_header if value.dtype.metadata is None else _array_header.__wrapped__
    head = make(value.dtype, value.shape, fortran)
    if value.nbytes < _LARGE_BYTES:
        return head + value.tobytes("A")
    # Rows of a structured type may have gaps, which the assignment leaves alone.
    whole = (np.zeros if value.dtype.names else np.empty)(len(head) + value.nbytes, dtype=np.uint8)
    whole[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    order: Any = "F" if fortran else "C"
    target: np.ndarray[Any, Any] = np.ndarray(value.shape, value.dtype, whole, len(head), order=order)
    target[...] = value
    return whole


def _decode_array(data: memoryview) -> np.ndarray[Any, Any]:
    version, flags, ndim, length = _ARRAY_HEADER.unpack_from(data)
    if version != 1:
        raise ValueError(f"array header of version {version}, want 1")
    at = _ARRAY_HEADER.size
    shape = struct.unpack_from(f"<{ndim}q", data, at)
    at += 8 * ndim
    name = data[at : at + length]
    dtype = pickle.loads(name) if flags & _PICKLED_DTYPE else np.dtype(str(name, "ascii"))
    at += length
    at += -at % 16
    order: Any = "F" if flags & _FORTRAN else "C"
    out: np.ndarray[Any, Any] = (np.zeros if dtype.names else np.empty)(shape, dtype, order)
    if out.nbytes:
        out[...] = np.ndarray(shape, dtype, buffer=data, offset=at, order=order)
    return out


def _codec(value: Any) -> int:
    kind = type(value)
    if kind is np.ndarray:
        return PICKLE if value.dtype.hasobject else NDARRAY
    return _CODECS.get(kind, PICKLE)


_CODECS = {str: STR, bytes: BYTES, type(None): NONE}


def _encode_str(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def encode_objects(field: str, values: Sequence[Any]) -> Encoded:
    """Encodes one value per row.

    Args:
        field: name for error messages.
        values: the values.

    Raises:
        ValueError: a value cannot be pickled; the text names field, row and type.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind is str:
            return _encode_strings(values)
        if kind is bytes and max(map(len, values)) < _LARGE_BYTES:
            return Encoded(array("q", map(len, values)), bytes((BYTES,)) * len(values), b"".join(values), None, None)
        if kind is type(None):
            return Encoded(array("q", bytes(8 * len(values))), bytes((NONE,)) * len(values), b"", None, None)
        if kind is not np.ndarray and kind not in _CODECS:
            return _encode_pickles(field, values)
    return _encode_mixed(field, values)


def _encode_strings(values: Sequence[str]) -> Encoded:
    text = "".join(values)
    codecs = bytes((STR,)) * len(values)
    if text.isascii():
        return Encoded(array("q", map(len, values)), codecs, text.encode(), None, None)
    parts = list(map(_encode_str, values))
    return Encoded(array("q", map(len, parts)), codecs, b"".join(parts), None, None)


def _encode_pickles(field: str, values: Sequence[Any]) -> Encoded:
    out, ends = _pickle_rows(field, values, range(len(values)))
    sizes = array("q", map(int.__sub__, ends, [0, *ends]))
    return Encoded(sizes, bytes(len(values)), out.getbuffer(), None, None)


def _encode_mixed(field: str, values: Sequence[Any]) -> Encoded:
    codecs = bytes(map(_codec, values))
    parts: list[Any] = [b""] * len(values)
    pickled = [row for row, codec in enumerate(codecs) if codec == PICKLE]
    if pickled:
        out, ends = _pickle_rows(field, values, pickled)
        data = out.getbuffer()
        for row, start, end in zip(pickled, [0, *ends], ends, strict=False):
            parts[row] = data[start:end]
    encoders: dict[int, Callable[[Any], Any]] = {STR: _encode_str, BYTES: _same, NDARRAY: _encode_array}
    for row, codec in enumerate(codecs):
        if codec in encoders:
            parts[row] = encoders[codec](values[row])
    sizes = array("q", map(len, parts))
    if max(sizes, default=0) < _LARGE_BYTES:
        return Encoded(sizes, codecs, b"".join(parts), None, None)
    return Encoded(sizes, codecs, None, array("Q", map(address_of, parts)), parts)


def _same(value: bytes) -> bytes:
    return value


def decode_objects(address: int, offsets: Sequence[int], codecs: bytes, field: str = "") -> list[Any]:
    """Reads one value per row; none of them refers to the memory afterwards.

    Args:
        address: where row 0 would start with offset 0.
        offsets: int[rows + 1], where each row starts and the last one ends.
        codecs: uint8[rows].
        field: name for error messages.

    Raises:
        ValueError: bytes that cannot be read, for example because a class cannot be imported here.
    """
    data = memory_at(address, offsets[-1]) if offsets else memoryview(b"")
    kinds = set(codecs)
    out: list[Any] = []
    try:
        if kinds == {STR} and offsets[-1] - offsets[0] < _LARGE_BYTES * len(codecs):
            return _decode_strings(data, offsets)
        if len(kinds) == 1:
            decode = _DECODERS[kinds.pop()]
            for start, end in pairwise(offsets):
                out.append(decode(data[start:end]))
            return out
        for row, codec in enumerate(codecs):
            out.append(_DECODERS[codec](data[offsets[row] : offsets[row + 1]]))
        return out
    except MemoryError:
        raise
    except Exception as error:  # whatever a __setstate__ of the user raises
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"field {field!r}: row {len(out)}: a stored value cannot be read: {reason}") from error


def _decode_strings(data: memoryview, offsets: Sequence[int]) -> list[str]:
    raw = bytes(data[offsets[0] :])
    ends = [offset - offsets[0] for offset in offsets] if offsets[0] else offsets
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[start:end] for start, end in pairwise(ends)]
    return [raw[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(ends)]


def _decode_none(data: memoryview) -> None:
    if data:
        raise ValueError(f"{len(data)} bytes of a None, want 0")


_DECODERS: dict[int, Callable[[memoryview], Any]] = {
    PICKLE: pickle.loads,
    STR: lambda data: str(data, "utf-8", "surrogatepass"),
    BYTES: bytes,
    NONE: _decode_none,
    NDARRAY: _decode_array,
}
