"""How a worker hands a batch to the main process.

All tensors of a batch travel as one block, and each storage once, however many micro-batches view it: a small block
inside the message, a large one as a memfd that the main process maps, so that nothing depends on the size of /dev/shm
and no descriptor stays open for a batch that is kept. Whatever cannot be pickled fails in the worker, where it is
reported, and not in the thread that feeds the queue, where it would be lost.
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from transfer_queue._results import jagged

try:
    from torch.nested._internal.nested_tensor import NestedTensor as _nested_class
except ImportError:
    _nested_class = None  # type: ignore[assignment,misc]

__all__ = ["Packed", "pack"]

_INLINE_BYTES = 1 << 20
_ALIGN = 64
_MAX_WRITE = 1 << 30

# Of a tensor: slot of its storage, dtype, shape, strides, and offset in that storage in bytes.
_Entry = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


class _Pickler(pickle.Pickler):
    """Takes tensors out of a value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.entries: list[_Entry] = []
        self.storages: list[torch.UntypedStorage] = []
        self.spans: list[tuple[int, int]] = []
        self._slots: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id stays taken as long as the object lives

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        number = self._known.get(id(obj))
        if number is None:
            number = self._known[id(obj)] = len(self.entries)
            self._kept.append(obj)
            self._add(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        # Of its own accord torch makes a view that begins at the start of the storage, whatever the offset in it.
        if type(obj) is Tensor and obj.is_nested and obj.layout == torch.strided:
            return torch.nested.as_nested_tensor, (list(obj.detach().unbind()),)
        return _reduced_jagged(obj) if type(obj) is _nested_class else NotImplemented

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        first = int(tensor.storage_offset()) * tensor.element_size()
        slot = self._slots.get(storage.data_ptr()) if storage.data_ptr() else None
        if slot is None:
            slot = self._slots[storage.data_ptr()] = len(self.storages)
            self.storages.append(storage)
            self.spans.append((first, first))
        size = 0
        if tensor.numel():
            size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        low, high = self.spans[slot]
        if size:
            last = first + size * tensor.element_size()
            self.spans[slot] = (min(low, first), max(high, last)) if high > low else (first, last)
        self.entries.append((slot, tensor.dtype, tuple(tensor.shape), tensor.stride(), first))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor.is_nested
    )


def _reduced_jagged(tensor: Any) -> Any:
    """How a jagged tensor is made again, where torch's internals are as expected. Torch takes three times as long."""
    try:
        values, shortest, longest = tensor._values, tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
        if tensor._lengths is not None or shortest is None or longest is None or values.requires_grad:
            return NotImplemented
        return jagged, (values, tensor._offsets, tensor._ragged_idx, shortest, longest)
    except AttributeError:
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


class Packed:
    """A value whose pickle gives the value itself."""

    def __init__(self, value: bytes, entries: list[_Entry], size: int, block: Any) -> None:
        self._parts = value, entries, size, block

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self._parts


def pack(value: Any) -> Packed:
    """Pack a value for the main process of a loader.

    Raises:
        Exception: what pickle raises for a value that it cannot express.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    starts: list[int] = []  # of every storage in the block, as if all of the storage were there
    parts: list[tuple[int, Tensor]] = []
    size = 0
    for storage, (low, high) in zip(pickler.storages, pickler.spans, strict=True):
        low -= low % _ALIGN
        starts.append(size - low)
        if high > low:
            parts.append((size, torch.empty(0, dtype=torch.uint8).set_(storage, low, (high - low,), (1,))))
        size += -(-(high - low) // _ALIGN) * _ALIGN
    entries = [(slot, dtype, shape, strides, starts[slot] + at) for slot, dtype, shape, strides, at in pickler.entries]
    return Packed(
        file.getvalue(), entries, size, _inline(parts, size) if size <= _INLINE_BYTES else _memfd(parts, size)
    )


def _inline(parts: list[tuple[int, Tensor]], size: int) -> bytearray:
    block = bytearray(size)
    for at, part in parts:
        block[at : at + len(part)] = part.numpy().data
    return block


def _memfd(parts: list[tuple[int, Tensor]], size: int) -> Any:
    fd = os.memfd_create("tq-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        for at, part in parts:
            left = part.numpy().data
            while left:
                written = os.pwrite(fd, left[:_MAX_WRITE], at)
                left, at = left[written:], at + written
        return reduction.DupFd(fd)
    finally:
        os.close(fd)


def _unpack(value: bytes, entries: list[_Entry], size: int, block: Any) -> Any:
    memory = _memory(size, block).untyped_storage()
    tensors = [
        torch.empty(0, dtype=dtype).set_(memory, at // dtype.itemsize, shape, strides)
        if _has_elements(shape)
        else torch.empty_strided(shape, strides, dtype=dtype)
        for _, dtype, shape, strides, at in entries
    ]
    return _Unpickler(io.BytesIO(value), tensors).load()


def _has_elements(shape: tuple[int, ...]) -> bool:
    return all(shape)


def _memory(size: int, block: Any) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    if isinstance(block, bytearray):
        return torch.frombuffer(block, dtype=torch.uint8)
    fd = block.detach()
    try:
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(fd)
