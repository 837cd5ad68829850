"""A session whose controller and units are daemons on hosts of their own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from typing import Any

from netns import Host

TOKEN = "token-of-the-tests-0123456789"


class Served:
    """A controller on one host, with units on others.

    Args:
        controller: where the controller runs; it has no units.
        units: where units run, one or ``each`` on every host.
        options: of ``serve``, for all of them.

    Attributes:
        address: where the session listens.
    """

    def __init__(self, controller: Host, units: Sequence[Host], *options: str, each: int = 1) -> None:
        self._options, self._each, self._homes = options, each, (controller, *units)
        self.controller = _serving(controller, "--units", "0", "--listen", f"tcp://{controller.address}:0", *options)
        self.address = _said(self.controller, r"at (tcp://\S+)")
        started = [self.start_unit(host) for host in units]
        self.units = [self.joined(process) for process in started]

    def has_unit(self, host: Host) -> bool:
        """Whether a unit runs there."""
        return host in self._homes[1:]

    def restart_controller(self) -> None:
        """Start another controller at the address of the one that has ended."""
        self.controller = _serving(self._homes[0], "--units", "0", "--listen", self.address, *self._options)
        assert _said(self.controller, r"at (tcp://\S+)") == self.address

    def start_unit(self, host: Host) -> subprocess.Popen[str]:
        """Start the units of a host."""
        return _serving(
            host, "--join", self.address, "--units", str(self._each), "--name", host.namespace, *self._options
        )

    @staticmethod
    def joined(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """Wait until they are part of the session."""
        _said(process, r"serving \d+ units of session (\S+)")
        return process

    @property
    def environment(self) -> dict[str, str]:
        """What clients need."""
        return {"TQ_ADDRESS": self.address, "TQ_TOKEN": TOKEN}

    def end(self) -> None:
        """End all of it."""
        processes = [*self.units, self.controller]
        try:
            for process in processes:
                process.terminate()
                process.communicate(timeout=20)
        finally:
            for process in processes:
                process.kill()  # or the next session on these hosts finds one


def _serving(host: Host, *arguments: str) -> subprocess.Popen[str]:
    return host.start("-m", "transfer_queue", "serve", *arguments, TQ_TOKEN=TOKEN)


def _said(process: subprocess.Popen[str], pattern: str) -> Any:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"ended before it said {pattern!r}:\n{''.join(seen)}")
