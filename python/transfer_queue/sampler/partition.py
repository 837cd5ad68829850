"""What a sampler sees of the partition that it samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from transfer_queue._partition_snapshot import FieldMetadata, PartitionSnapshot

__all__ = ["Partition"]


class Partition:
    """A partition as a sampler sees it. What is not an attribute below is read from the session when it is first used.

    So it is as of then, which may be a moment later than the list of ready samples. ``custom_meta`` is read alone, what
    comes behind it below all at once. They are copies: changing them changes nothing in the session.

    Attributes:
        partition_id: name of the partition.
        production_completed: production was declared complete, and every sample is ready or consumed.
        put_order: ready index -> number in the order in which the samples were made; samples that were made one right
            after another have consecutive numbers. None when the indexes themselves are such numbers.
    """

    def __init__(
        self,
        partition_id: str,
        production_completed: bool,
        put_order: dict[int, int] | None,
        call: Callable[[str, Any], Any],
    ) -> None:
        self.partition_id, self.production_completed, self.put_order = partition_id, production_completed, put_order
        self._call = call

    @cached_property
    def custom_meta(self) -> dict[int, dict[str, Any]]:
        """The tags of every sample by its index."""
        tags: dict[int, dict[str, Any]] = self._call("tags", self.partition_id)
        return tags

    def get_custom_meta(self, global_indexes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The tags of some samples by index; those that do not exist are left out."""
        return {index: self.custom_meta[index] for index in global_indexes if index in self.custom_meta}

    @cached_property
    def _whole(self) -> PartitionSnapshot:
        """All of the partition, at the moment when something of it is first asked for."""
        whole: PartitionSnapshot = self._call("snapshot", self.partition_id)
        return whole

    @property
    def global_indexes(self) -> set[int]:
        """The samples that were written."""
        return self._whole.global_indexes

    @property
    def pre_allocated_global_indexes(self) -> set[int]:
        """Indexes that are reserved for the next samples."""
        return self._whole.pre_allocated_global_indexes

    @property
    def total_samples_num(self) -> int:
        """Number of the samples that were written."""
        return self._whole.total_samples_num

    @property
    def total_fields_num(self) -> int:
        """Number of the fields that were ever written."""
        return self._whole.total_fields_num

    @property
    def revert_keys_mapping(self) -> dict[int, str]:
        """The key of every sample that has one, by its index."""
        return self._whole.revert_keys_mapping

    @property
    def keys_mapping(self) -> dict[str, int]:
        """The index of every key, in the order of registration."""
        return self._whole.keys_mapping

    @property
    def field_name_mapping(self) -> dict[str, int]:
        """The column of every field in ``production_status``."""
        return self._whole.field_name_mapping

    @property
    def field_metadata(self) -> dict[str, FieldMetadata]:
        """What the holders of every field have in common: dtype, shape, their indexes."""
        return self._whole.field_metadata

    @property
    def production_status(self) -> torch.Tensor:
        """int8[index, column], 1 for a cell that is there."""
        return self._whole.production_status

    @property
    def consumption_status(self) -> dict[str, torch.Tensor]:
        """Task -> int8[index], 1 for a sample that the task has consumed."""
        return self._whole.consumption_status
