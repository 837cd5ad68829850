"""Units with a disk in processes of their own: values, limits and errors are those of units beside the controller."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, until
from transfer_queue import _calls, _controller_requests, _session, errors
from transfer_queue._unit import UnitHost

MIB = 1 << 20


def _hosts(line: Any, name: str, limit: int, storage: dict[str, Any]) -> None:
    host = UnitHost(name, limit, storage=storage)
    line.send(host.address)
    line.recv()
    host.close()


class Disks:
    """A session over unit processes that share a folder."""

    def __init__(self, tq: Any, nursery: Nursery, path: Path) -> None:
        self.tq, self.nursery, self.path = tq, nursery, path
        self.children: list[Any] = []

    def start(self, name: str, limit: int = 0, threshold: int = 4096, **storage: Any) -> None:
        offload = {"enabled": True, "path": str(self.path), "threshold_bytes": threshold}
        child = self.nursery.start(_hosts, name, limit, {"ssd_offload": offload, **storage})
        self.children.append(child)
        session = _session.current()
        _calls.run(session.handle, _controller_requests.join_units([child.recv()], session.timeout_s))

    def sums(self, *names: str) -> tuple[int, ...]:
        """Counters over all units."""
        listed = self.tq.list_units()
        return tuple(sum(getattr(unit, name) for unit in listed) for name in names)

    def files(self) -> list[Path]:
        return [file for file in self.path.rglob("values*") if file.is_file()]


@pytest.fixture
def disks(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path) -> Iterator[Disks]:
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    storage = {"SimpleStorage": {"put_wait_s": 10.0}}
    transfer_queue.init({"client": {"timeout_s": 30}, "backend": storage, "remote": {"listen": "tcp://:0"}})
    try:
        yield Disks(transfer_queue, nursery, tmp_path / "disk")
    finally:
        transfer_queue.close()


@pytest.mark.parametrize("width", [2000, MIB])
def test_both_tiers_over_two_units(disks: Disks, width: int) -> None:
    """Rows lie on both units, a column of each on disk; update, views and clear treat them as any value."""
    disks.start("unit-a")
    disks.start("unit-b")
    tq = disks.tq
    keys = [f"k{i}" for i in range(6)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((width,), float(i)), "n": torch.tensor([i])})
    assert all(unit.disk_cells > 0 for unit in tq.list_units()), "rows went to both units"
    assert disks.sums("disk_used_bytes", "memory_used_bytes", "disk_cells") == (6 * 4 * width, 6 * 8, 6)

    got = tq.kv_batch_get(keys[::-1], "p")
    assert got["n"].values().tolist() == [5, 4, 3, 2, 1, 0]
    assert [row.unique().tolist() for row in got["x"].unbind()] == [[5.0 - i] for i in range(6)]
    view = tq.kv_batch_get(keys, "p", select_fields=["x"], copy=False)["x"]

    tq.kv_batch_update(keys, "p", TensorDict({"x": torch.ones(6, width)}, batch_size=[6]), "add")
    one = TensorDict({"x": torch.ones(1, width)}, batch_size=[1])
    tq.kv_batch_update(keys[:1], "p", one, lambda old, new: old + new)
    got = tq.kv_batch_get(keys, "p", select_fields=["x"])["x"]
    assert [row.unique().tolist() for row in got.unbind()] == [[2.0], [2.0], [3.0], [4.0], [5.0], [6.0]]
    assert [row.unique().tolist() for row in view.unbind()] == [[float(i)] for i in range(6)]

    tq.kv_clear(keys[:2], "p")
    assert disks.sums("disk_cells") == (4,)
    del view, got
    tq.kv_clear(keys[2:], "p")
    until(
        lambda: disks.sums("disk_used_bytes", "memory_used_bytes", "leases", "staged") == (0, 0, 0, 0),
        "all space is back",
    )


def test_an_update_that_fails_leaves_every_unit_as_it_was(disks: Disks) -> None:
    disks.start("unit-a")
    disks.start("unit-b")
    tq = disks.tq
    keys = [f"k{i}" for i in range(4)]
    for key in keys:
        tq.kv_put(key, "p", fields={"x": torch.zeros(5000)})
    before = disks.sums("disk_used_bytes", "memory_used_bytes", "staged")

    def fail(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if new[0] == 3:
            raise RuntimeError("no")
        return old + new

    operand = torch.arange(4.0).unsqueeze(1).expand(4, 5000).contiguous()
    with pytest.raises(RuntimeError, match="no"):
        tq.kv_batch_update(keys, "p", TensorDict({"x": operand}, batch_size=[4]), fail)
    until(
        lambda: disks.sums("disk_used_bytes", "memory_used_bytes", "staged") == before, "what was staged is given back"
    )
    assert tq.kv_batch_get(keys, "p")["x"].values().unique().tolist() == [0.0]


def test_threads_find_what_they_wrote_while_cells_move(disks: Disks) -> None:
    """Eight times more than memory: every value is read exactly, and the limit holds."""
    disks.start("unit-a", MIB, 1 << 40)
    tq = disks.tq
    wrong: list[Any] = []

    def work(number: int) -> None:
        last: dict[str, int] = {}
        for step in range(48):
            key = f"{number}-{step * 7 % 16}"
            if step % 4 == 3 and key in last:
                tq.kv_update(key, "p", {"x": torch.full((16_384,), 1)}, "add")
                last[key] += 1
            else:
                tq.kv_put(key, "p", fields={"x": torch.full((16_384,), step)})
                last[key] = step
        for key, want in last.items():
            got = tq.kv_batch_get(key, "p")["x"].values()
            if got.shape != (16_384,) or not (got == want).all():
                wrong.append((key, want, got.unique().tolist()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert disks.sums("memory_used_bytes")[0] <= MIB
        time.sleep(0.01)
    assert not wrong
    assert len(tq.kv_list("p")["p"]) == 4 * 16
    assert disks.sums("spilled_bytes")[0] > 0
    tq.get_client().clear_partition("p")
    assert disks.sums("memory_used_bytes", "disk_used_bytes", "disk_cells") == (0, 0, 0)


def test_a_full_disk_refuses_and_says_why(disks: Disks) -> None:
    disks.start("unit-a", MIB, 1000, disk_limit_bytes=100_000)
    tq = disks.tq
    rows = TensorDict({"x": torch.ones(9, 10_000, dtype=torch.uint8)}, batch_size=[9])
    tq.kv_batch_put([str(n) for n in range(9)], "p", rows)
    with pytest.raises(errors.ResourceExhaustedError, match=r"unit disk.*90000 of 100000 used.*disk_limit"):
        tq.kv_batch_put(["a", "b"], "p", rows[:2])
    assert sorted(tq.kv_list("p")["p"]) == [str(n) for n in range(9)]
    assert disks.sums("disk_used_bytes", "staged") == (90_000, 0)
    tq.kv_clear(["0"], "p")
    tq.kv_batch_put(["a", "b"], "p", rows[:2])
    assert disks.sums("disk_used_bytes") == (100_000,)


def test_a_damaged_value_is_named_by_key_and_the_others_are_read(disks: Disks) -> None:
    disks.start("unit-a")
    tq = disks.tq
    for key, value in (("good", 1), ("bad", 7)):
        tq.kv_put(key, "p", fields={"x": torch.full((5000,), value, dtype=torch.int64)})
    (file,) = disks.files()
    at = file.read_bytes().index((7).to_bytes(8, "little") * 100)
    with file.open("r+b") as damaged:
        damaged.seek(at + 8)
        damaged.write(b"\x55")
    with pytest.raises(
        errors.CorruptionError, match=r'partition "p": key "bad": field "x": the value on disk is damaged'
    ):
        tq.kv_batch_get("bad", "p")
    with pytest.raises(errors.CorruptionError, match=r'key "bad": field "x"'):
        tq.kv_update("bad", "p", {"x": torch.ones(5000, dtype=torch.int64)}, "add")
    assert tq.kv_batch_get("good", "p")["x"].values().unique().tolist() == [1]
    until(lambda: disks.sums("leases", "staged") == (0, 0), "nothing stays leased")


def test_a_checkpoint_has_what_lies_on_disk(disks: Disks, tmp_path: Path) -> None:
    """Eight times more than memory is saved and loaded; a value is as large as all memory of a unit."""
    disks.start("unit-a", MIB, 1 << 40)
    disks.start("unit-b", MIB, 4096)
    tq = disks.tq
    keys = [f"k{i}" for i in range(16)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((MIB // 8,), i)})
    tq.save_checkpoint(str(tmp_path / "saved"))
    tq.kv_clear(keys[:8], "p")
    tq.load_checkpoint(str(tmp_path / "saved"))
    for i, key in enumerate(keys):
        assert tq.kv_batch_get(key, "p")["x"].values().unique().tolist() == [i]
    until(lambda: disks.sums("leases", "staged") == (0, 0), "nothing stays leased")
    assert all(unit.memory_used_bytes <= MIB for unit in tq.list_units())


def test_a_unit_that_ends_leaves_no_files(disks: Disks) -> None:
    disks.start("unit-a")
    disks.tq.kv_put("a", "p", fields={"x": torch.zeros(5000)})
    assert disks.files()
    disks.tq.close()
    disks.children[0].send(None)
    until(lambda: not list(disks.path.rglob("transfer_queue_ssd_offload/*")), "its folders are gone")
    assert os.path.isdir(disks.path)


def _over_tcp(line: Any, at: str, width: int) -> None:
    import transfer_queue as tq

    os.environ["TQ_ADDRESS"] = at
    tq.init()
    rows = torch.arange(4 * width, dtype=torch.int64).reshape(4, width)
    for i in range(4):
        tq.kv_put(f"k{i}", "p", fields={"x": rows[i]})
    tq.kv_update("k3", "p", {"x": rows[3]}, "add")
    for copy in (True, False):
        got = tq.kv_batch_get(["k3", "k0"], "p", copy=copy)["x"].unbind()
        assert torch.equal(got[0], 2 * rows[3])
        assert torch.equal(got[1], rows[0])
    tq.close()
    line.send("done")


@pytest.mark.parametrize("limit", [0, MIB])
@pytest.mark.parametrize("width", [600, 20_000, MIB])
def test_a_client_over_tcp_puts_and_gets_values_on_disk(disks: Disks, limit: int, width: int) -> None:
    """Also values larger than memory, which are staged in scratch space of the unit."""
    disks.start("unit-a", limit)
    disks.start("unit-b", limit)
    child = disks.nursery.start(_over_tcp, _session.current().info.to_addr("requests"), width)
    assert child.recv() == "done"
    assert disks.sums("disk_cells", "disk_used_bytes") == (4, 4 * 8 * width)
    until(lambda: disks.sums("leases", "staged", "memory_used_bytes") == (0, 0, 0), "nothing stays")
