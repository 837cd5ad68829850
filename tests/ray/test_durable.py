"""Durable units under Ray: an actor whose process is killed is started again, and has what was on its disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import until
from transfer_queue import errors


@pytest.fixture
def conf(tmp_path: Path) -> dict[str, Any]:
    """Two units that share a folder."""
    offload = {"enabled": True, "path": str(tmp_path), "threshold_bytes": 4096, "durability": "relaxed"}
    return {"backend": {"SimpleStorage": {"num_data_storage_units": 2, "ssd_offload": offload}}}


def _states(tq: Any) -> list[str]:
    return [unit.state for unit in tq.list_units()]


def test_a_killed_unit_is_started_again_and_joins(tq: Any, tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(6)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((5000,), i), "n": torch.tensor([i])})
    from transfer_queue import _ray, _session

    actors = _ray.actors()
    assert actors is not None
    infos = _session.current().config["backend"]["SimpleStorage"]["zmq_info"]
    os.kill(infos["unit-0"].pid, signal.SIGKILL)
    until(lambda: _gone_or_lost(tq), "the end of the unit is seen")
    until(lambda: _states(tq) == ["ACTIVE", "ACTIVE"] and tq.list_lost(), "the unit is there again", 60)
    rows = tq.kv_batch_get(keys, "p", select_fields=["x"])["x"].unbind()
    assert [int(row[0]) for row in rows] == list(range(6))
    lost = tq.list_lost()["p"]
    assert 0 < len(lost) < 6
    with pytest.raises(errors.DataLostError, match="n"):
        tq.kv_batch_get(list(lost), "p", select_fields=["n"])
    tq.close()
    assert not list(tmp_path.rglob("values-*")), "the session has ended, and nobody needs them"


def _gone_or_lost(tq: Any) -> bool:
    return "UNAVAILABLE" in _states(tq) or bool(tq.list_lost())
