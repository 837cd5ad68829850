"""Forked processes of one that uses the queue: they simply work, and their end ends nothing of their parent's."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, descriptors, until
from transfer_queue import errors

PATIENCE_S = 30.0


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE_S))  # ends a process that hangs
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def join(pid: int) -> None:
    """Wait for a forked process, which must succeed."""
    handle = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([handle], [], [], PATIENCE_S + 5)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"forked process: {os.waitstatus_to_exitcode(status)}"
    finally:
        os.close(handle)


def use(tq: Any, name: str) -> None:
    """Put, update and get, small and large."""
    large = torch.arange(1 << 16, dtype=torch.float32)
    tq.kv_put(name, "p", {"small": torch.arange(3), "large": large, "text": name}, tag={"by": name})
    tq.kv_update(name, "p", {"small": torch.arange(3)}, "add")
    tq.kv_update(name, "p", {"text": "!"}, lambda old, new: old + new)
    got = tq.kv_batch_get(name, "p")
    assert got["small"].values().tolist() == [0, 2, 4]
    assert torch.equal(got["large"].values(), large)
    assert got["text"] == [name + "!"]


def test_children_and_grandchildren(tq: Any) -> None:
    use(tq, "parent")

    def child() -> None:
        use(tq, "child")
        join(fork(lambda: use(tq, "grandchild")))
        use(tq, "child again")

    join(fork(child))
    assert set(tq.kv_list("p")["p"]) == {"parent", "child", "grandchild", "child again"}
    use(tq, "parent again")


def test_a_child_of_an_attached_process(nursery: Nursery, tq: Any) -> None:
    def attached(line: Any) -> None:
        import transfer_queue as tq

        tq.init()
        tq.kv_put("attached", "p", tag={})
        pid = os.fork()
        if pid == 0:
            tq.kv_put("child", "p", {"x": torch.arange(3)})
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        tq.kv_put("attached again", "p", tag={})

    nursery.start(attached).result()
    assert set(tq.kv_list("p")["p"]) == {"attached", "child", "attached again"}


def test_forks_while_threads_are_busy(tq: Any) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def busy(number: int) -> None:
        value = torch.full((1 << 15,), number)
        try:
            while not stop.is_set():
                tq.kv_put(f"busy {number}", "p", {"x": value})
                assert torch.equal(tq.kv_batch_get(f"busy {number}", "p")["x"].values(), value)
                tq.kv_update(f"busy {number}", "p", {"x": value}, lambda old, new: new)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for first in range(0, 24, 4):
            names = [f"child {number}" for number in range(first, first + 4)]
            for pid in [fork(functools.partial(use, tq, name)) for name in names]:
                join(pid)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert sum(key.startswith("child") for key in tq.kv_list("p")["p"]) == 24


def _square(number: int) -> int:
    import transfer_queue as tq

    torch.set_num_threads(1)
    tq.kv_put(f"pool {number}", "p", {"x": torch.tensor(number)})
    return int(tq.kv_batch_get(f"pool {number}", "p")["x"].item()) ** 2


def test_pool_of_multiprocessing(tq: Any) -> None:
    tq.kv_put("parent", "p", tag={})
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_square, range(8)) == [n * n for n in range(8)]


class _FromQueue(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        import transfer_queue as tq

        got = tq.kv_batch_get(str(row), "p", copy=row % 2 == 0)
        return row, got["x"][0]


def test_loader_with_forked_workers(tq: Any) -> None:
    rows = torch.arange(16 * 8192, dtype=torch.int64).reshape(16, 8192)
    tq.kv_batch_put([str(row) for row in range(16)], "p", TensorDict({"x": rows}, batch_size=[16]))
    before = 0
    for _ in range(3):
        loader = torch.utils.data.DataLoader(
            _FromQueue(16), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE_S
        )
        seen: dict[int, torch.Tensor] = {}
        for numbers, values in loader:
            assert tq.kv_list("p", keys=["0"]), "the parent goes on using the queue"
            seen.update(zip(numbers.tolist(), values, strict=True))
        assert sorted(seen) == list(range(16))
        assert all(torch.equal(value, rows[row]) for row, value in seen.items())
        del loader, seen, values
        before = before or descriptors()
    until(lambda: descriptors() <= before, "descriptors of the loaders are closed")


def test_a_child_does_not_hide_the_death_of_the_owner(nursery: Nursery) -> None:
    def owner(line: Any) -> None:
        import transfer_queue as tq

        tq.init()
        tq.kv_put("a", "p", {"x": torch.arange(1 << 16)})
        pid = os.fork()
        if pid == 0:
            time.sleep(60)  # inherits every descriptor and lives on
            os._exit(0)
        line.send(pid)
        line.recv()

    process = nursery.start(owner)
    orphan = process.recv()
    import transfer_queue as tq

    try:
        assert "a" in tq.kv_list("p")["p"]
        process.signal(signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(errors.UnavailableError):
            tq.kv_wait("p", keys=["never"], timeout=30)
        assert time.monotonic() - died < 2
        tq.close()
        tq.init()  # and the lock is free
        assert tq.kv_list() == {}
    finally:
        tq.close()
        os.kill(orphan, signal.SIGKILL)


def test_a_child_does_not_hide_the_death_of_a_client(nursery: Nursery, tq: Any) -> None:
    def client(line: Any) -> None:
        import transfer_queue as tq

        tq.init()
        view = tq.kv_batch_get("a", "p", copy=False)
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        line.send(pid)
        line.recv()
        del view

    tq.kv_put("a", "p", {"x": torch.arange(1 << 16)})
    process = nursery.start(client)
    orphan = process.recv()
    try:
        assert sum(unit.leases for unit in tq.list_units()) == 1
        process.signal(signal.SIGKILL)
        until(lambda: sum(unit.leases for unit in tq.list_units()) == 0, "its view ends with it", 2)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_ends_no_view_of_its_parent(tq: Any) -> None:
    rows = torch.arange(1 << 18, dtype=torch.int64).reshape(16, -1)
    tq.kv_batch_put([str(row) for row in range(16)], "p", TensorDict({"x": rows}, batch_size=[16]))
    view = tq.kv_batch_get([str(row) for row in range(16)], "p", copy=False)["x"]
    leases = sum(unit.leases for unit in tq.list_units())
    assert leases > 0

    def child() -> None:
        nonlocal view
        del view
        use(tq, "child")

    join(fork(child))
    until(lambda: "child" in tq.kv_list("p")["p"], "the child has put")
    assert sum(unit.leases for unit in tq.list_units()) == leases
    assert torch.equal(view.values(), rows.reshape(-1))


def test_a_child_looks_where_its_parent_looked(nursery: Nursery, tq: Any) -> None:
    def parent(line: Any) -> list[str]:
        import transfer_queue as tq

        tq.init({"namespace": "special"})
        del os.environ["TQ_RUNTIME_DIR"]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            tq.kv_put("child", "special partition", tag={})
            os.write(writing, b"x")
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        assert os.read(reading, 1) == b"x"
        listed = list(tq.kv_list())
        tq.close()
        return listed

    assert nursery.start(parent).result() == ["special partition"]
