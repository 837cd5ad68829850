"""Identical payloads of a batch are sent and stored once, in both tiers and wherever the units are."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import stored_once
from disks import Disks, disks, offload
from processes import program, until

__all__ = ["disks"]

MIB = 1 << 20
WIDTHS = (100, 3000, 40_000)  # with the request, in one page's neighbourhood, in pages of their own


@pytest.mark.parametrize("numbers", WIDTHS)
def test_in_memory(tq: Any, numbers: int) -> None:
    stored_once.exercise(tq, numbers)


class TestOnDisk:
    """Values of 4 KiB and more go to disk."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return offload(tmp_path, 4096)

    @pytest.mark.parametrize("numbers", WIDTHS)
    def test_on_disk(self, tq: Any, numbers: int) -> None:
        stored_once.exercise(tq, numbers)

    def test_values_and_bytes_are_counted(self, tq: Any) -> None:
        """Logical bytes count a payload for each that has it, used ones once."""
        one = torch.arange(1000).expand(5, -1)
        tq.kv_batch_put(list("abcde"), "p", TensorDict({"x": one}, batch_size=[5]), dedup="x")
        (unit,) = tq.list_units()
        assert (unit.disk_cells, unit.disk_logical_bytes, unit.disk_used_bytes) == (5, 40_000, 8000)
        assert unit.memory_cells == unit.memory_logical_bytes == 0


class TestLittleMemory:
    """A limit of one MiB, and a disk below."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return offload(tmp_path, memory_limit_bytes=MIB, put_wait_s=20)

    def test_a_batch_that_fits_only_because_its_rows_are_alike(self, tq: Any) -> None:
        rows = torch.arange(MIB // 16).expand(40, -1)
        tq.kv_batch_put([str(n) for n in range(40)], "p", TensorDict({"x": rows}, batch_size=[40]), dedup=["x"])
        (unit,) = tq.list_units()
        assert (unit.memory_used_bytes, unit.disk_used_bytes) == (MIB // 2, 0)

    def test_shared_payloads_spill_as_one_and_are_read_meanwhile(self, tq: Any) -> None:
        rows = torch.arange(MIB // 64)
        for n in range(30):
            keys = [f"{n}-{i}" for i in range(4)]
            tq.kv_batch_put(keys, "p", TensorDict({"x": (rows + n).expand(4, -1)}, batch_size=[4]), dedup=["x"])
        (unit,) = tq.list_units()
        assert unit.memory_used_bytes + unit.disk_used_bytes == 30 * MIB // 8
        assert unit.spilled_bytes > 0
        for n in range(30):
            got = tq.kv_batch_get([f"{n}-0", f"{n}-3"], "p")["x"]
            assert all(torch.equal(row, rows + n) for row in got.unbind())
        tq.get_client().clear_partition("p")
        (unit,) = tq.list_units()
        assert (unit.memory_used_bytes, unit.disk_used_bytes, unit.disk_cells, unit.memory_cells) == (0, 0, 0, 0)


class TestFull:
    """A limit of one MiB and no disk."""

    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        section = {"num_data_storage_units": 1, "memory_limit_bytes": MIB, "put_wait_s": 20}
        return {"backend": {"SimpleStorage": section}}

    def test_a_put_that_waits_for_room_has_copied_each_payload_once(self, tq: Any) -> None:
        """The caller may change its tensor when it has been copied aside."""
        tq.kv_put("old", "p", fields={"x": torch.zeros(MIB // 8, dtype=torch.int64)})
        value = torch.arange(MIB // 16)

        async def put() -> None:
            rows = TensorDict({"x": value.expand(3, -1), "y": torch.arange(3)}, batch_size=[3])
            waiting = asyncio.ensure_future(tq.async_kv_batch_put(list("abc"), "p", rows, dedup=["x"]))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            value.zero_()
            await tq.async_kv_clear("old", "p")
            await waiting

        asyncio.run(put())
        got = tq.kv_batch_get(list("abc"), "p")
        assert all(torch.equal(row, torch.arange(MIB // 16)) for row in got["x"].unbind())
        assert got["y"].tolist() == [0, 1, 2]
        assert stored_once.used(tq) == MIB // 2 + 24


def test_results_of_a_parser_are_stored_once(tq: Any) -> None:
    """The rows are compared after the parser, where they are stored."""

    def parse(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": [torch.full((5000,), int(row[0]) % 2) for row in columns["x"]], "y": columns["y"]}

    fields = TensorDict({"x": torch.arange(6).reshape(6, 1), "y": torch.zeros(6, 10)}, batch_size=[6])
    tq.kv_batch_put([str(n) for n in range(6)], "p", fields, data_parser=parse, dedup=["x"])
    assert stored_once.used(tq) == 2 * 40_000 + 6 * 40
    got = tq.kv_batch_get([str(n) for n in range(6)], "p")["x"]
    assert [row.unique().tolist() for row in got.unbind()] == [[n % 2] for n in range(6)]


def test_fields_that_are_not_put_are_refused_and_nothing_is_stored(tq: Any) -> None:
    fields = TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2])
    with pytest.raises(ValueError, match='dedup: field "y" is not among'):
        tq.kv_batch_put(["a", "b"], "p", fields, dedup=["x", "y"])
    with pytest.raises(TypeError, match="dedup"):
        tq.kv_batch_put(["a", "b"], "p", fields, dedup=3)
    with pytest.raises(ValueError, match="dedup"):
        tq.kv_batch_put(["a", "b"], "p", tags=[{}, {}], dedup=["x"])
    assert tq.kv_list("p") == {}


def test_an_overwrite_and_a_put_to_other_units_may_share(tq: Any) -> None:
    """Rows that exist keep their units; each unit stores a payload once."""
    keys = [str(n) for n in range(20)]
    for key in keys:
        tq.kv_put(key, "p", fields={"x": torch.arange(20_000)})
    ones = torch.ones(20_000, dtype=torch.int64).expand(20, -1)
    tq.kv_batch_put(keys, "p", TensorDict({"x": ones}, batch_size=[20]), dedup=["x"])
    units = len([unit for unit in tq.list_units() if unit.memory_used_bytes])
    assert stored_once.used(tq) == units * 160_000
    assert tq.kv_batch_get(keys, "p")["x"].values().unique().tolist() == [1]


def test_threads_share_and_clear_and_find_their_own(tq: Any) -> None:
    """Puts of the same keys race: every read is of one put."""
    wrong: list[Any] = []
    keys = [str(n) for n in range(4)]

    def work(number: int) -> None:
        for step in range(30):
            value = torch.full((4000,), number * 1000 + step).expand(4, -1)
            tq.kv_batch_put(keys, "p", TensorDict({"x": value}, batch_size=[4]), dedup=["x"])
            rows = tq.kv_batch_get(keys, "p")["x"].values().reshape(4, -1).unique(dim=1)
            if rows.shape != (4, 1) or len(rows.unique()) != 1:
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    until(lambda: stored_once.used(tq) == 32_000, "one payload is left")


@pytest.mark.parametrize("numbers", WIDTHS)
def test_units_in_processes_of_their_own(disks: Disks, numbers: int) -> None:
    disks.start("unit-a")
    stored_once.exercise(disks.tq, numbers)


@pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")
@pytest.mark.parametrize("numbers", WIDTHS)
def test_over_tcp(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """The bytes of a payload travel once."""
    import transfer_queue

    with program("-m", "transfer_queue", "serve", "--units", "1", "--listen", "tcp://:0") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].split()[0]
        monkeypatch.setenv("TQ_ADDRESS", address)
        transfer_queue.init()
        try:
            stored_once.exercise(transfer_queue, numbers)
        finally:
            transfer_queue.close()


def test_a_large_group_is_put_in_the_time_of_one(tq: Any) -> None:
    """Sixteen samples of one image of 32 MiB: it is copied once, not sixteen times."""
    image = torch.arange(4 * MIB).expand(16, -1)
    begun = time.monotonic()
    tq.kv_batch_put([str(n) for n in range(16)], "p", TensorDict({"x": image}, batch_size=[16]), dedup=["x"])
    took = time.monotonic() - begun
    assert stored_once.used(tq) == 32 * MIB
    assert took < 5
