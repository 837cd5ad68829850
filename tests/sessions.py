"""Fixtures: a session for every test, processes beside it, and a check that both leave nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import Nursery, until


@pytest.fixture(scope="session")
def nursery_process() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def nursery(nursery_process: Nursery, runtime_dir: Path) -> Iterator[Nursery]:
    """Starts functions as processes that share the test's runtime directory."""
    yield nursery_process
    nursery_process.clear()


@pytest.fixture
def conf() -> dict[str, Any]:
    """Configuration of the session; a module or class may have its own."""
    return {}


@pytest.fixture
def tq(runtime_dir: Path, conf: dict[str, Any]) -> Iterator[Any]:
    """The package with a session that this process owns. At the end everything is cleared and nothing may be left."""
    import transfer_queue

    transfer_queue.init(conf)
    try:
        yield transfer_queue
        empty(transfer_queue)
    finally:
        transfer_queue.close()
    left = [path.name for path in runtime_dir.iterdir() if path.suffix != ".lock"]
    assert not left, f"files left behind: {left}"
    until(lambda: not workers(), f"worker threads end with the session: {workers()}")


def empty(tq: Any) -> None:
    """Clear all partitions and check that units and results hold nothing."""
    client = tq.get_client()
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    gc.collect()

    def nothing() -> bool:
        units = tq.list_units()
        return all((u.memory_used_bytes, u.samples, u.cells, u.leases, u.staged) == (0, 0, 0, 0, 0) for u in units)

    until(nothing, "units are empty after everything was cleared")


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tq-")]
