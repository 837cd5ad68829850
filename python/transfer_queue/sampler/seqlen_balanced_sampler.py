"""Groups dealt out to the ranks by length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transfer_queue._whole_numbers import positive
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]


class _Set:
    """Some items, as (index, length) in the order in which they came together, and their sum."""

    __slots__ = ("items", "total")

    def __init__(self, items: list[tuple[int, Any]], total: Any) -> None:
        self.items, self.total = items, total

    def order(self) -> tuple[Any, int, list[tuple[int, Any]]]:
        return self.total, len(self.items), self.items

    def joined(self, other: _Set) -> _Set:
        return _Set(self.items + other.items, self.total + other.total)

    def __lt__(self, other: _Set) -> bool:
        return self.order() < other.order()


class _Division:
    """A way to put some items into sets, the largest set first; in a heap the widest division comes first."""

    __slots__ = ("sets", "spread")

    def __init__(self, sets: list[_Set]) -> None:
        self.sets = sorted(sets, key=_Set.order, reverse=True)
        self.spread = self.sets[0].total - self.sets[-1].total

    def combined(self, other: _Division) -> _Division:
        return _Division([mine.joined(theirs) for mine, theirs in zip(self.sets, reversed(other.sets), strict=True)])

    def __lt__(self, other: _Division) -> bool:
        if self.spread != other.spread:
            return bool(self.spread > other.spread)
        return other.sets[0] < self.sets[0]


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Deals items out to k parts with about the same total length, by the largest differencing method.

    Args:
        seqlen_list: length of every item.
        k_partitions: number of parts.
        equal_size: every part gets as many items.

    Returns:
        Positions of the items of each part, ascending; the part with the largest total first.

    Raises:
        AssertionError: ``equal_size`` and the items cannot be dealt out evenly.

    Example:
        >>> karmarkar_karp([8, 7, 6, 5], 2, equal_size=True)
        [[1, 2], [0, 3]]
    """
    items = sorted(((length, index) for index, length in enumerate(seqlen_list)), key=lambda item: item[:2])
    step = 1
    if equal_size:
        assert len(items) % k_partitions == 0, f"{len(items)} items cannot be dealt out evenly to {k_partitions} parts"
        step = k_partitions
    divisions = []
    for at in range(0, len(items), step):
        sets = [_Set([(index, length)], length) for length, index in items[at : at + step]]
        divisions.append(_Division(sets + [_Set([], 0) for _ in range(k_partitions - len(sets))]))
    heapq.heapify(divisions)
    while len(divisions) > 1:
        first, second = heapq.heappop(divisions), heapq.heappop(divisions)
        heapq.heappush(divisions, first.combined(second))
    return [sorted(index for index, _ in part.items) for part in divisions[0].sets]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`karmarkar_karp` that insists on parts which are not empty.

    Raises:
        AssertionError: there are fewer items than parts, or a part is empty.
    """
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} items are too few for {k_partitions} parts"
    parts = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    assert all(parts), f"a part of {k_partitions} is empty"
    return parts


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups for all data-parallel ranks at once, dealt out so that the total lengths are about the same.

    The first rank that asks for a ``batch_index`` decides the shares of all; the other shares are promised to their
    ranks and in nobody else's batch, in whatever order the ranks ask. The weight of a sample is its tag
    ``total_lengths``, 1 without one. ``batch_size`` is what one rank gets.

    Args:
        n_samples_per_prompt: samples of a group.
        dp_size: number of ranks.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.dp_size = positive(dp_size, "dp_size")
        # Both by partition, task and batch: the shares, and the ranks that have not asked for theirs.
        self._shares: dict[str, dict[str, dict[Any, list[list[int]]]]] = {}
        self._open: dict[str, dict[str, dict[Any, list[int]]]] = {}

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
        """The share of a rank, by default rank 0 and batch 0; none when there is too little for all ranks.

        Raises:
            ValueError: the batch is not made of whole groups.

        Example:
            >>> sampler = SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
            >>> [sampler([1, 2, 3, 4], 2, dp_rank=rank)[0] for rank in (0, 1)]
            [[1, 2], [3, 4]]
        """
        rank, batch = dp_rank or 0, batch_index or 0
        known = self._shares.get(partition_id, {}).get(task_name, {})
        if batch not in known:
            free = self._free(ready_indexes, partition_id, task_name)
            chosen = self._groups(free, batch_size * self.dp_size, partition)
            if not chosen:
                return [], []
            self._decide(partition_id, task_name, batch, self._dealt(chosen, partition))
            known = self._shares[partition_id][task_name]
        waiting = self._open.get(partition_id, {}).get(task_name, {}).get(batch, [])
        if rank in waiting:
            waiting.remove(rank)
        share = known[batch][rank] if 0 <= rank < len(known[batch]) else []
        return list(share), list(share)

    def _free(self, ready_indexes: list[int], partition_id: str, task_name: str) -> list[int]:
        """Those that are not promised to a rank which has not asked yet."""
        promised: set[int] = set()
        for batch, ranks in self._open.get(partition_id, {}).get(task_name, {}).items():
            for rank in ranks:
                promised.update(self._shares[partition_id][task_name][batch][rank])
        return [index for index in ready_indexes if index not in promised]

    def _decide(self, partition_id: str, task_name: str, batch: Any, shares: list[list[int]]) -> None:
        self._shares.setdefault(partition_id, {}).setdefault(task_name, {})[batch] = shares
        self._open.setdefault(partition_id, {}).setdefault(task_name, {})[batch] = list(range(len(shares)))
        for rank, share in enumerate(shares):
            self._keep(partition_id, task_name, rank, batch, list(share))

    def _dealt(self, chosen: list[int], partition: Any) -> list[list[int]]:
        if partition is None:
            size = len(chosen) // self.dp_size
            cuts = [*range(0, size * self.dp_size, size), len(chosen)]
            return [chosen[a:b] for a, b in pairwise(cuts)]
        lengths = _lengths(partition, chosen)
        n = self.n_samples_per_prompt
        if len(chosen) % (n * self.dp_size):
            parts = get_seqlen_balanced_partitions(lengths, self.dp_size, equal_size=False)
            return [[chosen[at] for at in part] for part in parts]
        groups = [sum(lengths[at : at + n]) for at in range(0, len(chosen), n)]
        parts = get_seqlen_balanced_partitions(groups, self.dp_size, equal_size=True)
        return [[index for group in part for index in chosen[n * group : n * group + n]] for part in parts]

    def clear_cache(self, partition_id: str) -> None:
        """Forget the shares of a partition."""
        super().clear_cache(partition_id)
        self._shares.pop(partition_id, None)
        self._open.pop(partition_id, None)

    def samples_cleared(self, partition_id: str, indexes: Sequence[int]) -> None:
        """Take samples out of all shares. A batch that has lost all its samples is forgotten."""
        super().samples_cleared(partition_id, indexes)
        gone = set(indexes)
        for task, batches in self._shares.get(partition_id, {}).items():
            for batch, shares in list(batches.items()):
                batches[batch] = [[index for index in share if index not in gone] for share in shares]
                if not any(batches[batch]):
                    del batches[batch]
                    self._open[partition_id][task].pop(batch, None)

    def consumption_reset(self, partition_id: str, task_name: str | None) -> None:
        """End the promises to a task: it starts over. Shares stay what they are."""
        tasks = self._open.get(partition_id, {})
        for task in list(tasks) if task_name is None else [task_name]:
            tasks.pop(task, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The answers, the shares, and who has not asked for his."""
        return {**super().save_checkpoint(), "_shares": self._shares, "_open": self._open}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Go on with a state of `save_checkpoint`."""
        super().load_checkpoint(state)
        self._shares, self._open = state.get("_shares", {}), state.get("_open", {})


def _lengths(partition: Any, indexes: list[int]) -> list[Any]:
    """The weights of samples."""
    tags = partition.get_custom_meta(indexes) if hasattr(partition, "get_custom_meta") else partition.custom_meta
    return [tags.get(index, {}).get("total_lengths", 1) for index in indexes]
