"""``kill -9`` of a daemon at random points of random work: its clients carry on, and nothing is lost or done twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from daemons import Daemon
from processes import Nursery
from transfer_queue import _calls, _session
from transfer_queue._controller_requests import join_units
from transfer_queue._unit import UnitHost

KILLS = 36
WIDTHS = (1, 40, 40, 700, 3000)  # int64


def _hosts(line: Any, name: str) -> None:
    host = UnitHost(name)
    line.send(host.address)
    line.recv()
    host.close()


class Worker(threading.Thread):
    """Does random things with keys of its own and knows exactly what must have come of them."""

    def __init__(self, tq: Any, name: str, seed: int, stop: threading.Event) -> None:
        super().__init__(name=name)
        self.tq, self.rng, self.stop, self.steps = tq, random.Random(seed), stop, 0
        self.keys = [f"{name}/{i}" for i in range(12)]
        self.rows: dict[str, tuple[int, int]] = {}  # key -> value, width
        self.tags: dict[str, dict[str, int]] = {}
        self.unread: set[str] = set()  # what the task has not consumed
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.rng.choice(
                    [self.put, self.put, self.update, self.update, self.clear, self.tag, self.fetch, self.read]
                )()
                self.steps += 1
        except BaseException as error:
            self.failure = error

    @property
    def partition(self) -> str:
        return self.name

    def _column(self, keys: list[str], value: int, width: int) -> TensorDict:
        return TensorDict({"x": torch.full((len(keys), width), value)}, batch_size=[len(keys)])

    def put(self) -> None:
        keys = self.rng.sample(self.keys, self.rng.randint(1, 4))
        value, width = self.rng.randrange(1000), self.rng.choice(WIDTHS)
        tags = [{"v": value} for _ in keys]
        self.tq.kv_batch_put(keys, self.partition, self._column(keys, value, width), tags=tags)
        for key in keys:
            if key not in self.rows:
                self.unread.add(key)
            self.rows[key] = (value, width)
            self.tags[key] = {**self.tags.get(key, {}), "v": value}

    def update(self) -> None:
        keys = [key for key in self.rng.sample(self.keys, 3) if key in self.rows]
        widths = {self.rows[key][1] for key in keys}
        if len(widths) != 1:
            return
        merge = self.rng.choice(["add", lambda old, new: old + new])
        self.tq.kv_batch_update(keys, self.partition, self._column(keys, 1000, widths.pop()), merge)
        for key in keys:
            self.rows[key] = (self.rows[key][0] + 1000, self.rows[key][1])

    def clear(self) -> None:
        keys = self.rng.sample(self.keys, 2)
        self.tq.kv_clear(keys, self.partition)
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)
            self.unread.discard(key)

    def tag(self) -> None:
        keys = [key for key in self.rng.sample(self.keys, 3) if key in self.rows]
        for key in keys:
            self.tq.kv_put(key, self.partition, tag={"t": self.steps})
            self.tags[key] = {**self.tags[key], "t": self.steps}

    def fetch(self) -> None:
        count = self.rng.randint(1, 3)
        if len(self.unread) < count:
            return
        client = self.tq.get_client()
        meta = client.get_meta(["x"], count, partition_id=self.partition, task_name="task", mode="fetch", timeout=60)
        keys = client.kv_retrieve_keys(meta.global_indexes, self.partition)
        assert len(keys) == count
        assert self.unread.issuperset(keys), f"{keys} of {self.unread}"
        self.unread.difference_update(keys)

    def read(self) -> None:
        listed = self.tq.kv_list(self.partition).get(self.partition, {})
        assert listed == self.tags
        for key in self.rng.sample(self.keys, 3):
            self.check(key)

    def check(self, key: str) -> None:
        if key not in self.rows:
            return
        (row,) = self.tq.kv_batch_get([key], self.partition)["x"].unbind()
        assert (row == row[0]).all()
        assert (int(row[0]), len(row)) == self.rows[key], key


def _work(tq: Any, daemon: Daemon) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, stop = random.Random(seed), threading.Event()
    workers = [Worker(tq, f"w{i}", seed + i, stop) for i in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.02, 0.3))
            daemon.kill()
            daemon.start()
            assert not [worker.failure for worker in workers if worker.failure]
            before = [worker.steps for worker in workers]
            deadline = time.monotonic() + 30
            while any(worker.steps == n and worker.is_alive() for worker, n in zip(workers, before, strict=True)):
                assert time.monotonic() < deadline, "a client does not carry on"
                time.sleep(0.005)
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    for worker in workers:
        if worker.failure:
            raise worker.failure
        worker.read()
        for key in worker.keys:
            worker.check(key)
        assert worker.steps > KILLS


@pytest.fixture
def package(runtime_dir: Path) -> Iterator[Any]:
    import transfer_queue

    yield transfer_queue
    transfer_queue.close()


@pytest.mark.parametrize("durability", ["relaxed", "strict"])
def test_a_daemon_with_a_durable_unit(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path, durability: str
) -> None:
    daemon = Daemon(nursery, tmp_path, durability, units=1)
    daemon.start()
    daemon.attach(package, runtime_dir)
    _work(package, daemon)


def test_a_daemon_with_units_in_other_processes(
    package: Any, nursery: Nursery, runtime_dir: Path, tmp_path: Path
) -> None:
    hosts = [nursery.start(_hosts, name) for name in ("unit-a", "unit-b")]
    daemon = Daemon(nursery, tmp_path, "relaxed", units=-1)
    daemon.start()
    daemon.attach(package, runtime_dir)
    session = _session.current()
    _calls.run(session.handle, join_units([host.recv() for host in hosts], session.timeout_s))
    _work(package, daemon)
    assert [unit.state for unit in package.list_units()] == ["ACTIVE", "ACTIVE"]
