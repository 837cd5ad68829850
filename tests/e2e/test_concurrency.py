"""One client for many threads, coroutines and event loops; it costs neither descriptors nor threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import descriptors, threads, until
from transfer_queue import _calls


def _round(tq: Any, name: str) -> None:
    value = torch.arange(2048) + hash(name) % 1000
    tq.kv_put(name, "p", {"x": value}, tag={"name": name})
    got = tq.kv_batch_get(name, "p")
    assert torch.equal(got["x"].values(), value)
    assert tq.kv_list("p", keys=[name]) == {"p": {name: {"name": name}}}
    tq.kv_clear(name, "p")


async def _async_round(tq: Any, name: str) -> None:
    value = torch.arange(2048) + hash(name) % 1000
    await tq.async_kv_put(name, "p", {"x": value}, tag={"name": name})
    got = await tq.async_kv_batch_get(name, "p")
    assert torch.equal(got["x"].values(), value)
    assert await tq.async_kv_list("p", keys=[name]) == {"p": {name: {"name": name}}}
    await tq.async_kv_clear(name, "p")


def _in_threads(count: int, work: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result(30)


def test_sixty_four_threads(tq: Any) -> None:
    def work(number: int) -> None:
        for step in range(8):
            _round(tq, f"{number} {step}")

    before = descriptors()
    for _ in range(3):
        _in_threads(64, work)
    assert descriptors() <= before + 64, "at most one for each call at the same time"


def test_five_hundred_coroutines(tq: Any) -> None:
    async def work() -> None:
        await asyncio.gather(*[_async_round(tq, str(number)) for number in range(500)])

    before = descriptors()
    asyncio.run(work())
    assert descriptors() <= before + 1, "one queue for the loop"


def test_threads_and_coroutines_and_loops_together(tq: Any) -> None:
    async def many(number: int) -> None:
        await asyncio.gather(*[_async_round(tq, f"loop {number} {i}") for i in range(30)])

    def work(number: int) -> None:
        if number % 2:
            asyncio.run(many(number))
        else:
            for step in range(10):
                _round(tq, f"thread {number} {step}")

    _in_threads(16, work)


def test_two_hundred_loops_leave_nothing(tq: Any) -> None:
    asyncio.run(_async_round(tq, "warm"))
    before = descriptors(), threads(), _calls.counters()["handles"]
    for number in range(200):
        asyncio.run(_async_round(tq, str(number)))
    after = descriptors(), threads(), _calls.counters()["handles"]
    assert after[0] <= before[0]
    assert after[1] < before[1] + 100, "the Go runtime may have started some, on a busy machine several"
    assert after[2] == before[2]


def test_loops_that_end_with_requests_in_flight_leave_nothing(tq: Any) -> None:
    async def starts(number: int) -> None:
        waits = [asyncio.create_task(tq.async_kv_wait("p", ["never"], timeout=60)) for _ in range(3)]
        await asyncio.sleep(0)
        if number % 2:
            await _async_round(tq, "other")
        assert not any(task.done() for task in waits)

    asyncio.run(starts(0))
    before = descriptors(), _calls.counters()["handles"]
    for number in range(40):
        asyncio.run(starts(number))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(_async_round(tq, "drops what closed loops left"))
    assert descriptors() <= before[0] + 1
    assert _calls.counters()["handles"] <= before[1] + 1


def test_a_loop_closed_over_a_request_is_cleaned_up(tq: Any) -> None:
    before = _calls.counters()["handles"]
    for _ in range(10):
        loop = asyncio.new_event_loop()
        task = loop.create_task(tq.async_kv_wait("p", ["never"], timeout=60))
        loop.run_until_complete(asyncio.sleep(0.001))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
    asyncio.run(_async_round(tq, "next"))
    assert _calls.counters()["handles"] <= before + 2


def test_cancelling_a_coroutine_cancels_its_request_alone(tq: Any) -> None:
    async def work() -> None:
        waits = [asyncio.create_task(tq.async_kv_wait("p", [str(n)], timeout=60)) for n in range(20)]
        await asyncio.sleep(0.05)
        for task in waits[::2]:
            task.cancel()
        await tq.async_kv_batch_put(
            [str(n) for n in range(20)], "p", TensorDict({"x": torch.arange(20)}, batch_size=[20])
        )
        done: list[Any] = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done[::2])
        assert [result.keys for result in done[1::2]] == [[str(n)] for n in range(1, 20, 2)]

    asyncio.run(work())


def test_a_cancelled_put_writes_all_or_nothing(tq: Any) -> None:
    value = torch.arange(1 << 16)

    async def work() -> int:
        written = 0
        for step in range(60):
            task = asyncio.create_task(tq.async_kv_put("a", "p", {"x": value, "y": value}))
            for _ in range(step % 6):
                await asyncio.sleep(0)
            task.cancel()
            outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(outcome, asyncio.CancelledError) or outcome.fields == ["x", "y"]
            listed = await tq.async_kv_list("p", keys=["a"])
            if listed.get("p"):
                got = await tq.async_kv_batch_get("a", "p")
                assert torch.equal(got["x"].values(), got["y"].values())
                written += 1
            await tq.async_kv_clear("a", "p")
        return written

    asyncio.run(work())
    until(lambda: all(unit.staged == 0 for unit in tq.list_units()), "staged writes end")


def test_wait_for_with_a_timeout(tq: Any) -> None:
    async def work() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(tq.async_kv_wait("p", ["never"], timeout=60), 0.05)
        await _async_round(tq, "after")

    asyncio.run(work())


def test_calls_that_wait_inside_a_running_loop(tq: Any) -> None:
    """A synchronous call in a coroutine blocks the loop, as it says, but it works."""

    async def work() -> None:
        _round(tq, "inside")
        await _async_round(tq, "outside")
        await asyncio.get_running_loop().run_in_executor(None, _round, tq, "executor")

    asyncio.run(work())


def test_a_loop_on_a_background_thread(tq: Any) -> None:
    """How programs drive the queue from synchronous code: one loop for ever, work thrown over to it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        futures = [asyncio.run_coroutine_threadsafe(_async_round(tq, f"bg {n}"), loop) for n in range(50)]
        for number in range(10):
            _round(tq, f"main {number}")
        for future in futures:
            future.result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_waiting_calls_do_not_hold_up_others(tq: Any) -> None:
    ends = []

    def waits(number: int) -> None:
        ends.append(tq.kv_wait("p", [f"late {number}"], timeout=30).keys)

    waiting = [threading.Thread(target=waits, args=(number,)) for number in range(32)]
    for thread in waiting:
        thread.start()
    for number in range(20):
        _round(tq, str(number))
    for number in range(32):
        tq.kv_put(f"late {number}", "p", tag={})
    for thread in waiting:
        thread.join(20)
    assert sorted(ends) == sorted([f"late {number}"] for number in range(32))


def test_keys_that_are_cleared_and_put_again_show_no_old_rows(tq: Any) -> None:
    """Several threads over the same keys: a row that a reader gets is whole, and not of a round that was cleared."""
    keys = [str(n) for n in range(8)]
    newest = 0
    stop = threading.Event()
    failed: list[BaseException] = []

    def writes() -> None:
        nonlocal newest
        try:
            for number in range(1, 60):
                value = torch.full((8, 64), number)
                tq.kv_batch_put(keys, "p", TensorDict({"a": value, "b": value.clone()}, batch_size=[8]))
                newest = number
                got = tq.kv_batch_get(keys, "p", strict=True)
                assert got["a"].values().unique().tolist() == [number]
                tq.kv_clear(keys, "p")
        except BaseException as error:
            failed.append(error)
        finally:
            stop.set()

    def reads() -> None:
        try:
            while not stop.is_set():
                at_least = newest
                try:
                    got = tq.kv_batch_get(keys, "p")
                except KeyError:
                    continue
                for a, b in zip(got["a"].unbind(), got["b"].unbind(), strict=True):
                    assert torch.equal(a, b)
                    assert a.unique().numel() == 1
                    assert int(a[0]) >= at_least
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work) for work in (writes, reads, reads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    assert not failed, failed


def test_sessions_that_come_and_go_leave_nothing(runtime_dir: Any) -> None:
    import transfer_queue as tq

    def cycle() -> None:
        tq.init()
        tq.kv_put("a", "p", {"x": torch.arange(1 << 18)})
        tq.kv_batch_get("a", "p")
        view = tq.kv_batch_get("a", "p", copy=False)
        asyncio.run(_async_round(tq, "b"))
        del view
        gc.collect()
        tq.close()

    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:" in text and "tq-core" not in text for text in file)

    for _ in range(2):
        cycle()
    before = descriptors(), threads(), mapped()
    for _ in range(12):
        cycle()
    until(lambda: descriptors() <= before[0], "descriptors are given back")
    assert threads() < before[1] + 12, "the Go runtime may have started some, on a busy machine several"
    until(lambda: mapped() <= before[2], "mappings of unit memory are given back")
    assert os.listdir(runtime_dir) == ["default.lock"]
