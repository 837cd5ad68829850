"""Samples by data-parallel rank."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler.base import BaseSampler

__all__ = ["RankAwareSampler"]


class RankAwareSampler(BaseSampler):
    """The first ready samples; the same rank gets them again for the same batch.

    So all processes of one data-parallel rank, which ask with the same ``dp_rank`` and ``batch_index``, get the same
    samples.
    """

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The first ``batch_size`` of the list, or what the rank got before for this batch; none when there are fewer.

        Raises:
            ValueError: ``dp_rank`` is negative.

        Example:
            >>> ask = {"dp_rank": 1, "batch_index": 0, "task_name": "train", "partition_id": "p"}
            >>> sampler = RankAwareSampler()
            >>> sampler([5, 8, 9], 2, **ask)
            ([5, 8], [5, 8])
            >>> sampler([9, 11], 2, **ask)
            ([5, 8], [5, 8])
        """
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        answers = self._answers(partition_id, task_name).get(dp_rank, {})
        if batch_index not in answers:
            if len(ready_indexes) < batch_size:
                return [], []
            self._keep(partition_id, task_name, dp_rank, batch_index, list(ready_indexes[:batch_size]))
            answers = self._answers(partition_id, task_name)[dp_rank]
        return list(answers[batch_index]), list(answers[batch_index])
