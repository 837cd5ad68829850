"""Ctrl-C ends a blocking call at once, and the client is as good as before."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from processes import Nursery, descriptors, until


def _interrupted(call: Callable[[], Any], after_s: float = 0.15) -> float:
    """Seconds between the signal and the KeyboardInterrupt that comes out of the call."""
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, interrupt)
    try:
        timer.start()
        call()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    raise AssertionError("the call was not interrupted")


def _blocking_calls(line: Any) -> dict[str, float]:
    """In a process that hosts no units: how long every kind of wait takes to end."""
    import asyncio

    import transfer_queue as tq

    tq.init()
    client = tq.get_client()

    def slow(old: Any, new: Any) -> Any:
        time.sleep(1)
        return new

    async def wait_in_loop() -> None:
        await tq.async_kv_wait("p", keys=["never"], timeout=30)

    calls: dict[str, Callable[[], Any]] = {
        "wait": lambda: tq.kv_wait("p", keys=["never"], timeout=30),
        "fetch": lambda: client.get_meta(["x"], 5, "p", task_name="t", timeout=30),
        "update": lambda: tq.kv_update("a", "p", {"x": torch.ones(1)}, slow, timeout=30),
        "put without room": lambda: tq.kv_put("big", "p", {"y": torch.zeros(1 << 19)}, timeout=30),
        "asyncio": lambda: asyncio.run(wait_in_loop()),
    }
    tq.kv_put("a", "p", {"x": torch.zeros(1), "fills": torch.zeros(3 << 18)})
    took = {name: min(_interrupted(call) for _ in range(3)) for name, call in calls.items()}
    assert tq.kv_list("p") == {"p": {"a": {}}}, "an interrupted put leaves nothing"
    tq.kv_put("b", "p", {"x": torch.ones(1)})
    assert tq.kv_batch_get("b", "p")["x"].values().tolist() == [1.0]

    before = descriptors()
    for _ in range(20):
        _interrupted(calls["wait"], after_s=0.01)
    assert descriptors() <= before + 2, "descriptors grow with interrupts"
    return took


class TestWithLittleRoom:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        storage = {"num_data_storage_units": 1, "memory_limit_bytes": 4 << 20, "put_wait_s": 30}
        return {"backend": {"SimpleStorage": storage}}

    def test_every_kind_of_wait_ends_within_a_fifth_of_a_second(self, tq: Any, nursery: Nursery) -> None:
        took = nursery.start(_blocking_calls).result()
        assert {name: seconds for name, seconds in took.items() if seconds > 0.2} == {}


def _random_interrupts(line: Any, seed: int, seconds: float) -> int:
    """Interrupt puts, gets, updates and clears anywhere, mostly between two lines of Python."""
    import transfer_queue as tq

    class Interrupt(Exception):
        pass

    armed = fired = False

    def handler(*_: Any) -> None:
        nonlocal fired
        if armed:
            fired = True
            raise Interrupt

    tq.init()
    signal.signal(signal.SIGALRM, handler)
    rng = random.Random(seed)
    large, small = torch.arange(1 << 16), torch.arange(4)
    count = 0
    end = time.monotonic() + seconds
    before = 0
    while time.monotonic() < end:
        key = str(rng.randrange(4))
        try:
            armed, fired = True, False
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-3))
            tq.kv_put(key, "p", {"large": large, "small": small})
            got = tq.kv_batch_get(key, "p", copy=rng.random() < 0.5)
            assert torch.equal(got["large"].values(), large)
            tq.kv_update(key, "p", {"small": small}, "concat")
            tq.kv_clear(key, "p")
            armed = False
        except Exception:  # torch and tensordict turn the interrupt into errors of their own
            if not fired:
                raise
            count += 1
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if count == 20:
            before = descriptors()
    assert descriptors() <= before + 4, f"descriptors grew from {before} to {descriptors()} in {count} interrupts"
    return count


def test_interrupts_at_random_times_leave_nothing_behind(tq: Any, nursery: Nursery) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    child = nursery.start(_random_interrupts, seed, 5.0)
    assert child.result() > 50

    def settled() -> bool:
        return all(unit.staged == 0 and unit.leases == 0 for unit in tq.list_units())

    until(settled, "staged writes and leases of interrupted calls end")
    # What is there is whole.
    for key in tq.kv_list("p")["p"]:
        got = tq.kv_batch_get(key, "p")
        assert torch.equal(got["large"].values(), torch.arange(1 << 16))
        assert got["small"].values().numel() in (4, 8)


def _interrupted_init(line: Any, folder: str) -> float:
    import fcntl

    import transfer_queue as tq

    with open(f"{folder}/default.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # an owner that never gets ready
        took = min(_interrupted(tq.init) for _ in range(3))
    tq.init()  # now there is none; what was interrupted does not come back
    tq.kv_put("a", "p", tag={})
    tq.close()
    return took


def test_waiting_for_an_owner_can_be_interrupted(nursery: Nursery, runtime_dir: Any) -> None:
    assert nursery.start(_interrupted_init, str(runtime_dir)).result() < 0.2
