"""A unit leaves a running session: everything moves, or the job says what has not, wherever the units are."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disks import Disks, disks
from processes import Nursery, program, until
from transfer_queue import _calls, _metrics_text, _session, errors
from transfer_queue._ops import Op
from unit_hosts import Hosts, unitless

__all__ = ["disks"]

SIZES = [0, 1, 4095, 4096, 7001, 12_000, 1 << 20, (8 << 20) + 3]  # the last is more than a batch has
NAMES = ["unit-a", "unit-b", "unit-c"]


def _fill(tq: Any, count: int = 32) -> dict[str, torch.Tensor]:
    """Values of all sizes with two fields each, over all units."""
    want = {f"k{i}": torch.arange(SIZES[i % len(SIZES)], dtype=torch.int64).to(torch.uint8) + i for i in range(count)}
    for i, (key, value) in enumerate(want.items()):
        tq.kv_put(key, "p", fields={"x": value, "n": torch.tensor([i])}, tag={"i": i})
    return want


def _check(tq: Any, want: dict[str, torch.Tensor]) -> None:
    got = tq.kv_batch_get(list(want), "p")
    for i, (row, value) in enumerate(zip(got["x"].unbind(), want.values(), strict=True)):
        assert row.dtype == torch.uint8
        assert torch.equal(row, value), f"k{i}"
    assert got["n"].values().tolist() == list(range(len(want)))
    assert list(tq.kv_list("p")["p"].values()) == [{"i": i} for i in range(len(want))]


def _states(tq: Any) -> dict[str, str]:
    return {unit.unit_id: unit.state for unit in tq.list_units()}


def _unit(tq: Any, name: str) -> Any:
    return next(unit for unit in tq.list_units() if unit.unit_id == name)


def test_both_tiers_move_and_the_unit_may_die_then(disks: Disks) -> None:
    for name in NAMES:
        disks.start(name)
    tq = disks.tq
    want = _fill(tq)
    before = _unit(tq, "unit-a")
    assert before.memory_cells > 0
    assert before.disk_cells > 0
    end = tq.drain("unit-a").wait(timeout=30)
    assert (end.state, end.error) == ("SUCCEEDED", "")
    assert (end.memory.cells_moved, end.disk.cells_moved) == (before.memory_cells, before.disk_cells)
    assert (end.memory.bytes_moved, end.disk.bytes_moved) == (before.memory_logical_bytes, before.disk_logical_bytes)
    assert (end.cells_failed, end.cells_remaining, end.cells_dropped_obsolete, end.failed) == (0, 0, 0, [])
    unit = _unit(tq, "unit-a")
    assert (unit.state, unit.cells, unit.samples, unit.memory_used_bytes, unit.disk_used_bytes) == (
        "DRAINED",
        0,
        0,
        0,
        0,
    )
    assert disks.sums("memory_cells", "disk_cells") == (len(want) * 2 - 20, 20), "each lies where it would lie"
    disks.children[0].signal(signal.SIGKILL)
    until(lambda: "unit-a" not in _states(tq), "the unit is gone")
    _check(tq, want)
    _fill(tq)
    tq.kv_clear(list(want), "p")
    assert disks.sums("cells") == (0,)


def test_random_work_goes_on_during_drains(disks: Disks) -> None:
    """Four threads put, update, clear and read keys of their own while units leave and come back."""
    for name in NAMES:
        disks.start(name)
    tq, stop, failures = disks.tq, threading.Event(), []

    def work(number: int) -> None:
        rng, mine = random.Random(number), {}
        try:
            while not stop.is_set():
                key = f"{number}/{rng.randrange(8)}"
                value = torch.full((rng.choice([0, 3, 700, 9000]),), rng.randrange(100), dtype=torch.int64)
                kind = rng.randrange(4)
                if kind == 0:
                    tq.kv_put(key, "p", fields={"x": value})
                    mine[key] = value
                elif kind == 1 and key in mine:
                    tq.kv_update(key, "p", {"x": value}, "concat")
                    mine[key] = torch.cat([mine[key], value])[:20_000]
                    tq.kv_put(key, "p", fields={"x": mine[key]})
                elif kind == 2:
                    tq.kv_clear(key, "p")
                    mine.pop(key, None)
                elif key in mine:
                    assert torch.equal(tq.kv_batch_get(key, "p")["x"][0], mine[key]), key
            for key, value in mine.items():
                assert torch.equal(tq.kv_batch_get(key, "p")["x"][0], value), key
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    ends = []
    for turn in range(9):
        name = NAMES[turn % 3]
        job = tq.drain(name, max_inflight_bytes=1 << (10 + turn))
        if turn % 4 == 3:
            job.cancel()
        ends.append(job.wait(timeout=60).state)
        tq.uncordon(name)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert ends.count("SUCCEEDED") >= 6
    assert set(ends) <= {"SUCCEEDED", "CANCELLED"}


def test_a_damaged_value_stays_and_is_named(disks: Disks) -> None:
    for name in NAMES[:2]:
        disks.start(name)
    tq = disks.tq
    want = {f"k{i}": torch.full((100_000,), i, dtype=torch.int64) for i in range(8)}
    before: dict[str, int] = {}
    for key, value in want.items():
        before = {unit.unit_id: unit.cells for unit in tq.list_units()}
        tq.kv_put(key, "p", fields={"x": value, "n": torch.tensor([1])})
    name = next(unit.unit_id for unit in tq.list_units() if unit.cells > before[unit.unit_id])
    for file in disks.files():
        at = file.read_bytes().find((b"\x07" + bytes(7)) * 1000)
        if at >= 0:
            with open(file, "r+b") as opened:
                opened.truncate(at + 4000)
    end = tq.drain(name, max_attempts=2).wait(timeout=30)
    assert end.state == "PARTIAL"
    assert [(cell.partition, cell.key, cell.field, cell.attempts) for cell in end.failed] == [
        ("p", "k7", "n", 2),
        ("p", "k7", "x", 2),
    ]
    assert end.cells_failed == 2
    assert end.cells_remaining == 0
    unit = _unit(tq, name)
    assert (unit.state, unit.samples, unit.cells) == ("CORDONED", 1, 2)
    for key in list(want)[:7]:
        assert torch.equal(tq.kv_batch_get(key, "p")["x"][0], want[key])
    assert tq.kv_batch_get("k7", "p", select_fields=["n"])["n"][0].tolist() == [1]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.75])  # a second and more before the end
def test_the_source_is_killed(disks: Disks, part: float) -> None:
    """What has moved is there, the rest is an error at once, and the job does not say that it has succeeded."""
    for name in NAMES:
        disks.start(name)
    tq = disks.tq
    keys = [f"k{i}" for i in range(60)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((40_000,), i)})
    job = tq.drain("unit-a", rate_bytes_per_s=1_000_000, max_slots=1)
    until(lambda: job.status().cells_moved >= part * job.status().cells_total, "it is so far")
    disks.children[0].signal(signal.SIGKILL)
    end = job.wait(timeout=30)
    assert (end.state, end.error[:11]) == ("FAILED", "SOURCE_LOST")
    assert 0 < end.cells_moved < end.cells_total
    gone: list[str] = []
    for i, key in enumerate(keys):
        try:
            assert tq.kv_batch_get(key, "p")["x"][0].unique().tolist() == [i]
        except errors.UnavailableError as error:
            gone.append(str(error))
    assert len(gone) == end.cells_total - end.cells_moved
    assert all("unit-a" in text for text in gone)


def test_a_target_is_killed(disks: Disks) -> None:
    """What was on the source is on the unit that is left."""
    for name in NAMES:
        disks.start(name)
    tq = disks.tq
    keys = [f"k{i}" for i in range(60)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((40_000,), i)})
    job = tq.drain("unit-a", rate_bytes_per_s=20_000_000)
    until(lambda: job.status().cells_moved > 3, "it has begun")
    disks.children[1].signal(signal.SIGKILL)
    end = job.wait(timeout=30)
    assert (end.state, end.cells_failed, end.cells_remaining) == ("SUCCEEDED", 0, 0)
    assert end.cells_moved == end.cells_total
    assert _unit(tq, "unit-a").cells == 0


def test_a_durable_source_is_killed_and_comes_back(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path
) -> None:
    with unitless(monkeypatch) as tq:
        hosts = Hosts(tq, nursery, tmp_path / "disk", "relaxed")
        hosts.start("unit-a")
        hosts.start("unit-b")
        for i in range(40):
            tq.kv_put(f"k{i}", "p", fields={"x": torch.full((40_000,), i)})
        job = tq.drain("unit-a", rate_bytes_per_s=1_500_000, max_slots=1)
        until(lambda: job.status().cells_moved > 3, "it has begun")
        hosts.kill("unit-a")
        assert job.wait(timeout=30).state == "FAILED"
        hosts.start("unit-a")
        assert _states(tq)["unit-a"] == "CORDONED", "it takes no samples before somebody says so"
        end = tq.drain("unit-a").wait(timeout=30)
        assert (end.state, _states(tq)["unit-a"]) == ("SUCCEEDED", "DRAINED")
        for i in range(40):
            assert tq.kv_batch_get(f"k{i}", "p")["x"][0].unique().tolist() == [i]
        assert tq.list_lost() == {}

        hosts.stop("unit-a")
        until(lambda: "unit-a" not in _states(tq), "it is not listed any more")
        hosts.start("unit-a")
        assert _states(tq)["unit-a"] == "DRAINED", "nobody has said that it may take samples"
        tq.uncordon("unit-a")
        assert _states(tq) == {"unit-a": "ACTIVE", "unit-b": "ACTIVE"}


def test_views_keep_their_bytes_and_the_unit_waits_for_them(disks: Disks) -> None:
    disks.start("unit-a", threshold=1 << 40)
    disks.start("unit-b", threshold=1 << 40)
    tq = disks.tq
    tq.kv_put("a", "p", fields={"x": torch.arange(100_000)})
    name = next(unit.unit_id for unit in tq.list_units() if unit.cells)
    view = tq.kv_batch_get("a", "p", copy=False)["x"][0]
    job = tq.drain(name)
    until(lambda: job.status().blocked.get("PINNED"), "it waits")
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.1)
    tq.kv_put("a", "p", fields={"x": torch.zeros(5)})
    assert torch.equal(view, torch.arange(100_000))
    del view
    gc.collect()
    assert job.wait(timeout=30).state == "SUCCEEDED"
    assert tq.kv_batch_get("a", "p")["x"][0].tolist() == [0] * 5


def test_no_room_anywhere(disks: Disks) -> None:
    disks.start("unit-a", limit=4 << 20, threshold=1 << 40, disk_limit_bytes=1)
    disks.start("unit-b", limit=4 << 20, threshold=1 << 40, disk_limit_bytes=1)
    tq = disks.tq
    for i in range(6):
        tq.kv_put(f"k{i}", "p", fields={"x": torch.full((1 << 17,), i)})
    plan = tq.drain("unit-a", dry_run=True).status()
    assert plan.blocked == {"NO_CAPACITY": 2}
    assert (plan.memory.bytes_total, plan.memory.bytes_fit, plan.memory.cells_fit) == (3 << 20, 1 << 20, 1)
    assert (plan.disk.cells_fit, plan.disk.bytes_fit) == (0, 0)
    end = tq.drain("unit-a", deadline_s=1.5).wait(timeout=30)
    assert end.state == "PARTIAL"
    assert end.blocked == {"NO_CAPACITY": end.cells_remaining}
    assert end.cells_remaining == 2
    assert end.memory.cells_fit is None
    assert 1.4 < end.elapsed_s < 10
    assert "1.5s" in end.error
    assert _states(tq)["unit-a"] == "CORDONED"
    assert [int(tq.kv_batch_get(f"k{i}", "p")["x"][0][0]) for i in range(6)] == list(range(6))


@pytest.mark.usefixtures("runtime_dir")
def test_twins_progress_and_bad_input(capfd: pytest.CaptureFixture[str]) -> None:
    import transfer_queue as tq

    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    first, second, third = _states(tq)
    for i in range(6):
        tq.kv_put(f"k{i}", "p", fields={"x": torch.full((1000,), i)})

    async def drained() -> Any:
        job = await tq.async_drain(first, targets=[third])
        assert (await job.async_wait(timeout=30)).state == "SUCCEEDED"
        assert (await job.async_cancel()).state == "SUCCEEDED", "it stays as it is"
        return await job.async_status()

    assert asyncio.run(drained()).done
    assert tq.drain(second, progress=True).wait(timeout=30).state == "SUCCEEDED"
    assert f"drain {second}: 100%" in capfd.readouterr().err
    assert _unit(tq, third).cells == 6
    asyncio.run(tq.async_uncordon(first))
    assert _states(tq) == {first: "ACTIVE", second: "DRAINED", third: "ACTIVE"}
    bad_arguments: list[dict[str, Any]] = [
        {"targets": []},
        {"targets": "unit"},
        {"targets": 5},
        {"targets": [second]},
        {"targets": ["other"]},
        {"max_slots": 0},
        {"max_slots": 1 << 20},
        {"max_inflight_bytes": 0},
        {"rate_bytes_per_s": 0},
        {"deadline_s": 0},
        {"deadline_s": "x"},
        {"max_attempts": 0},
        {"tier_policy": "other"},
    ]
    for bad in bad_arguments:
        with pytest.raises((errors.TransferQueueError, TypeError), match=next(iter(bad))):
            tq.drain(first, **bad)
    with pytest.raises(TypeError, match="unit"):
        tq.drain(3)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="other"):
        tq.uncordon("other")
    with pytest.raises(KeyError, match="77"):
        tq.DrainJob(77, first).status()
    assert _states(tq)[first] == "ACTIVE"
    tq.close()


def test_a_unit_that_has_joined_gets_its_share(disks: Disks) -> None:
    """And chosen samples go where they are told to; a drain finds what a move has left on disk."""
    disks.start("unit-a")
    tq = disks.tq
    want = _fill(tq)
    disks.start("unit-b")
    used = [unit.memory_used_bytes + unit.disk_used_bytes for unit in tq.list_units()]
    (plan,) = tq.rebalance(dry_run=True)
    assert (plan.source, plan.target, plan.bytes) == ("unit-a", "unit-b", sum(used) // 2)
    (moved,) = tq.rebalance()
    assert 0 < moved.bytes <= plan.bytes
    share = [unit.memory_used_bytes + unit.disk_used_bytes for unit in tq.list_units()]
    assert sum(share) == sum(used)
    assert min(share) > sum(share) / 4
    _check(tq, want)
    some = [f"k{i}" for i in range(8)]
    asyncio.run(tq.async_move(some, "p", to="unit-a"))
    assert tq.move(some, "p", to="unit-a") == []
    assert tq.drain("unit-a").wait(timeout=30).state == "SUCCEEDED"
    _check(tq, want)
    with pytest.raises(errors.InvalidStateError, match="unit-a"):
        tq.move(some, "p", to="unit-a")
    with pytest.raises(KeyError, match="none"):
        tq.move("none", "p", to="unit-b")
    tq.uncordon("unit-a")
    assert asyncio.run(tq.async_rebalance(dry_run=True))[0].target == "unit-a"
    session = _session.current()
    page = _metrics_text.render(
        _calls.run(session.handle, _calls.Call(Op.METRICS, b"", lambda reply: reply.body, timeout=9))
    )
    moved = {
        line.split()[0]: float(line.split()[1]) for line in page.decode().splitlines() if line.startswith("tq_moved")
    }
    assert moved["tq_moved_cells_total"] == 2 * moved["tq_moved_samples_total"] >= 2 * len(want)
    assert moved["tq_moved_bytes_total"] >= sum(used)


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with program("-m", "transfer_queue", "serve", "--units", "2") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving session")
        yield process


@pytest.mark.usefixtures("daemon")
def test_commands() -> None:
    import transfer_queue as tq

    def command(want: int, *arguments: str) -> str:
        line = [sys.executable, "-m", "transfer_queue", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == want, done.stdout + done.stderr
        return done.stdout + done.stderr

    tq.init()
    tq.kv_put("a", "p", fields={"x": torch.arange(5)})
    name = next(unit.unit_id for unit in tq.list_units() if unit.cells)
    assert "memory: room for 40 of 40 bytes" in command(0, "drain", name, "--dry-run")
    assert "SUCCEEDED, 1 of 1 cells, 40 of 40 bytes moved" in command(0, "drain", name, "--watch")
    assert {"ACTIVE", "DRAINED"} <= set(command(0, "units").split())
    assert "drained already" in command(1, "drain", name)
    command(0, "uncordon", name)
    assert _states(tq)[name] == "ACTIVE"
    tq.close()
