"""Concurrent updates of one cell: each is applied once, none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from processes import Nursery


def _add_ones(line: Any, times: int) -> None:
    import transfer_queue as tq

    tq.init()
    line.send("ready")
    line.recv()
    for _ in range(times):
        tq.kv_update("n", "p", {"value": torch.ones(1, dtype=torch.int64)}, lambda old, new: old + new)


def test_fifty_processes_add_one_twenty_times(tq: Any, nursery: Nursery) -> None:
    tq.kv_put("n", "p", {"value": torch.zeros(1, dtype=torch.int64)})
    children = [nursery.start(_add_ones, 20) for _ in range(50)]
    for child in children:
        child.recv()
    for child in children:
        child.send("go")
    for child in children:
        child.result()
    assert tq.kv_batch_get("n", "p")["value"].values().tolist() == [1000]


def test_five_hundred_coroutines_add_one(tq: Any) -> None:
    tq.kv_put("n", "p", {"value": torch.zeros(1, dtype=torch.int64)})
    one = {"value": torch.ones(1, dtype=torch.int64)}

    async def work() -> None:
        await asyncio.gather(*[tq.async_kv_update("n", "p", one, "add") for _ in range(500)])

    asyncio.run(work())
    assert tq.kv_batch_get("n", "p")["value"].values().tolist() == [500]


def test_updates_puts_and_clears_of_a_key_leave_one_of_the_outcomes(tq: Any, nursery: Nursery) -> None:
    """Whatever order they come in, the key holds what some order gives: never half of it."""
    tq.kv_put("n", "p", {"a": torch.zeros(2), "b": torch.zeros(2)})

    def work(line: Any, number: int) -> None:
        import transfer_queue as tq

        for step in range(20):
            value = torch.full((2,), float(number * 100 + step))
            tq.kv_put("n", "p", {"a": value, "b": value})
            got = tq.kv_batch_get("n", "p")
            assert torch.equal(got["a"].values(), got["b"].values()), "a put was seen half"

    children = [nursery.start(work, number) for number in range(4)]
    for child in children:
        child.result()
