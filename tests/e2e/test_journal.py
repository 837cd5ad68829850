"""A controller with a journal: what a killed and a stopped one leaves, and what its clients see."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

from daemons import Daemon
from processes import Nursery, until
from transfer_queue import _calls, _session, errors
from transfer_queue._controller_requests import join_units
from transfer_queue._register import register_sampler
from transfer_queue._unit import UnitHost
from transfer_queue.sampler import BaseSampler


@pytest.fixture
def package(runtime_dir: Path) -> Iterator[Any]:
    import transfer_queue

    yield transfer_queue
    transfer_queue.close()


def _rows(*values: int, width: int = 4) -> TensorDict:
    return TensorDict({"x": torch.tensor(values).unsqueeze(1).repeat(1, width)}, batch_size=[len(values)])


def _values(tq: Any, *keys: str) -> list[int]:
    return [int(row[0]) for row in tq.kv_batch_get(list(keys), "p")["x"].unbind()]


@pytest.mark.parametrize("durability", ["relaxed", "strict"])
def test_everything_is_as_it_was(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path, durability: str
) -> None:
    tq, daemon = package, Daemon(nursery, tmp_path, durability, units=2)
    daemon.start()
    daemon.attach(tq, runtime_dir)
    client = tq.get_client()
    keys = [f"k{i}" for i in range(6)]
    tq.kv_batch_put(keys, "p", _rows(*range(6)), tags=[{"i": i} for i in range(6)])
    tq.kv_batch_put(keys[:2], "p", TensorDict({"y": torch.ones(2, 3)}, batch_size=[2]))
    tq.kv_put("only tags", "q", tag={"a": 1})
    first = client.get_meta(["x"], 2, partition_id="p", task_name="t", mode="fetch")
    before = tq.kv_list(), client.get_consumption_status("t", "p"), client.get_production_status(["x", "y"], "p")
    samples = {unit.unit_id: unit.samples for unit in tq.list_units()}
    daemon.kill()
    daemon.start()
    after = tq.kv_list(), client.get_consumption_status("t", "p"), client.get_production_status(["x", "y"], "p")
    assert before[0] == after[0]
    for was, now in zip(before[1:], after[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(was, now, strict=True))
    assert {unit.unit_id: unit.samples for unit in tq.list_units()} == samples
    assert _values(tq, *keys) == [*range(6)]
    second = client.get_meta(["x"], 4, partition_id="p", task_name="t", mode="fetch")
    assert sorted([*first.global_indexes, *second.global_indexes]) == [*range(6)]
    assert tq.kv_batch_get(keys[:2], "p", select_fields=["y"])["y"].unbind()[0].tolist() == [1, 1, 1]


def test_an_owner_that_fails_to_start_does_not_end_the_session(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path
) -> None:
    """Whether it is refused or killed on its way: those who wait for the session go on waiting."""
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed")
    daemon.start()
    daemon.attach(tq, runtime_dir)
    tq.kv_batch_put(["a"], "p", _rows(1))
    daemon.kill()
    daemon.units = 2
    daemon.start()
    assert daemon.child is not None
    assert daemon.child.wait() != 0, "the session had one unit"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_values, tq, "a")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        daemon.units = 1
        daemon.start()
        assert waiting.result(30) == [1]


@pytest.mark.parametrize("change", ["folder is gone", "another path", "no disk", "not durable"])
def test_what_was_on_a_disk_that_is_not_there_is_lost_by_key(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path, change: str
) -> None:
    """The last write too, of which only its unit knows whether it had happened."""
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed")
    daemon.start()
    daemon.attach(tq, runtime_dir)
    tq.kv_batch_put(["first"], "p", _rows(1))
    tq.kv_batch_put(["last"], "p", _rows(2), tags=[{"a": 1}])
    daemon.kill()
    conf = yaml.safe_load(daemon.config.read_text())
    offload = conf["backend"]["SimpleStorage"]["ssd_offload"]
    if change == "folder is gone":
        shutil.rmtree(tmp_path / "disk")
    elif change == "another path":
        offload["path"] = str(tmp_path / "other")
    else:
        offload.update({"enabled": False} if change == "no disk" else {"durability": "none"})
    daemon.config.write_text(yaml.safe_dump(conf))
    daemon.start()
    assert tq.kv_list("p") == {"p": {"first": {}, "last": {"a": 1}}}
    assert tq.list_lost() == {"p": {"first": ["x"], "last": ["x"]}}
    tq.kv_batch_put(["last"], "p", _rows(3))
    assert _values(tq, "last") == [3]
    tq.kv_clear(["first"], "p")
    assert tq.list_lost() == {}


def test_units_whose_folders_were_exchanged_are_refused(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path
) -> None:
    """What is in them would be taken for what somebody has cleared."""
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed", units=2)
    daemon.start()
    daemon.attach(tq, runtime_dir)
    for i in range(6):
        tq.kv_batch_put([f"k{i}"], "p", _rows(i))
    daemon.kill()
    folder = tmp_path / "disk" / "transfer_queue_ssd_offload" / "default.units"
    unit, other, aside = folder / "unit-0", folder / "unit-1", folder / "aside"

    def exchange() -> None:
        for old, new in ((unit, aside), (other, unit), (aside, other)):
            old.rename(new)

    exchange()
    daemon.start()
    assert daemon.child is not None
    assert daemon.child.wait() != 0
    assert "values of session" in daemon.child.text()
    exchange()
    daemon.start()
    assert _values(tq, *(f"k{i}" for i in range(6))) == [*range(6)]


def test_values_in_memory_are_lost_by_key(package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path) -> None:
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed", threshold=1000)
    daemon.start()
    daemon.attach(tq, runtime_dir)
    tq.kv_batch_put(["small"], "p", _rows(1))
    tq.kv_batch_put(["large"], "p", _rows(2, width=500))
    daemon.kill()
    daemon.start()
    assert tq.list_lost() == {"p": {"small": ["x"]}}
    assert list(tq.kv_list("p")["p"]) == ["small", "large"]
    assert _values(tq, "large") == [2]
    with pytest.raises(errors.DataLostError, match='field "x" of keys "small"'):
        tq.kv_batch_get(["small"], "p")
    tq.kv_batch_put(["small"], "p", _rows(3))
    assert _values(tq, "small", "large") == [3, 2]
    assert not tq.list_lost()


def test_a_stopped_daemon_goes_on_and_a_closed_session_does_not(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path
) -> None:
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed")
    daemon.start()
    daemon.attach(tq, runtime_dir)
    tq.kv_batch_put(["a"], "p", _rows(1))
    daemon.stop()
    begin = time.monotonic()
    with pytest.raises(errors.UnavailableError, match="the session was closed"):
        tq.kv_list("p")
    assert time.monotonic() - begin < 30, "nobody waits for a session that was closed"
    tq.close()
    daemon.start()
    daemon.attach(tq, runtime_dir)
    assert _values(tq, "a") == [1]
    tq.close()
    daemon.stop()
    assert list(daemon.journal.glob("state-*"))
    tq.init(_owned(tmp_path))
    assert _values(tq, "a") == [1]
    tq.close()
    assert not daemon.journal.exists()
    tq.init(_owned(tmp_path))
    assert not tq.kv_list()


def _owned(folder: Path, units: int = 1, **more: Any) -> dict[str, Any]:
    """The configuration of a daemon, for an owner in this process."""
    offload = {"enabled": True, "path": str(folder / "disk"), "threshold_bytes": 1, "durability": "relaxed"}
    return {
        "runtime": "embedded",
        "controller": {"journal": {"durability": "relaxed", "path": str(folder / "journal"), **more}},
        "backend": {"SimpleStorage": {"num_data_storage_units": units, "ssd_offload": offload}},
    }


def test_calls_wait_and_no_longer(package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path) -> None:
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed")
    daemon.start()
    daemon.attach(tq, runtime_dir)
    tq.kv_batch_put(["a"], "p", _rows(1))
    daemon.kill()
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError, match="waiting for the session"):
        tq.kv_list("p", timeout=0.5)
    assert time.monotonic() - begin < 30

    async def several() -> list[Any]:
        calls = [tq.async_kv_batch_put([f"a{i}"], "p", _rows(i)) for i in range(8)]
        return await asyncio.gather(*calls, tq.async_kv_list("p"))

    starter = threading.Timer(0.3, daemon.start)
    starter.start()
    asyncio.run(several())
    starter.join()
    assert _values(tq, *(f"a{i}" for i in range(8))) == [*range(8)]


def test_refusals(package: Any, runtime_dir: Path, tmp_path: Path) -> None:
    tq = package
    journal = tmp_path / "journal" / "transfer_queue_journal" / "default"
    journal.mkdir(parents=True)
    (journal / "mine.txt").write_text("not yours")
    with pytest.raises(errors.AlreadyExistsError, match=r"mine\.txt.*not a file of a journal"):
        tq.init(_owned(tmp_path))
    (journal / "mine.txt").unlink()
    with pytest.raises(ValueError, match=r"controller\.journal\.path: got None, want a directory, because"):
        tq.init({"controller": {"journal": {"durability": "strict"}}})
    with pytest.raises(ValueError, match=r"controller\.journal\.durability: got 'some'"):
        tq.init({"controller": {"journal": {"durability": "some"}}})
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.InvalidArgumentError, match=r"controller\.journal\.path: .*file is not a directory"):
        tq.init({"controller": {"journal": {"durability": "relaxed", "path": str(tmp_path / "file")}}})


def _serves_in(line: Any, conf: dict[str, Any]) -> None:
    import transfer_queue

    transfer_queue.init(conf)
    line.send("serves")
    line.recv()


def test_what_a_dead_owner_has_left_is_checked(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq = package
    child = nursery.start(_serves_in, _owned(tmp_path, units=2))
    child.recv()
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(runtime_dir / "other"))
    with pytest.raises(errors.AlreadyExistsError, match="in use by another controller"):
        tq.init({**_owned(tmp_path), "backend": {}})
    child.signal(9)
    child.wait()
    with pytest.raises(errors.InvalidStateError, match=r'with unit "unit-1" in the controller\'s process'):
        tq.init(_owned(tmp_path, units=1))
    with pytest.raises(errors.InvalidStateError, match='without unit "unit-2"'):
        tq.init(_owned(tmp_path, units=3))
    log = next((tmp_path / "journal" / "transfer_queue_journal" / "default").glob("state-*"))
    whole = log.read_bytes()
    log.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(errors.CorruptionError, match=log.name):
        tq.init(_owned(tmp_path, units=2))
    log.write_bytes(whole)
    tq.init(_owned(tmp_path, units=2))


class Remembers(BaseSampler):
    """Hands out pairs and numbers its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0

    def sample(self, ready_indexes: list[int], batch_size: int, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        self.answers += 1
        picked = ready_indexes[-batch_size:] if self.answers % 2 == 0 else ready_indexes[:batch_size]
        return picked, picked

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "answers": self.answers}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self.answers = state["answers"]


def _fetch(client: Any, count: int, **sampling: Any) -> list[int]:
    sought = {"partition_id": "p", "task_name": "t", "mode": "fetch", "sampling_config": sampling}
    return list(client.get_meta(["x"], count, timeout=60, **sought).global_indexes)


def test_samplers_remember(package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path) -> None:
    tq = package
    daemon = Daemon(nursery, tmp_path, "relaxed", sampler="RankAwareSampler")
    daemon.start()
    daemon.attach(tq, runtime_dir)
    client = tq.get_client()
    tq.kv_batch_put([f"k{i}" for i in range(8)], "p", _rows(*range(8)))
    zero = _fetch(client, 2, dp_rank=0, batch_index=0)
    daemon.kill()
    daemon.start()
    assert _fetch(client, 2, dp_rank=0, batch_index=0) == zero
    one = _fetch(client, 2, dp_rank=1, batch_index=0)
    assert not set(one) & set(zero)
    register_sampler(Remembers())
    first = _fetch(client, 1)
    daemon.kill()
    daemon.start()
    second = _fetch(client, 1)
    left = sorted(set(range(8)) - {*zero, *one})
    assert [first, second] == [[left[0]], [left[-1]]], "its second answer is the last one"


def _hosts(line: Any, name: str) -> None:
    host = UnitHost(name)
    line.send(host.address)
    line.recv()
    host.close()


def test_reconnected_units_keep_their_memory(package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path) -> None:
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed", units=-1)
    hosts = [nursery.start(_hosts, name) for name in ("unit-a", "unit-b")]
    daemon.start()
    daemon.attach(tq, runtime_dir)
    session = _session.current()
    _calls.run(session.handle, join_units([host.recv() for host in hosts], session.timeout_s))
    tq.kv_batch_put(["a", "b"], "p", _rows(1, 2, width=1 << 16))
    view = tq.kv_batch_get(["a"], "p", copy=False)["x"]
    daemon.kill()
    daemon.start()
    assert _values(tq, "a", "b") == [1, 2]
    tq.kv_batch_put(["a"], "p", _rows(3, width=1 << 16))
    assert int(view.unbind()[0][-1]) == 1, "a view stays what it was"
    hosts[0].signal(9)
    hosts[0].wait()
    until(lambda: [unit.state for unit in tq.list_units()] == ["UNAVAILABLE", "ACTIVE"], "the unit is missed")
    daemon.kill()
    daemon.start()
    assert [unit.state for unit in tq.list_units()] == ["UNAVAILABLE", "ACTIVE"]


@pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")
def test_clients_of_other_hosts_carry_on(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    tq, daemon = package, Daemon(nursery, tmp_path, "relaxed", listen=address)
    daemon.start()
    until((runtime_dir / "default.json").exists, "the daemon serves")
    monkeypatch.setenv("TQ_ADDRESS", address)
    tq.init({"client": {"timeout_s": 60}})
    tq.kv_batch_put(["a"], "p", _rows(0))
    total, stop = 0, threading.Event()

    def add() -> int:
        n = 0
        while not stop.is_set():
            tq.kv_batch_update(["a"], "p", _rows(1), "add")
            n += 1
        return n

    with ThreadPoolExecutor(2) as pool:
        adding = [pool.submit(add) for _ in range(2)]
        for _ in range(5):
            time.sleep(0.2)
            daemon.kill()
            daemon.start()
        time.sleep(0.5)
        stop.set()
        total = sum(done.result(60) for done in adding)
    assert total > 10
    assert _values(tq, "a") == [total], "every update has happened once"
