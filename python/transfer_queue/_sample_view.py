"""The samples of a `BatchMeta` one by one, made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta


class SampleView:
    """One sample of a `BatchMeta`, read-only."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: BatchMeta, row: int) -> None:
        self._batch, self._row = batch, row

    @property
    def global_index(self) -> int:
        """Index of the sample."""
        return self._batch.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        """Partition of the sample."""
        return self._batch.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        """1 when the sample is ready."""
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """Tags of the sample."""
        tags = self._batch._tags
        return MappingProxyType({} if tags is None else tags[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Field -> ``{dtype, shape, is_nested, is_non_tensor}`` with the shape of this sample."""
        return MappingProxyType(
            {
                name: MappingProxyType(
                    {
                        "dtype": field.dtype,
                        "shape": field.row_shape(self._row),
                        "is_nested": field.is_nested,
                        "is_non_tensor": field.is_non_tensor,
                    }
                )
                for name, field in self._batch._fields.items()
            }
        )

    def __repr__(self) -> str:
        return f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r})"


class Samples(Sequence[SampleView]):
    """The samples of a batch as a sequence that makes its items when they are asked for."""

    __slots__ = ("_batch",)

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    @overload
    def __getitem__(self, item: int) -> SampleView: ...
    @overload
    def __getitem__(self, item: slice) -> list[SampleView]: ...
    def __getitem__(self, item: int | slice) -> SampleView | list[SampleView]:
        rows = range(self._batch.size)[item]
        if isinstance(rows, range):
            return [SampleView(self._batch, row) for row in rows]
        return SampleView(self._batch, rows)

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, row) for row in range(self._batch.size))
