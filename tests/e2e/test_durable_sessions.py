"""Durable units beside their controller: the session's end is that of their values, unless it ends by accident."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from disks import offload
from processes import Nursery
from transfer_queue import errors

pytestmark = pytest.mark.parametrize("durability", ["relaxed", "strict"])


def _conf(path: Path, durability: str, **more: Any) -> dict[str, Any]:
    conf = offload(path, 4096, memory_limit_bytes=1 << 20, **more)
    conf["backend"]["SimpleStorage"]["ssd_offload"]["durability"] = durability
    return conf


def _kinds() -> dict[str, Any]:
    return {"large": torch.arange(3000), "small": torch.arange(3), "text": "word " * 2000, "none": None}


def _owns(line: Any, conf: dict[str, Any]) -> None:
    import transfer_queue as tq

    tq.init(conf)
    tq.kv_put("k", "p", fields=_kinds())
    line.send("stored")
    line.recv()


@pytest.mark.parametrize("width", [10, 5000])
def test_a_session_works_as_any_other(runtime_dir: Path, tmp_path: Path, durability: str, width: int) -> None:
    import transfer_queue as tq

    tq.init(_conf(tmp_path, durability))
    try:
        keys = [f"k{i}" for i in range(20)]
        for i, key in enumerate(keys):
            tq.kv_put(key, "p", fields={"x": torch.full((width,), i)})
        tq.kv_update("k1", "p", {"x": torch.full((width,), 5)}, "add")
        tq.kv_update("k2", "p", {"x": torch.full((width,), 5)}, lambda old, new: old * new)
        tq.kv_clear(keys[3:], "p")
        rows = tq.kv_batch_get(keys[:3], "p")["x"].unbind()
        assert [row.unique().tolist() for row in rows] == [[0], [6], [10]]
        tq.save_checkpoint(str(tmp_path / "saved"))
        tq.kv_clear(keys[:3], "p")
        tq.load_checkpoint(str(tmp_path / "saved"))
        rows = tq.kv_batch_get(keys[:3], "p")["x"].unbind()
        assert [row.unique().tolist() for row in rows] == [[0], [6], [10]]
        with pytest.raises(RuntimeError, match="no"):
            tq.kv_update("k1", "p", {"x": torch.zeros(1)}, _fails)
        assert tq.kv_batch_get("k1", "p")["x"].values().unique().tolist() == [6]
    finally:
        tq.close()
    assert not list((tmp_path / "transfer_queue_ssd_offload").iterdir()), "the session is over, and nobody needs them"


def _fails(old: Any, new: Any) -> Any:
    raise RuntimeError("no")


def test_values_of_a_session_that_was_killed_are_not_removed(
    runtime_dir: Path, tmp_path: Path, durability: str, nursery: Nursery
) -> None:
    """Without its controller nobody knows what they are; they are refused untouched until their owner has decided."""
    import transfer_queue as tq

    conf = _conf(tmp_path, durability)
    owner = nursery.start(_owns, conf)
    assert owner.recv() == "stored"
    owner.signal(signal.SIGKILL)
    owner.wait()
    folder = tmp_path / "transfer_queue_ssd_offload" / "default.units" / "unit-0"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        with pytest.raises(errors.AlreadyExistsError, match=f"{folder} holds 3 values of session"):
            tq.init(conf)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    tq.init(_conf(tmp_path / "elsewhere", durability))
    tq.close()
    for path in folder.iterdir():
        path.unlink()
    tq.init(conf)
    try:
        tq.kv_put("k", "p", fields=_kinds())
        got = tq.kv_batch_get("k", "p")
        assert got["text"][0] == "word " * 2000
        assert got["none"][0] is None
        assert got["large"].values().tolist() == list(range(3000))
    finally:
        tq.close()
    assert not folder.exists()


def test_two_sessions_do_not_share_a_folder(
    runtime_dir: Path, tmp_path: Path, durability: str, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transfer_queue as tq

    owner = nursery.start(_owns, _conf(tmp_path, durability))
    assert owner.recv() == "stored"
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(runtime_dir / "other"))
    with pytest.raises(errors.AlreadyExistsError, match="in use"):
        tq.init({**_conf(tmp_path, durability), "runtime": "embedded"})
    owner.send("end")
    owner.wait()
