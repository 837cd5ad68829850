"""A controller of Ray that is killed goes on from its journal, in a process that Ray starts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import until


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("journal")
    journal = {"durability": "relaxed", "path": str(folder), "restart_wait_s": 60}
    return {"client": {"timeout_s": 60}, "controller": {"journal": journal}}


def _rows(value: int) -> TensorDict:
    return TensorDict({"x": torch.full((1, 3), value)}, batch_size=[1])


def test_a_controller_is_killed(tq: Any, conf: dict[str, Any]) -> None:
    from transfer_queue import _session

    tq.kv_batch_put(["a"], "p", _rows(0))
    stop, added = threading.Event(), []

    def add() -> None:
        while not stop.is_set():
            tq.kv_batch_update(["a"], "p", _rows(1), "add")
            added.append(1)

    adding = threading.Thread(target=add)
    adding.start()
    try:
        owner = _session.current().owner_pid
        for _ in range(2):
            _go_on(added)
            os.kill(owner, signal.SIGKILL)
            _go_on(added)
            owner = _owner()
    finally:
        stop.set()
        adding.join(60)
    (row,) = tq.kv_batch_get(["a"], "p")["x"].unbind()
    assert row.tolist() == [len(added)] * 3
    assert {unit.state for unit in tq.list_units()} == {"ACTIVE"}
    folder = Path(conf["controller"]["journal"]["path"], "transfer_queue_journal", "default")
    assert list(folder.iterdir())


def _go_on(added: list[int]) -> None:
    before = len(added)
    until(lambda: len(added) > before + 10, "updates happen", 60)


def _owner() -> int:
    """The process of the controller."""
    import ray
    from transfer_queue import _ray

    handle = ray.get_actor(_ray.NAME, namespace=_ray.NAMESPACE)
    return int(ray.get(handle.get_zmq_server_info.remote(), timeout=60).pid)
