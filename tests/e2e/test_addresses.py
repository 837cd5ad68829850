"""Clients made by hand from an address, and several sessions in one process."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery
from transfer_queue import AsyncTransferQueueClient, TransferQueueClient, _session, config
from transfer_queue.utils.zmq_utils import Role, ZMQServerInfo


def _table(start: int, rows: int = 2) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + 3 * rows).reshape(rows, 3)}, batch_size=[rows])


def _sum_by_hand(line: Any, pickled: bytes, partition: str) -> tuple[float, bool]:
    """In a process that never called init: read a partition through a client made from the configuration."""
    import transfer_queue

    conf = pickle.loads(pickled)
    client = transfer_queue.TransferQueueClient("by hand", conf.controller.zmq_info)
    meta = client.get_meta(["x"], 1, partition, mode="force_fetch")
    total = client.get_data(meta)["x"].values().sum().item()
    client.close()
    return total, transfer_queue._session.has_session()


def test_the_configuration_names_controller_and_units(tq: Any) -> None:
    conf = tq.init()
    assert isinstance(conf.controller.zmq_info, ZMQServerInfo)
    assert conf.controller.zmq_info.role is Role.CONTROLLER
    assert conf.controller.zmq_info.to_addr().startswith("ipc:///")
    assert list(conf.backend.SimpleStorage.zmq_info) == ["unit-0", "unit-1"]
    assert [unit.unit_id for unit in tq.list_units()] == ["unit-0", "unit-1"]
    assert "secret" not in repr(conf.controller.zmq_info).lower()
    again = pickle.loads(pickle.dumps(conf))
    assert again.controller.zmq_info == conf.controller.zmq_info


def test_a_client_by_hand_works_in_a_process_without_a_session(tq: Any, nursery: Nursery) -> None:
    tq.get_client().put(_table(0), partition_id="p/1.a")
    assert nursery.start(_sum_by_hand, pickle.dumps(tq.init()), "p/1.a").result() == (15, False)


def test_a_client_by_hand_in_a_forked_child(tq: Any) -> None:
    tq.get_client().put(_table(0), partition_id="p")
    client = TransferQueueClient("by hand", tq.init().controller.zmq_info)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if client.get_partition_list() == ["p"] == tq.get_client().get_partition_list() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_two_sessions_in_one_process_from_one_event_loop(tq: Any) -> None:
    beside = _session.own_private(config.load({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        here, there = tq.get_client(), AsyncTransferQueueClient("other", beside.info)

        async def scenario() -> list[Any]:
            await asyncio.gather(
                here.async_put(_table(0), partition_id="same name"),
                there.async_put(_table(100), partition_id="same name"),
            )
            metas = [await c.async_get_meta(["x"], 1, "same name", mode="force_fetch") for c in (here, there)]
            return [await c.async_get_data(meta) for c, meta in zip((here, there), metas, strict=True)]

        assert [data["x"].values().tolist()[0] for data in asyncio.run(scenario())] == [0, 100]
        assert tq.kv_list() == {"same name": {}}
        there.close()
        waiting = TransferQueueClient("other", beside.info)
        assert waiting.get_partition_list() == ["same name"], "close() of a client does not end a session owned here"
        waiting.clear_partition("same name")
        assert [unit.memory_used_bytes for unit in waiting.list_units()] == [0]
    finally:
        _session._others.pop(beside.id).close()
    with pytest.raises(RuntimeError):
        waiting.get_partition_list(timeout=1)


def test_an_address_without_a_session_is_unavailable(tq: Any, tmp_path: Path) -> None:
    gone = ZMQServerInfo(Role.CONTROLLER, "gone", socket=str(tmp_path / "s"), secret=b"x", session="00")
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=str(tmp_path)):
        TransferQueueClient("c", gone).get_partition_list(timeout=1)
    assert time.monotonic() - began < 3
    wrong = pickle.loads(pickle.dumps(tq.init().controller.zmq_info))
    wrong.secret, wrong.session = b"guessed", "00"
    with pytest.raises((ConnectionError, RuntimeError)):
        TransferQueueClient("c", wrong).get_partition_list(timeout=1)


@pytest.mark.parametrize(("info", "error"), [(None, ValueError), ("127.0.0.1:9", TypeError)])
def test_what_is_no_address_is_refused(info: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="controller_info"):
        TransferQueueClient("c", info)


def test_a_configuration_of_another_session_starts_a_new_one(runtime_dir: Path) -> None:
    import transfer_queue

    first = transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    transfer_queue.close()
    second = transfer_queue.init(first)
    try:
        assert second.controller.zmq_info != first.controller.zmq_info
        assert transfer_queue.get_client().get_partition_list() == []
    finally:
        transfer_queue.close()
