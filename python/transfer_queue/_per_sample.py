"""Lists and arrays with one item per sample, and dicts about a batch: what both kinds of metadata do with them."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_log = logging.getLogger("transfer_queue.metadata")

# Values that a copy may share: a dict of these needs no deep copy.
_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})


def positions(rows: Any, size: int, what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions in a batch as int64[rows], all inside it."""
    try:
        out = _whole_numbers(rows)
    except OverflowError:
        raise ValueError(f"{what}: indices must be in range [0, {size})") from None
    outside = (out < 0) | (out >= size)
    if outside.any():
        raise ValueError(f"{what}: indices must be in range [0, {size}), got {out[outside][0]}")
    return out


def _whole_numbers(rows: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[rows] of anything that can be an index."""
    numbers = np.asarray(rows) if isinstance(rows, list | tuple | np.ndarray | torch.Tensor) else np.empty(0)
    if numbers.ndim == 1 and numbers.dtype.kind == "i":
        return numbers.astype(np.int64, copy=False)
    if isinstance(rows, torch.Tensor | np.ndarray):
        rows = rows.tolist()
    return np.array(list(map(operator.index, rows)), dtype=np.int64)


def chunk_slices(size: int, chunks: int) -> list[slice]:
    """Splits ``size`` rows so that the first parts have one row more. ZeroDivisionError for no parts."""
    if chunks < 0:
        raise ValueError(f"chunk: number of chunks is {chunks}, want at least 1")
    each, more = divmod(size, chunks)
    if chunks > size:
        _log.warning("chunk: %d chunks of %d samples, some are empty", chunks, size)
    ends = [(part + 1) * each + min(part + 1, more) for part in range(chunks)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def deep(value: Any) -> Any:
    """`copy.deepcopy` that is quick for the flat dicts that tags usually are."""
    if type(value) is dict and _ATOMS.issuperset(map(type, value.values())):
        return value.copy()
    return copy.deepcopy(value)


def equal(left: Any, right: Any) -> bool:
    """Equality that also answers for tensors and arrays."""
    if left is right:
        return True
    try:
        return bool(left == right)
    except (ValueError, RuntimeError, TypeError):
        try:
            return bool(np.array_equal(np.asarray(left), np.asarray(right)))
        except (ValueError, RuntimeError, TypeError):
            return False


def merge_extra_info(infos: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for info in infos:
        for key, value in (info or {}).items():
            if key in out and not equal(out[key], value):
                raise ValueError(f"concat: extra_info {key!r} has conflicting values: {out[key]!r} and {value!r}")
            out[key] = value
    return out


def wrong_length(what: str, got: int, want: int) -> ValueError:
    return ValueError(f"batch meta: length mismatch: {what} length {got} != batch_size {want}")


def int64s(numbers: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 array of a list, an array, or little-endian bytes."""
    if isinstance(numbers, bytes | bytearray | memoryview):
        return np.frombuffer(numbers, dtype="<i8").astype(np.int64, copy=False)
    return np.asarray(numbers, dtype=np.int64)


def listed(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray | torch.Tensor):
        return list(values.tolist())
    return [] if values is None else list(values)


def difference(left: Sequence[Any], right: Sequence[Any]) -> str:
    """The first place where two lists differ, as the end of a sentence."""
    if len(left) != len(right):
        return f": {len(left)} and {len(right)} samples"
    row = next(row for row, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    return f": {left[row]!r} and {right[row]!r} at row {row}"


def per_sample_dicts(what: str, dicts: Sequence[Mapping[str, Any]] | None, size: int) -> list[dict[str, Any]] | None:
    if dicts is None:
        return None
    if len(dicts) != size:
        raise wrong_length(what, len(dicts), size)
    return [dict(one) for one in dicts]


def union_dicts(left: list[dict[str, Any]] | None, right: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if left is None or right is None:
        only = right if left is None else left
        return None if only is None else list(map(dict.copy, only))
    return [{**one, **other} for one, other in zip(left, right, strict=True)]
