"""A real file system of a few MiB, filled to the last byte again and again."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue
from disks import Disks, disks, offload
from processes import until
from transfer_queue import errors

__all__ = ["disks"]

KIB = 1 << 10
MIB = 1 << 20
CYCLES = 100


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB, of which a unit keeps 4 for itself."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"only who may mount can fill a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def taken(folder: Path) -> int:
    """Bytes of a file system that are in use."""
    stat = os.statvfs(folder)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


class Filling:
    """A queue that is filled, and what it has taken."""

    def __init__(self, tq: Any) -> None:
        self.tq, self.stored = tq, dict[str, int]()

    def put(self, key: str, numbers: int) -> None:
        self.tq.kv_put(key, "p", fields={"x": torch.full((numbers,), numbers), "n": torch.tensor(numbers)})
        self.stored[key] = numbers

    def fill(self, pick: random.Random) -> None:
        """Put values of all sizes until one is refused."""
        for number in range(10_000):
            self.put(f"k{number}", pick.choice([100, 4 * KIB, 20 * KIB, 80 * KIB]))

    def check(self, keys: list[str]) -> None:
        for key in keys:
            got = self.tq.kv_batch_get(key, "p")
            assert got["n"].item() == self.stored[key], key
            assert got["x"].values().shape == (self.stored[key],), key
            assert (got["x"].values() == self.stored[key]).all(), key

    def clear(self, keys: list[str]) -> None:
        self.tq.kv_clear(keys, "p")
        for key in keys:
            del self.stored[key]


def fill_and_clear(tq: Any, folder: Path, cycles: int) -> None:
    """Puts fail cleanly when it is full, reads and clears go on, puts work again, and no byte is lost in all cycles."""
    pick = random.Random(5)
    base = taken(folder)
    for cycle in range(cycles):
        one = Filling(tq)
        with pytest.raises(errors.ResourceExhaustedError, match=r"unit (disk|memory)"):
            one.fill(pick)
        assert sorted(tq.kv_list("p")["p"]) == sorted(one.stored), cycle
        keys = list(one.stored)
        if cycle % 10 == 0:
            one.check(keys)
        with contextlib.suppress(errors.ResourceExhaustedError):  # a full disk may have no room for old and new
            tq.kv_update(keys[0], "p", {"x": torch.zeros(one.stored[keys[0]], dtype=torch.int64)}, "add")
        one.check(keys[:3])
        one.clear(keys[::2])
        one.put("again", 4 * KIB)
        one.check(["again", *keys[1:7:2]])
        one.clear(list(one.stored))
        assert sum(unit.disk_used_bytes + unit.memory_used_bytes for unit in tq.list_units()) == 0, cycle
        until(lambda: taken(folder) <= base + 64 * KIB, "the file system is empty again")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("threshold", [16 * KIB, 1 << 40])
def test_a_unit_fills_a_file_system_to_the_last_byte(runtime_dir: Path, small: Path, threshold: int) -> None:
    """Large values go to disk when they are put, or all do when there is no room in memory."""
    transfer_queue.init(offload(small, threshold, memory_limit_bytes=MIB, put_wait_s=0.02))
    try:
        fill_and_clear(transfer_queue, small, CYCLES)
    finally:
        transfer_queue.close()
    assert list(small.rglob("transfer_queue_ssd_offload/*")) == []
    assert taken(small) == 0 or not [path for path in small.rglob("*") if path.is_file()]


def test_a_unit_in_a_process_of_its_own_does_too(small: Path, disks: Disks) -> None:
    """The limit of the controller's wait is that of the fixture, so there are fewer cycles."""
    disks.path = small
    disks.start("unit-a", MIB, 16 * KIB)
    disks.tq.kv_put("first", "p", fields={"x": torch.zeros(5)})
    disks.tq.kv_clear("first", "p")
    fill_and_clear(disks.tq, small, 5)
