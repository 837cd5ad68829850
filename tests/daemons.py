"""Daemons with a journal that are killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import yaml

from processes import Child, Nursery, until
from transfer_queue import _session
from transfer_queue.__main__ import main


def _serves(line: Any, config: str, units: int) -> None:
    options = _session._options
    _session._options = lambda *args: {**options(*args), "units": units}
    line.send("starts")
    if status := main(["serve", "--config", config]):
        raise RuntimeError(f"the daemon ended with status {status}")


class Daemon:
    """A daemon that is killed and started again.

    Args:
        nursery: starts its processes.
        folder: of its journal and its units.
        durability: of both.
        units: in its process; -1: none.
        threshold: bytes from which on values go to disk.
        listen: address for clients of other hosts.
        controller: more of the configuration of the controller.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        durability: str,
        units: int = 1,
        threshold: int = 1,
        listen: str | None = None,
        **controller: Any,
    ) -> None:
        self.nursery, self.units, self.config = nursery, units, folder / "config.yaml"
        self.journal = folder / "journal" / "transfer_queue_journal" / "default"
        journal = {"durability": durability, "path": str(folder / "journal"), "restart_wait_s": 60}
        offload = {"enabled": units > 0, "path": str(folder / "disk"), "durability": durability}
        storage = {"num_data_storage_units": max(units, 1), "ssd_offload": {**offload, "threshold_bytes": threshold}}
        conf: dict[str, Any] = {"controller": {"journal": journal, **controller}, "remote": {"listen": listen}}
        conf["backend"] = {"SimpleStorage": storage}
        self.config.write_text(yaml.safe_dump(conf))
        self.child: Child | None = None

    def start(self) -> None:
        self.child = self.nursery.start(_serves, str(self.config), self.units)
        self.child.recv()

    def attach(self, tq: Any, runtime_dir: Path) -> None:
        """Make this process a client when the daemon serves."""
        until((runtime_dir / "default.json").exists, "the daemon serves")
        tq.init({"runtime": "attach", "client": {"timeout_s": 60}})

    def stop(self) -> None:
        """End it as an operator does."""
        assert self.child is not None
        self.child.signal(signal.SIGTERM)
        assert self.child.wait() == 0, self.child.text()

    def kill(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGKILL)
        assert self.child.wait() == -signal.SIGKILL, self.child.text()
