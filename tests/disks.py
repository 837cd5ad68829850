"""Sessions whose units have a disk, in this process or in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from processes import Nursery
from transfer_queue import _calls, _controller_requests, _session
from transfer_queue._unit import UnitHost

PAGE = 4096
# ext4 keeps the places of a file in pieces in a page more, of one in many in two, also when the file is short again.
TREE = 2 * PAGE


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    """Bytes that each file with values takes beyond its first page, and how long it is beyond that."""
    for path in folder.rglob("values-*"):
        with suppress(FileNotFoundError):  # files are removed meanwhile
            stat = path.stat()
            yield max(0, stat.st_blocks * 512 - PAGE), max(0, stat.st_size - PAGE)


def on_disk(folder: Path) -> int:
    """Bytes that values take, and up to `TREE` more for each file."""
    return sum(taken for taken, _ in _files(folder))


def takes_ahead(folder: Path) -> bool:
    """Whether a file that grows takes more than was written to it, as on XFS."""
    path = folder / "values-probe"
    with path.open("wb", buffering=0) as file:
        for _ in range(16):
            file.write(bytes(1 << 16))
        taken = on_disk(folder)
    path.unlink()
    return taken > (1 << 20) + TREE


def no_value_left(folder: Path) -> bool:
    """Whether all files with values are as they begin."""
    return all(taken <= TREE and length == 0 for taken, length in _files(folder))


def offload(path: Path, threshold: int = 1 << 40, **more: Any) -> dict[str, Any]:
    """One unit with a disk."""
    section = {
        "num_data_storage_units": 1,
        "ssd_offload": {"enabled": True, "path": str(path), "threshold_bytes": threshold},
    }
    return {"backend": {"SimpleStorage": {**section, **more}}}


def _hosts(line: Any, name: str, limit: int, storage: dict[str, Any]) -> None:
    host = UnitHost(name, limit, storage=storage)
    line.send(host.address)
    line.recv()
    host.close()


class Disks:
    """A session over unit processes that share a folder."""

    def __init__(self, tq: Any, nursery: Nursery, path: Path) -> None:
        self.tq, self.nursery, self.path = tq, nursery, path
        self.children: list[Any] = []

    def start(self, name: str, limit: int = 0, threshold: int = 4096, **storage: Any) -> None:
        offload = {"enabled": True, "path": str(self.path), "threshold_bytes": threshold}
        child = self.nursery.start(_hosts, name, limit, {"ssd_offload": offload, **storage})
        self.children.append(child)
        session = _session.current()
        _calls.run(session.handle, _controller_requests.join_units([child.recv()], session.timeout_s))

    def sums(self, *names: str) -> tuple[int, ...]:
        """Counters over all units."""
        listed = self.tq.list_units()
        return tuple(sum(getattr(unit, name) for unit in listed) for name in names)

    def files(self) -> list[Path]:
        return [file for file in self.path.rglob("values*") if file.is_file()]


@pytest.fixture
def disks(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path) -> Iterator[Disks]:
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    storage = {"SimpleStorage": {"put_wait_s": 10.0}}
    transfer_queue.init({"client": {"timeout_s": 30}, "backend": storage, "remote": {"listen": "tcp://:0"}})
    try:
        yield Disks(transfer_queue, nursery, tmp_path / "disk")
    finally:
        transfer_queue.close()
