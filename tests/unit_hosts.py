"""Unit processes of a session whose owner, the test, has none of its own: started, killed, stopped, started again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from processes import Child, Nursery
from transfer_queue import _calls, _session
from transfer_queue._controller_requests import join_units
from transfer_queue._unit import UnitHost

THRESHOLD = 4096


def _hosts(line: Any, name: str, limit: int, storage: dict[str, Any]) -> None:
    try:
        host = UnitHost(name, limit, storage=storage)
    except Exception as error:
        line.send(error)
        return
    line.send(host.address)
    line.recv()
    host.close()


class Hosts:
    """Durable units that have a folder in common.

    Args:
        tq: the package, with a session.
        nursery: starts their processes.
        path: their folder.
        durability: of all of them.
    """

    def __init__(self, tq: Any, nursery: Nursery, path: Path, durability: str) -> None:
        self.tq, self.nursery, self.path, self.durability = tq, nursery, path, durability
        self.children: dict[str, Child] = {}

    def start(self, name: str, limit: int = 0, join: bool = True, **storage: Any) -> Any:
        """Start a unit and let it join. An error of its constructor is raised here."""
        offload = {"enabled": True, "path": str(self.path), "threshold_bytes": THRESHOLD, "durability": self.durability}
        child = self.nursery.start(_hosts, name, limit, {"ssd_offload": offload, **storage})
        address = child.recv()
        if isinstance(address, Exception):
            raise address
        self.children[name] = child
        if join:
            session = _session.current()
            _calls.run(session.handle, join_units([address], session.timeout_s))
        return address

    def kill(self, name: str) -> None:
        """End a unit as SIGKILL does."""
        child = self.children.pop(name)
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL

    def stop(self, name: str) -> None:
        """Let a unit close."""
        child = self.children.pop(name)
        child.send("end")
        assert child.wait() == 0, child.text()

    def folder(self, name: str) -> Path:
        """The files of a unit."""
        return self.path / "transfer_queue_ssd_offload" / "default.units" / name

    def files(self, name: str, prefix: str) -> list[Path]:
        """Its files of one kind, ``values`` or ``index``."""
        return sorted(self.folder(name).glob(f"{prefix}-*"))


@contextmanager
def unitless(monkeypatch: pytest.MonkeyPatch, **conf: Any) -> Iterator[Any]:
    """The package with a session whose owner has no unit."""
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    transfer_queue.init({"client": {"timeout_s": 30}, "backend": {"SimpleStorage": {"put_wait_s": 10.0}}, **conf})
    try:
        yield transfer_queue
    finally:
        transfer_queue.close()
