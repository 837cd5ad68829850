"""``kill -9`` at any point of a save and of a load (contract F17): the old or the new checkpoint loads whole."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, until

POINTS = 20
ROW = 1 << 17  # int64: 1 MiB
KEYS = [str(row) for row in range(12)]


def _data(n: int) -> TensorDict:
    noise = torch.randint(0, 2**62, (len(KEYS), ROW))
    noise[:, 0] = n
    return TensorDict({"x": noise, "n": torch.full((len(KEYS),), n)}, batch_size=[len(KEYS)])


def _version(tq: Any) -> int:
    """The version of what the session holds, which must be one for all rows, fields and tags."""
    listed = tq.kv_list("p")["p"]
    assert list(listed) == KEYS
    got = tq.kv_batch_get(KEYS, "p")
    (n,) = got["n"].unique().tolist()
    assert [row[0].item() for row in got["x"].unbind()] == [n] * len(KEYS)
    assert all(tag == {"n": n} for tag in listed.values())
    return int(n)


def _own(folder: str) -> Any:
    """A session of this process alone."""
    os.environ["TQ_RUNTIME_DIR"] = folder
    import transfer_queue as tq

    tq.init({"runtime": "embedded"})
    return tq


def _saves(line: Any, folder: str, path: str, n: int) -> None:
    """Save version after version, telling each that has come to its end."""
    tq = _own(folder)
    while True:
        tq.kv_batch_put(KEYS, "p", _data(n), tags=[{"n": n}] * len(KEYS))
        line.send(("begins", n))
        tq.save_checkpoint(path, metadata={"n": n})
        line.send(("saved", n))
        n += 1


def _last(child: Any) -> dict[str, int]:
    """The newest number of each word that the child sent before it died."""
    words: dict[str, int] = {}
    while child.line.poll(1):
        try:
            word, n = child.line.recv()
        except (EOFError, ConnectionResetError):
            break
        words[word] = n
    return words


@pytest.mark.timeout(200)
def test_a_save_that_is_killed_at_any_point(tq: Any, nursery: Nursery, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    folder, path = tmp_path / "r", tmp_path / "saves" / "c"
    saved = 0
    for point in range(POINTS):
        child = nursery.start(_saves, str(folder), str(path), saved + 1)
        while child.recv()[0] != "saved":
            pass
        time.sleep(rng.uniform(0, 0.25))  # when, not whether: any point will do
        child.signal(9)
        assert child.wait() == -9
        words = {"saved": saved + 1} | _last(child)
        tq.load_checkpoint(path)
        saved = _version(tq)
        assert words["saved"] <= saved <= words.get("begins", words["saved"]), f"point {point}"
        assert json.loads((path / "metadata.json").read_text())["user_metadata"] == {"n": saved}
    tq.save_checkpoint(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["c"], "what dead saves left is gone"


def _loads(line: Any, paths: list[str]) -> None:
    """Load one after the other for ever, in the session of the test."""
    import transfer_queue as tq

    line.send("ready")
    while True:
        for path in paths:
            tq.load_checkpoint(path)


def _loads_alone(line: Any, folder: str, paths: list[str]) -> None:
    tq = _own(folder)
    line.send("ready")
    while True:
        for path in paths:
            tq.load_checkpoint(path)


@pytest.mark.timeout(200)
def test_a_load_that_is_killed_at_any_point(tq: Any, nursery: Nursery, tmp_path: Path) -> None:
    """Its client or its owner is killed, in turns; the session of a dead client holds one checkpoint or the other."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    paths = [str(tmp_path / str(n)) for n in range(2)]
    for n, path in enumerate(paths):
        tq.kv_batch_put(KEYS, "p", _data(n), tags=[{"n": n}] * len(KEYS))
        tq.save_checkpoint(path)
    payload = sum(unit.memory_used_bytes for unit in tq.list_units())
    for point in range(POINTS):
        child = nursery.start(_loads, paths) if point % 2 else nursery.start(_loads_alone, str(tmp_path / "r"), paths)
        child.recv()
        time.sleep(rng.uniform(0, 0.2))
        child.signal(9)
        assert child.wait() == -9
        until(lambda: all(u.staged == 0 and u.leases == 0 for u in tq.list_units()), "nothing is left of the load")
        assert _version(tq) in (0, 1)
        assert sum(unit.memory_used_bytes for unit in tq.list_units()) == payload
    for n, path in enumerate(paths):
        tq.load_checkpoint(path)
        assert _version(tq) == n
