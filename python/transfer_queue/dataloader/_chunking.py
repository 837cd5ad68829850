"""Batches cut into micro-batches, data and metadata at the same rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase
from torch import Tensor

from transfer_queue._results import jagged, table
from transfer_queue._whole_numbers import whole_number
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta

__all__ = ["chunk_batch_fn"]


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> list[tuple[TensorDict, BatchMeta]]:
    """Cut a batch into pieces of ``micro_batch_size`` rows, the last of which may be smaller.

    Nested columns stay nested and keep their layout. Pieces view the memory of the batch.

    Args:
        td: the data, one row per sample.
        batch_meta: its metadata.
        micro_batch_size: rows of a piece, 1 to the size of the batch.

    Raises:
        TypeError: ``td`` is no TensorDict.
        ValueError: the size makes no sense, or data and metadata differ in length.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transfer_queue import BatchMeta
        >>> from transfer_queue.dataloader import chunk_batch_fn
        >>> data = TensorDict({"x": torch.arange(7)}, batch_size=[7])
        >>> meta = BatchMeta(global_indexes=list(range(7)), partition_ids=["p"] * 7)
        >>> [(piece["x"].tolist(), part.global_indexes) for piece, part in chunk_batch_fn(data, meta, 3)]
        [([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [3, 4, 5]), ([6], [6])]
    """
    if not isinstance(td, TensorDictBase):
        raise WrongTypeError(f"td: got {type(td).__name__}, want a TensorDict", "chunk_batch_fn")
    micro_batch_size = whole_number(micro_batch_size, "micro_batch_size", "chunk_batch_fn")
    if not td.batch_size:
        raise InvalidArgumentError("td: it has no batch dimension", "chunk_batch_fn")
    rows = td.batch_size[0]
    if micro_batch_size > rows:
        raise InvalidArgumentError(f"micro_batch_size {micro_batch_size}: the batch has {rows} rows", "chunk_batch_fn")
    if batch_meta.size != rows:
        raise InvalidArgumentError(f"batch_meta: {batch_meta.size} samples for {rows} rows of data", "chunk_batch_fn")
    cuts = [slice(first, min(first + micro_batch_size, rows)) for first in range(0, rows, micro_batch_size)]
    return list(zip(_cut(td, cuts), [batch_meta[cut] for cut in cuts], strict=True))


def _cut(td: TensorDictBase, cuts: list[slice]) -> list[TensorDict]:
    """The rows of a TensorDict, cut by cut."""
    offsets: dict[int, tuple[list[int], list[Tensor]]] = {}
    columns = {name: _cut_column(column, cuts, offsets) for name, column in td.items()}
    return [
        table(
            {name: parts[k] for name, parts in columns.items()},
            torch.Size([cut.stop - cut.start, *td.batch_size[1:]]),
            td.device,
        )
        for k, cut in enumerate(cuts)
    ]


def _cut_column(column: Any, cuts: list[slice], offsets: dict[int, tuple[list[int], list[Tensor]]]) -> list[Any]:
    if isinstance(column, TensorDict):
        return _cut(column, cuts)
    if not (isinstance(column, Tensor) and column.is_nested):
        return [column[cut] for cut in cuts]
    if column.layout == torch.jagged and column.lengths() is None:  # type: ignore[attr-defined]
        return _cut_jagged(column, cuts, offsets)
    rows = column.unbind()
    return [torch.nested.as_nested_tensor(list(rows[cut]), layout=column.layout) for cut in cuts]


def _cut_jagged(column: Tensor, cuts: list[slice], known: dict[int, tuple[list[int], list[Tensor]]]) -> list[Tensor]:
    """Rows of a jagged column, as views where the ragged dimension is the first.

    Columns that share their offsets share them in the pieces too, without which torch refuses to combine them.
    """
    offsets, values = column.offsets(), column.values()  # type: ignore[attr-defined]
    dim: int = column._ragged_idx - 1  # type: ignore[attr-defined]
    if id(offsets) not in known:
        bounds = offsets.tolist()
        known[id(offsets)] = bounds, [offsets[cut.start : cut.stop + 1] - bounds[cut.start] for cut in cuts]
    bounds, pieces = known[id(offsets)]
    parts = []
    for cut, own in zip(cuts, pieces, strict=True):
        first, last = bounds[cut.start], bounds[cut.stop]
        lengths = [high - low for low, high in pairwise(bounds[cut.start : cut.stop + 1])]
        part = values.narrow(dim, first, last - first).contiguous()
        parts.append(jagged(part, own, dim + 1, min(lengths), max(lengths)))
    return parts
