"""Fixtures: a Ray cluster for the tests of a module, and a check that a session leaves nothing of itself in it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import until

# Read when Ray is imported and started. A local Ray binds to loopback; the paths of its sockets have to be short.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="tqr"))
_here = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, os.environ.get("PYTHONPATH")]))  # of the workers


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of one node with four CPUs."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


@pytest.fixture
def conf() -> dict[str, Any]:
    """Configuration of the session; a module may have its own."""
    return {}


@pytest.fixture
def tq(ray: Any, conf: dict[str, Any]) -> Iterator[Any]:
    """The package with a session that this process has created."""
    with opened(ray, conf) as package:
        yield package


@contextlib.contextmanager
def opened(ray: Any, conf: dict[str, Any]) -> Iterator[Any]:
    """The package with a session that this process has created. Nothing of it may be left afterwards."""
    import transfer_queue

    transfer_queue.init(conf)
    try:
        yield transfer_queue
    finally:
        transfer_queue.close()
    assert_nothing_left(ray)


def assert_nothing_left(ray: Any) -> None:
    """No actor, no process and no file of a session is there."""
    with pytest.raises(ValueError, match="TransferQueueController"):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert not published(), "the address of a session is left"
    until(lambda: not hosts(), f"the processes of the actors end: {hosts()}")
    left = [path.name for path in Path(os.environ["TQ_RUNTIME_DIR"]).iterdir() if path.suffix != ".lock"]
    assert not left, f"files left behind: {left}"


def published() -> bytes | None:
    """The entry of a session in the store of Ray."""
    from ray.experimental import internal_kv

    entry: bytes | None = internal_kv._internal_kv_get(b"TransferQueueController", namespace=b"transfer_queue")
    return entry


def hosts() -> list[str]:
    """Processes of this run that host a controller or a unit."""
    mark = f"TQ_RUNTIME_DIR={os.environ['TQ_RUNTIME_DIR']}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ours = title.startswith(("ray::ControllerHost", "ray::UnitActor"))
            if ours and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"{folder.name} {title}")
        except OSError:
            continue
    return found
