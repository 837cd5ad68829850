"""What a sampler is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["BaseSampler"]


class BaseSampler(ABC):
    """A choice among the ready samples.

    ``_states[partition][task][dp_rank][batch_index]`` is for the answers that a sampler gives again. A subclass with a
    constructor of its own calls this one. A subclass with more state extends `save_checkpoint` and `load_checkpoint`.

    In a session a sampler is called as ``sampler(ready_indexes, batch_size, partition=..., **sampling_config)``, where
    ``partition`` is a `transfer_queue.sampler.partition.Partition`. What it returns is checked: sampled indexes are
    distinct, and ready or handed out before; anything else fails the fetch, and so does an exception. A call that takes
    longer than ``controller.sampler_timeout_s``, or than its fetch, is given up, and the next call does not wait for
    it.

    Example:
        >>> class EverySecond(BaseSampler):
        ...     def sample(self, ready_indexes, batch_size, *args, **kwargs):
        ...         chosen = ready_indexes[::2][:batch_size]
        ...         return chosen, chosen
        >>> EverySecond()([4, 5, 6, 7, 8], 2)
        ([4, 6], [4, 6])
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose among the ready indexes.

        Args:
            ready_indexes: samples that have all requested fields and that the task has not consumed, ascending.
            batch_size: how many are wanted.
            *args: for samplers that take more.
            **kwargs: ``partition``, and what the ``sampling_config`` of the fetch has.

        Returns:
            The samples to hand out, in this order, and those that the task has consumed by that. Two empty lists mean
            that there are not enough.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the rank and the batch of ``sampling_config`` have been answered before.

        Such a request reaches the sampler also when too few samples are ready.
        """
        config = sampling_config or {}
        rank = config.get("dp_rank")
        if rank is None:
            return False
        return config.get("batch_index") in self._answers(partition_id, task_name).get(rank, {})

    def _answers(self, partition_id: str, task_name: str) -> dict[Any, dict[Any, Any]]:
        """Answers by rank and batch; not to be written to."""
        states: dict[str, Any] = self.__dict__.get("_states", {})
        answers: dict[Any, dict[Any, Any]] = states.get(partition_id, {}).get(task_name, {})
        return answers

    def _keep(self, partition_id: str, task_name: str, rank: Any, batch: Any, indexes: list[int]) -> None:
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        ranks.setdefault(rank, {})[batch] = indexes

    def clear_cache(self, partition_id: str) -> None:
        """Forget the answers of a partition. A session calls it when the partition is cleared."""
        self.__dict__.get("_states", {}).pop(partition_id, None)

    def samples_cleared(self, partition_id: str, indexes: Sequence[int]) -> None:
        """Take samples out of all answers; their indexes may be used again.

        A session calls it before the next `sample` when samples of the partition were cleared one by one. An answer
        that has lost all its samples is forgotten.
        """
        gone = set(indexes)
        for ranks in self.__dict__.get("_states", {}).get(partition_id, {}).values():
            for batches in ranks.values():
                for batch, answer in list(batches.items()):
                    if not isinstance(answer, list) or gone.isdisjoint(answer):
                        continue
                    batches[batch] = [index for index in answer if index not in gone]
                    if not batches[batch]:
                        del batches[batch]

    def consumption_reset(self, partition_id: str, task_name: str | None) -> None:  # noqa: B027 - nothing to do here
        """The consumption of a task, or with None of every task, was forgotten.

        A session calls it before the next `sample`. Answers stay.
        """

    def save_checkpoint(self) -> dict[str, Any]:
        """The state as plain values: numbers, str, bytes, None, and lists, tuples, sets and dicts of these."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Go on with a state of `save_checkpoint`."""
        self._states = state.get("_states", {})
