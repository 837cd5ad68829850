"""``kill -9`` of a unit's process at random points of random work: what was on disk is there, the rest is named."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from disks import no_value_left
from processes import Nursery
from transfer_queue import errors
from unit_hosts import THRESHOLD, Hosts, unitless

KILLS = 50
KEYS = [f"k{i}" for i in range(24)]
FIELDS = ("x", "y")
LIMIT = 40 << 10
# int64: in memory; in memory until it is spilled; on disk beside others of a file; on disk with pages of its own.
WIDTHS = (4, 200, 200, 300, 700, 700, 12_000)
GONE = (0, 0)

Cell = tuple[str, str]
Outcome = tuple[int, int]  # value and width, or GONE


class Model:
    """What may be in each cell: more than one thing after a call that was interrupted."""

    def __init__(self, tq: Any, rng: random.Random) -> None:
        self.tq, self.rng = tq, rng
        self.may: dict[Cell, set[Outcome]] = {(key, field): {GONE} for key in KEYS for field in FIELDS}
        self.next = 0
        self.problems: list[str] = []  # what interrupted calls said

    def step(self) -> bool:
        """Do something; False when the unit was killed meanwhile."""
        keys = self.rng.sample(KEYS, self.rng.randint(1, 5))
        fields = self.rng.choice([["x"], ["y"], ["x", "y"]])
        what = self.rng.randrange(10)
        if what == 0:
            return self._does(keys, FIELDS, lambda old: GONE, lambda: self.tq.kv_clear(keys, "p"))
        if what == 1:
            return self._does(keys, fields, lambda old: GONE, lambda: self.tq.kv_clear(keys, "p", fields=fields))
        if what == 2:
            return self._updates(keys, fields)
        self.next += 1
        now = (self.next, self.rng.choice(WIDTHS))
        return self._does(keys, fields, lambda old: now, lambda: self._put(keys, fields, now))

    def _put(self, keys: list[str], fields: list[str], now: Outcome) -> None:
        column = torch.full((len(keys), now[1]), now[0])
        self.tq.kv_batch_put(keys, "p", TensorDict({field: column.clone() for field in fields}, batch_size=[len(keys)]))

    def _updates(self, keys: list[str], fields: list[str]) -> bool:
        """Adds to cells that are there, by a native merge or a function."""
        old = {cell for key in keys for field in fields for cell in self.may[(key, field)]}
        if len({width for _, width in old}) != 1 or GONE in old:
            return True
        ((width),) = {width for _, width in old}
        column = torch.full((len(keys), width), 1000)
        data = TensorDict({field: column.clone() for field in fields}, batch_size=[len(keys)])
        merge = self.rng.choice(["add", lambda a, b: a + b])
        return self._does(
            keys, fields, lambda old: (old[0] + 1000, old[1]), lambda: self.tq.kv_batch_update(keys, "p", data, merge)
        )

    def _does(self, keys: Any, fields: Any, now: Any, call: Any) -> bool:
        cells = [(key, field) for key in keys for field in fields]
        then = {cell: {now(old) for old in self.may[cell]} for cell in cells}
        try:
            call()
        except errors.UnavailableError as error:
            self.problems.append(str(error))
            for cell in cells:
                self.may[cell] |= then[cell]
            return False
        self.may.update(then)
        return True

    def check(self) -> tuple[int, int]:
        """Read everything and compare. Returns how many cells are there, and how many were lost."""
        listed = self.tq.kv_list("p").get("p", {})
        lost = {(key, field) for key, fields in self.tq.list_lost("p").get("p", {}).items() for field in fields}
        there = 0
        for (key, field), may in self.may.items():
            got = self._read(key, field, key in listed, (key, field) in lost)
            assert got in may or got is None, f"{key}.{field}: {got}, want one of {may}"
            if got is None:
                volatile = [width for _, width in may if width == 0 or 8 * width < THRESHOLD]
                assert volatile, f"{key}.{field} was on disk: {may}, and is lost"
            self.may[(key, field)] = {got or GONE}
            there += bool(got and got != GONE)
        return there, len(lost)

    def _read(self, key: str, field: str, exists: bool, lost: bool) -> Outcome | None:
        if not exists:
            return GONE
        if lost:
            with pytest.raises(errors.DataLostError, match=f'"{field}" of keys "{key}"'):
                self.tq.kv_batch_get([key], "p", select_fields=[field])
            return None
        try:
            got = self.tq.kv_batch_get([key], "p", select_fields=[field])
        except errors.InvalidArgumentError:  # the key has no field at all
            return GONE
        if field not in list(got.keys()):
            return GONE
        (row,) = got[field].unbind()
        assert (row == row[0]).all(), "it is one write's"
        return int(row[0]), len(row)


@pytest.fixture
def hosts(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path) -> Iterator[Hosts]:
    with unitless(monkeypatch) as tq:
        yield Hosts(tq, nursery, tmp_path / "disk", "relaxed")


def test_a_unit_is_killed_at_random_points(hosts: Hosts) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    tq, model = hosts.tq, Model(hosts.tq, rng)
    spilled = compacted = 0
    for _ in range(KILLS):
        hosts.start("unit-a", limit=LIMIT)
        there, lost = model.check()
        (unit,) = tq.list_units()
        assert (unit.cells, unit.lost_cells, unit.staged) == (there, lost, 0)
        killer = threading.Timer(rng.uniform(0.02, 0.4), hosts.kill, ["unit-a"])
        killer.start()
        while model.step():
            (unit,) = tq.list_units()
        killer.join()
        spilled, compacted = spilled + unit.spilled_bytes, compacted + unit.compacted_bytes
    print(f"{model.next} puts, {spilled} bytes spilled, {compacted} compacted")
    assert min(spilled, compacted) > 0
    assert [text for text in model.problems if "unit-a" not in text and "storage units are gone" not in text] == []
    hosts.start("unit-a", limit=LIMIT)
    model.check()
    while tq.kv_list("p").get("p"):
        tq.kv_clear(list(tq.kv_list("p")["p"]), "p")
    (unit,) = tq.list_units()
    assert (unit.cells, unit.disk_used_bytes, unit.memory_used_bytes, unit.lost_cells) == (0, 0, 0, 0)
    assert no_value_left(hosts.path), "no value is left"
