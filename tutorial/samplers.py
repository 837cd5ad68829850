"""Samplers: which ready samples a fetch hands out. Run `python tutorial/samplers.py`.

Four sessions, each with another sampler: whole prompt groups, shares of about the same length for two ranks, a sampler
of our own, and a stream of micro-batches under a token budget that says when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq

LENGTHS = [9, 11, 1, 1, 6, 6, 7, 3]


@contextmanager
def session(sampler: Any) -> Iterator[tq.TransferQueueClient]:
    """A session with this sampler, in which a fetch without enough samples returns an empty batch at once."""
    tq.init({"controller": {"sampler": sampler, "polling_mode": True}})
    try:
        yield tq.get_client()
    finally:
        tq.close()


def put(client: tq.TransferQueueClient, lengths: list[int], is_last: bool = False) -> None:
    """One sample for each length; the length is a tag, which samplers see without reading the data."""
    rows = TensorDict({"length": torch.tensor(lengths)}, batch_size=[len(lengths)])
    tags = [{"total_lengths": length} for length in lengths]
    client.put(rows, partition_id="train", custom_meta=tags, is_last=is_last)


def fetch(client: tq.TransferQueueClient, size: int | None, **config: Any) -> tuple[list[int], dict[str, Any]]:
    """The lengths of a batch, and what else is said about it."""
    budget = config.pop("token_budget", None)
    meta = client.get_meta(["length"], size, "train", task_name="actor", sampling_config=config, token_budget=budget)
    return client.get_data(meta)["length"].tolist() if meta.size else [], meta.extra_info


def groups() -> None:
    """Groups of n samples, in put order: what GRPO needs to compare the answers to one prompt."""
    with session(tq.GRPOGroupNSampler(n_samples_per_prompt=2)) as client:
        put(client, LENGTHS[:5])
        print("groups:", fetch(client, 4)[0], "then", fetch(client, 2)[0])  # the fifth has no partner yet
        try:
            fetch(client, 3)
        except ValueError as error:
            print("refused:", error)


def ranks() -> None:
    """The first rank that asks decides the shares of both; asking again gives the same, however late."""
    with session(tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)) as client:
        put(client, LENGTHS)
        for rank in (1, 0, 1):
            share, _ = fetch(client, 4, dp_rank=rank, batch_index=0)
            print(f"rank {rank}: {share}, {sum(share)} tokens")


class LongestFirst(tq.BaseSampler):
    """A sampler of our own. It runs in the process that owns the session."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Hands out the longest samples; those are the ones that are consumed by it."""
        tags = partition.get_custom_meta(ready_indexes)
        longest = sorted(ready_indexes, key=lambda index: -tags[index]["total_lengths"])[:batch_size]
        return longest, longest


def own() -> None:
    """The class is named in the configuration; its name or an instance would do as well."""
    with session(LongestFirst) as client:
        put(client, LENGTHS)
        print("longest first:", fetch(client, 3)[0], "then", fetch(client, 3)[0])


def stream() -> None:
    """Batches of 12 tokens at most; the last one comes when production is complete, and after it the end."""
    with session("StreamingTokenBudgetSampler") as client:
        put(client, LENGTHS[:4])
        batch, ended = 0, False
        while not ended:
            lengths, said = fetch(client, None, dp_rank=0, batch_index=batch, token_budget=12)
            ended = said.get("end_of_stream", False)
            if lengths:
                print(f"batch {batch}: {lengths}")
                batch += 1
            elif not ended:  # what is ready would leave room in a batch
                put(client, LENGTHS[4:], is_last=True)
        print("drained:", client.check_stream_drained("actor", "train"))


if __name__ == "__main__":
    groups()
    ranks()
    own()
    stream()
