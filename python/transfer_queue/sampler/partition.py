"""What a sampler sees of the partition that it samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

__all__ = ["Partition"]


class Partition:
    """A partition as a sampler sees it. What is not an attribute below is read from the session when it is first used.

    So it is as of then, which may be a moment later than the list of ready samples.

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
    def global_indexes(self) -> set[int]:
        """The indexes of the partition, with those that are only reserved."""
        return set(self.custom_meta)

    @property
    def total_samples_num(self) -> int:
        """Number of its indexes."""
        return len(self.custom_meta)

    @cached_property
    def revert_keys_mapping(self) -> dict[int, str]:
        """The key of every sample that has one, by its index."""
        indexes = list(self.custom_meta)
        keys = self._call("keys", (self.partition_id, indexes)) if indexes else []
        return {index: key for index, key in zip(indexes, keys, strict=True) if key is not None}

    @cached_property
    def keys_mapping(self) -> dict[str, int]:
        """The index of every key."""
        return {key: index for index, key in self.revert_keys_mapping.items()}
