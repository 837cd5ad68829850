"""``kv_wait`` and ``kv_watch``: no polling, nothing missed, also over several processes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery


def _put_many(line: Any, name: str, count: int) -> None:
    import transfer_queue as tq

    tq.init()
    line.send("ready")
    line.recv()
    for step in range(count):
        key = f"{name} {step}"
        tq.kv_put(key, "p", {"x": torch.tensor([step])}, tag={"step": step})
        if step % 2:
            tq.kv_update(key, "p", {"x": torch.tensor([1])}, "concat")
        if step % 3 == 0:
            tq.kv_clear(key, "p")


def test_a_watch_misses_nothing_that_several_processes_do(tq: Any, nursery: Nursery) -> None:
    children = [nursery.start(_put_many, name, 40) for name in ("a", "b", "c")]
    for child in children:
        child.recv()
    seen: dict[str, list[str]] = {}

    async def work() -> None:
        watch = tq.kv_watch("p")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)  # the watch is open before anything happens
        await tq.async_kv_put("first", "p", tag={})
        change = await asyncio.wait_for(first, 10)
        assert (change.kind, change.key, change.tags) == ("put", "first", {})
        for child in children:
            child.send("go")
        open_keys = {f"{name} {step}" for name in "abc" for step in range(40)}
        while open_keys:
            change = await asyncio.wait_for(anext(watch), 20)
            seen.setdefault(change.key, []).append(change.kind)
            step = int(change.key.split()[1])
            want = ["put"] + ["update"] * (step % 2) + ["clear"] * (step % 3 == 0)
            assert seen[change.key] == want[: len(seen[change.key])], change.key
            if change.kind == "put":
                assert change.fields == ["x"]
                assert change.tags == {"step": step}
            if seen[change.key] == want:
                open_keys.discard(change.key)
        await watch.aclose()

    asyncio.run(work())
    for child in children:
        child.result()


def test_changes_between_two_reads_are_kept(tq: Any) -> None:
    async def work() -> list[Any]:
        watch = tq.kv_watch("p")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        tq.kv_put("a", "p", {"x": torch.ones(1)}, tag={"n": 1})
        got = [await first]
        tq.kv_batch_put(["b", "c"], "p", TensorDict({"x": torch.ones(2)}, batch_size=[2]))
        tq.kv_put("a", "p", tag={"n": 2})
        tq.kv_clear("b", "p", fields="x")
        tq.kv_clear(["a", "b"], "p")
        tq.kv_put("elsewhere", "q", tag={})
        for _ in range(6):
            got.append(await asyncio.wait_for(anext(watch), 10))
        await watch.aclose()
        return got

    got = asyncio.run(work())
    assert [(change.kind, change.key) for change in got] == [
        ("put", "a"),
        ("put", "b"),
        ("put", "c"),
        ("put", "a"),
        ("clear", "b"),
        ("clear", "a"),
        ("clear", "b"),
    ]
    assert got[3].tags == {"n": 2}
    assert got[4].fields == ["x"]
    assert got[5].fields is None


def test_wait_of_several_processes(tq: Any, nursery: Nursery) -> None:
    def waits(line: Any, keys: Any, fields: Any, count: Any, tags: Any) -> Any:
        import transfer_queue as tq

        tq.init()
        line.send("ready")
        meta = tq.kv_wait("p", keys, fields, count, tags, timeout=40)
        return meta.keys, meta.fields, meta.tags

    asked = [
        (["b", "a"], None, None, None),
        (["a", "b"], ["x"], None, None),
        (None, ["x"], 2, None),
        (None, None, 1, {"done": True}),
        (["c"], ["x", "y"], None, {"done": True}),
    ]
    children = [nursery.start(waits, *arguments) for arguments in asked]
    for child in children:
        child.recv()
    tq.kv_put("a", "p", tag={"n": 1})
    tq.kv_put("b", "p", {"x": torch.ones(1)}, tag={"n": 2})
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    tq.kv_put("c", "p", {"x": torch.ones(1)})
    tq.kv_put("c", "p", {"y": torch.ones(1)})
    tq.kv_put("c", "p", tag={"done": True})
    answers = [child.result() for child in children]
    assert answers[0][0] == ["b", "a"]
    assert (answers[1][0], answers[1][1]) == (["a", "b"], ["x"])
    assert answers[1][2] == [{"n": 1}, {"n": 2}]
    assert len(answers[2][0]) >= 2
    assert answers[3][0] == ["c"]
    assert answers[4] == (["c"], ["x", "y"], [{"done": True}])


def test_wait_for_what_is_there_already(tq: Any) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2)}, batch_size=[2]), tags=[{"n": 1}, {"n": 2}])
    assert tq.kv_wait("p", ["b", "a"], ["x"], timeout=0.5).keys == ["b", "a"]
    assert tq.kv_wait("p", count=2, timeout=0.5).keys == ["a", "b"]
    assert tq.kv_wait("p", count=1, tags={"n": 2}, timeout=0.5).keys == ["b"]
    for arguments in (
        {"keys": ["a", "c"]},
        {"keys": ["a"], "fields": ["y"]},
        {"count": 3},
        {"keys": "a", "tags": {"n": 2}},
    ):
        with pytest.raises(TimeoutError):
            tq.kv_wait("p", timeout=0.05, **arguments)


def test_the_end_of_the_session_ends_watches_and_waits(runtime_dir: Any) -> None:
    import transfer_queue as tq

    tq.init()

    async def work() -> None:
        watch = tq.kv_watch("p")
        reading = asyncio.ensure_future(anext(watch))
        waiting = asyncio.ensure_future(tq.async_kv_wait("p", ["never"], timeout=60))
        await asyncio.sleep(0.1)
        await asyncio.get_running_loop().run_in_executor(None, tq.close)
        for task in (reading, waiting):
            with pytest.raises((ConnectionError, RuntimeError)):
                await asyncio.wait_for(task, 10)
        await watch.aclose()

    try:
        asyncio.run(work())
    finally:
        tq.close()


def test_a_watch_that_is_dropped_is_closed(tq: Any) -> None:
    async def work() -> None:
        watch = tq.kv_watch("p")
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        putting = threading.Thread(target=puts)
        putting.start()
        try:
            for _ in range(3):
                async for change in tq.kv_watch("p"):
                    assert change.key == "a"
                    break
        finally:
            stop.set()
            putting.join()

    stop = threading.Event()

    def puts() -> None:
        while not stop.wait(0.01):
            tq.kv_put("a", "p", tag={})

    asyncio.run(work())


def test_any_tag_that_can_be_put_can_be_asked_for(tq: Any) -> None:
    for value in (2**64, -(2**100), b"bytes", {"deep": [1, {"er": None}]}, 1j):
        tq.kv_put("a", "p", tag={"t": value})
        assert list(tq.kv_list("p", tags={"t": value})["p"]) == ["a"]
    assert tq.kv_list("p", tags={"t": 2**64})["p"] == {}
