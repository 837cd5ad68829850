"""A stream of micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue._whole_numbers import positive
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.seqlen_balanced_sampler import _lengths

__all__ = ["StreamingTokenBudgetSampler"]


class StreamingTokenBudgetSampler(GRPOGroupNSampler):
    """Ready samples in put order, cut into batches whose ``total_lengths`` add up to a token budget at most.

    A request is ``get_meta(..., token_budget=..., sampling_config={"dp_rank": r, "batch_index": i})``. Every pipeline
    stage of a rank that asks for the same batch gets the same samples; ranks share one stream and get different ones.
    The weight of a sample is its tag ``total_lengths``, 1 without one. A batch holds as many samples as fit the budget;
    a sample that is larger than the budget comes alone. A batch is handed out when the next sample would not fit, or
    when the production of the partition was declared complete by ``put(..., is_last=True)`` and nothing else will
    become ready.

    After the last batch a request is answered with an empty batch whose ``extra_info["end_of_stream"]`` is True.

    A request without ``token_budget`` is served by the rule of `GRPOGroupNSampler`.

    Args:
        n_samples_per_prompt: group size for requests without a budget.
        balance_unit_multiplier: accepted for programs that give it; it has no effect.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> _ = tq.init({"controller": {"sampler": "StreamingTokenBudgetSampler", "polling_mode": True}})
        >>> client = tq.get_client()
        >>> rows = TensorDict({"x": torch.arange(3)}, batch_size=[3])
        >>> lengths = [{"total_lengths": n} for n in (5, 4, 2)]
        >>> _ = client.put(rows, partition_id="train", custom_meta=lengths, is_last=True)
        >>> def batch(number):
        ...     where = {"dp_rank": 0, "batch_index": number}
        ...     return client.get_meta(["x"], None, "train", task_name="t", sampling_config=where, token_budget=10)
        >>> [batch(number).size for number in range(3)], batch(2).extra_info
        ([2, 1, 0], {'end_of_stream': True})
        >>> tq.close()
    """

    def __init__(self, n_samples_per_prompt: int = 1, balance_unit_multiplier: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.balance_unit_multiplier = positive(balance_unit_multiplier, "balance_unit_multiplier")
        # By partition and task: (rank, batch) that were answered with the end.
        self._ends: dict[str, dict[str, list[tuple[Any, Any]]]] = {}

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        dp_rank: int | None = None,
        batch_index: int | None = None,
        *args: Any,
        token_budget: float | None = None,
        partition: Any = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The next batch of the stream in the order of the list, or what the rank got before for this batch.

        Raises:
            ValueError: there is a budget without rank and batch number, or it is not positive.
        """
        if token_budget is None:
            return super().sample(
                ready_indexes, batch_size, task_name, partition_id, dp_rank, batch_index, partition=partition
            )
        if dp_rank is None or batch_index is None:
            raise ValueError("token_budget needs dp_rank and batch_index in sampling_config")
        if not token_budget > 0:
            raise ValueError(f"token_budget must be positive, got {token_budget}")
        answers = self._answers(partition_id, task_name).get(dp_rank, {})
        if batch_index in answers or self.is_end(partition_id, task_name, dp_rank, batch_index):
            return list(answers.get(batch_index, [])), list(answers.get(batch_index, []))
        final = bool(getattr(partition, "production_completed", False))
        order = getattr(partition, "put_order", None)
        if order:
            ready_indexes = sorted(ready_indexes, key=order.__getitem__)
        chosen, full = _filled(ready_indexes, partition, token_budget)
        if not full and not final:
            return [], []
        if chosen:
            self._keep(partition_id, task_name, dp_rank, batch_index, list(chosen))
        else:
            self._ends.setdefault(partition_id, {}).setdefault(task_name, []).append((dp_rank, batch_index))
        return chosen, list(chosen)

    def is_end(self, partition_id: str, task_name: str, dp_rank: int | None, batch_index: int | None) -> bool:
        """Whether the request of a rank was answered with the end of the stream."""
        return (dp_rank, batch_index) in map(tuple, self._ends.get(partition_id, {}).get(task_name, ()))

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the rank and the batch have been answered before, with samples or with the end."""
        config = sampling_config or {}
        return super().has_cached_result(partition_id, task_name, sampling_config) or self.is_end(
            partition_id, task_name, config.get("dp_rank"), config.get("batch_index")
        )

    def clear_cache(self, partition_id: str) -> None:
        """Forget the stream of a partition."""
        super().clear_cache(partition_id)
        self._ends.pop(partition_id, None)

    def samples_cleared(self, partition_id: str, indexes: Sequence[int]) -> None:
        """Take samples out of all answers; when none has samples any more, the ends are forgotten too."""
        super().samples_cleared(partition_id, indexes)
        for task in list(self._ends.get(partition_id, {})):
            if not any(self._answers(partition_id, task).values()):
                del self._ends[partition_id][task]

    def save_checkpoint(self) -> dict[str, Any]:
        """The answers and the ends."""
        return {**super().save_checkpoint(), "_ends": self._ends}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Go on with a state of `save_checkpoint`."""
        super().load_checkpoint(state)
        self._ends = state.get("_ends", {})


def _filled(ready_indexes: list[int], partition: Any, budget: float) -> tuple[list[int], bool]:
    """Samples that fit together, and whether no other would fit any more."""
    lengths = [1] * len(ready_indexes) if partition is None else _lengths(partition, ready_indexes)
    chosen: list[int] = []
    total = 0
    for index, length in zip(ready_indexes, lengths, strict=True):
        if chosen and total + length > budget:
            return chosen, True
        chosen.append(index)
        total += length
        if total >= budget:
            return chosen, True
    return chosen, False
