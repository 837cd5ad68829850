"""Whole prompt groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transfer_queue._whole_numbers import positive
from transfer_queue.sampler.base import BaseSampler

__all__ = ["GRPOGroupNSampler"]


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of ``n_samples_per_prompt`` samples.

    On a list of indexes a group is any n consecutive ones. In a session it is any n samples that were put one right
    after another, and the groups come in put order: these are consecutive indexes as long as the partition grows alone,
    and others when it shares the indexes with partitions that come and go.

    A request with ``dp_rank`` gets the same samples again for the same ``batch_index``.

    Args:
        n_samples_per_prompt: samples of a group.

    Raises:
        ValueError: it is not positive.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        self.n_samples_per_prompt = positive(n_samples_per_prompt, "n_samples_per_prompt")

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        dp_rank: int | None = None,
        batch_index: int | None = None,
        *args: Any,
        partition: Any = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """``batch_size`` samples in whole groups, or none when there are too few groups.

        Raises:
            ValueError: ``batch_size`` is no multiple of the group size.

        Example:
            >>> GRPOGroupNSampler(n_samples_per_prompt=2)([0, 2, 3, 5, 6, 7], 4)
            ([2, 3, 5, 6], [2, 3, 5, 6])
        """
        answers = self._answers(partition_id, task_name).get(dp_rank, {})
        if dp_rank is not None and batch_index in answers:
            return list(answers[batch_index]), list(answers[batch_index])
        chosen = self._groups(ready_indexes, batch_size, partition)
        if chosen and dp_rank is not None:
            self._keep(partition_id, task_name, dp_rank, batch_index, list(chosen))
        return chosen, list(chosen)

    def _groups(self, ready_indexes: Iterable[int], size: int, partition: Any) -> list[int]:
        n = self.n_samples_per_prompt
        if size % n:
            raise ValueError(f"batch_size {size} must be a multiple of n_samples_per_prompt {n}")
        order = getattr(partition, "put_order", None)
        number = order.__getitem__ if order else int
        chosen: list[int] = []
        group: list[int] = []
        for index in sorted(ready_indexes, key=number):
            if len(chosen) == size:
                break
            if group and number(index) != number(group[-1]) + 1:
                group = []
            group.append(index)
            if len(group) == n:
                chosen += group
                group = []
        return chosen if len(chosen) == size else []
