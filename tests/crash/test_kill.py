"""``kill -9`` of writers and readers at any moment: the accounting of the units is exact afterwards (contract A10)."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Child, Nursery, until

ROW = 1 << 14  # int64: 128 KiB
ROWS = 8


def _writes(line: Any, name: str) -> None:
    """Put, overwrite, update and clear batches for ever, as fast as possible."""
    import transfer_queue as tq

    tq.init()
    keys = [f"{name} {row}" for row in range(ROWS)]
    line.send("ready")
    for step in range(1 << 30):
        value = torch.full((ROWS, ROW), step)
        data = TensorDict({"a": value, "b": value.clone(), "small": torch.full((ROWS,), step)}, batch_size=[ROWS])
        tq.kv_batch_put(keys, "p", data, tags=[{"step": step}] * ROWS)
        tq.kv_batch_update(keys, "p", data.select("small"), "max")
        tq.kv_batch_update(keys, "p", data.select("a"), lambda old, new: new)
        if step % 3 == 2:
            tq.kv_clear(keys, "p")


def _reads(line: Any, copied: bool) -> None:
    import transfer_queue as tq

    tq.init()
    keys = [str(row) for row in range(ROWS)]
    line.send("ready")
    while True:
        kept = [tq.kv_batch_get(keys, "p", copy=copied) for _ in range(3)]
        assert len(kept) == 3


def _kill_in(children: list[Child], rng: random.Random) -> None:
    """Kill every process after a short time of its own."""
    for child in children:
        child.recv()
    for child in children:
        time.sleep(rng.uniform(0, 0.03))  # when, not whether: any moment will do
        child.signal(9)
        assert child.wait() == -9


def _quiet(tq: Any) -> bool:
    return all(unit.staged == 0 and unit.leases == 0 for unit in tq.list_units())


def _check_exact(tq: Any) -> None:
    """Everything that is listed is whole, and the units hold exactly its bytes."""
    until(lambda: _quiet(tq), "staged writes and leases of dead processes end")
    total = 0
    listed = tq.kv_list("p").get("p", {})
    writers = {key.split()[0] for key in listed if " " in key}
    for name in writers:
        keys = [f"{name} {row}" for row in range(ROWS)]
        assert set(keys) <= set(listed), "a batch is there as a whole"
        got = tq.kv_batch_get(keys, "p")
        if not got.keys():
            continue
        assert set(got.keys()) == {"a", "b", "small"}
        (step,) = got["small"].unique().tolist()
        assert got["a"].values().unique().tolist() == [step]
        assert got["b"].values().unique().tolist() == [step]
        assert all(listed[key] == {"step": step} for key in keys)
        total += ROWS * (2 * 8 * ROW + 8)
    total += sum(8 * ROW for key in listed if " " not in key)
    assert sum(unit.memory_used_bytes for unit in tq.list_units()) == total


def test_writers_that_are_killed_at_any_moment(tq: Any, nursery: Nursery) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for round_ in range(10):
        _kill_in([nursery.start(_writes, f"w{round_}-{n}") for n in range(3)], rng)
        _check_exact(tq)
        listed = list(tq.kv_list("p").get("p", {}))
        if listed:
            tq.kv_clear(listed, "p")
        assert [unit.memory_used_bytes for unit in tq.list_units()] == [0, 0]
        assert [unit.samples for unit in tq.list_units()] == [0, 0]


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "view"])
def test_readers_that_are_killed_at_any_moment(tq: Any, nursery: Nursery, copied: bool) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    keys = [str(row) for row in range(ROWS)]
    rows = torch.arange(ROWS * ROW).reshape(ROWS, ROW)
    tq.kv_batch_put(keys, "p", TensorDict({"x": rows}, batch_size=[ROWS]))
    for _ in range(8):
        children = [nursery.start(_reads, copied) for _ in range(3)]
        for child in children:
            child.recv()
        for child in children:
            time.sleep(rng.uniform(0, 0.03))
            child.signal(9)
            child.wait()
        _check_exact(tq)
        assert torch.equal(torch.stack(tq.kv_batch_get(keys, "p")["x"].unbind()), rows)
    tq.kv_clear(keys, "p")
    assert [unit.memory_used_bytes for unit in tq.list_units()] == [0, 0], "no pin of a dead reader is left"


def test_what_a_writer_updated_before_it_was_killed_is_never_half(tq: Any, nursery: Nursery) -> None:
    """Two units, one update of all rows: all rows have the same count, and no update that was answered is missing."""
    keys = [str(row) for row in range(ROWS)]
    tq.kv_batch_put(keys, "p", TensorDict({"n": torch.zeros(ROWS, dtype=torch.int64)}, batch_size=[ROWS]))

    def adds(line: Any) -> None:
        import transfer_queue as tq

        tq.init()
        one = TensorDict({"n": torch.ones(ROWS, dtype=torch.int64)}, batch_size=[ROWS])
        line.send(0)
        for step in range(1, 1 << 30):
            tq.kv_batch_update([str(row) for row in range(ROWS)], "p", one, "add")
            line.send(step)

    rng = random.Random(time.monotonic_ns())
    known = 0
    for _ in range(8):
        child = nursery.start(adds)
        child.recv()
        time.sleep(rng.uniform(0, 0.03))
        child.signal(9)
        child.wait()
        answered = 0
        while child.line.poll(0):
            try:
                answered = child.line.recv()
            except (EOFError, ConnectionResetError):
                break
        until(lambda: _quiet(tq), "staged updates of dead processes end")
        counts = tq.kv_batch_get(keys, "p")["n"].unique().tolist()
        assert len(counts) == 1
        assert counts[0] - known in (answered, answered + 1)
        known = counts[0]


def test_an_owner_that_is_killed_leaves_no_memory(nursery: Nursery, runtime_dir: Any) -> None:
    """Unit memory has no name, so the kernel frees it with its last process; the files are replaced."""

    def owns(line: Any) -> None:
        import transfer_queue as tq

        tq.init()
        tq.kv_put("a", "p", {"x": torch.zeros(64 << 20, dtype=torch.uint8)})
        line.send("ready")
        line.recv()

    def shared() -> int:
        with open("/proc/meminfo") as file:
            (kib,) = [int(text.split()[1]) for text in file if text.startswith("Shmem:")]
        return kib << 10

    before = shared()
    children = []
    for _ in range(3):
        child = nursery.start(owns)
        child.recv()
        child.signal(9)
        child.wait()
        children.append(child)
    until(lambda: shared() < before + (64 << 20), "memory of dead owners is free")
    import transfer_queue as tq

    tq.init()
    try:
        assert tq.kv_list() == {}
        assert len(list(runtime_dir.glob("*.sock"))) == 1, "sockets of dead owners are removed"
    finally:
        tq.close()
