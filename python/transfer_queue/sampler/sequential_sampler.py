"""Samples in the order of their indexes."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler.base import BaseSampler

__all__ = ["SequentialSampler"]


class SequentialSampler(BaseSampler):
    """The first ready samples in the order of their indexes. It remembers nothing."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The first ``batch_size`` of the list as given.

        Example:
            >>> SequentialSampler()([9, 3, 7], 2)
            ([9, 3], [9, 3])
        """
        chosen = ready_indexes[:batch_size]
        return chosen, chosen
