"""Hosts for tests: network namespaces on a switch, each with a runtime directory and an identity of its own.

They need root and iproute2; `reason` says what is missing. Whatever happens, the end of the context manager removes
them; those that a run which was killed has left are removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MARK = "tq-"


def reason() -> str:
    """Why there can be no hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need iproute2"
    name = f"{_MARK}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _clocks_differ() -> bool:
    """Whether hosts can have clocks of their own: the monotonic ones, which tell how long a host has been up."""
    probe = subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True, check=False)
    return probe.returncode == 0


class Host:
    """A namespace with an address.

    Attributes:
        address: of its interface.
        folder: runtime directory of the sessions there.
    """

    def __init__(self, namespace: str, number: int, folder: Path) -> None:
        self.namespace, self.address, self.folder = namespace, f"10.77.0.{number}", folder
        self._processes: list[subprocess.Popen[str]] = []
        days = str(number * 86400)
        self._clock = ["unshare", "--time", "--monotonic", days, "--boottime", days] if _clocks_differ() else []

    def command(self, *arguments: str) -> list[str]:
        """A command that runs there."""
        return ["ip", "netns", "exec", self.namespace, *self._clock, *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of processes there."""
        own = {"TQ_RUNTIME_DIR": str(self.folder), "TQ_HOST_ID": self.namespace, "TQ_ADDRESS": ""}
        return {**os.environ, **own, **extra}

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        """Start Python there with its output on a pipe. It ends with the host."""
        process = subprocess.Popen(
            self.command(sys.executable, "-u", *arguments),
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(self, source: str, **extra: str) -> str:
        """Run a program there to its end; returns its output."""
        process = self.start("-c", source, **extra)
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, f"exit {process.returncode} on {self.namespace}:\n{output}"
        return output

    def disturb(self, what: str) -> None:
        """Let what leaves the host suffer a queueing discipline, in the words of ``tc``; nothing ends it."""
        verb = ["replace", "dev", "eth0", "root", *what.split()] if what else ["del", "dev", "eth0", "root"]
        subprocess.run(self.command("tc", "qdisc", *verb), check=True, capture_output=True)

    def cannot(self, what: str) -> str:
        """Why a discipline cannot be had on this machine; empty when it can."""
        tried = subprocess.run(
            self.command("tc", "qdisc", "replace", "dev", "eth0", "root", *what.split()),
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode == 0:
            self.disturb("")
            return ""
        return f"tc qdisc {what}: {tried.stderr.strip()}"

    def dropped(self) -> int:
        """Packets that the discipline has lost."""
        shown = subprocess.run(
            self.command("tc", "-s", "qdisc", "show", "dev", "eth0"), check=True, capture_output=True, text=True
        ).stdout
        found = re.search(r"dropped (\d+)", shown)
        return int(found[1]) if found else 0

    def plug(self, up: bool) -> None:
        """Take the cable out, or put it in again."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up" if up else "down")

    def end(self) -> None:
        """End its processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other."""
    _sweep()
    prefix = f"{_MARK}{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix="tqn"))
    made: list[Host] = []
    try:
        switch = prefix + "switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, count + 1):
            runtime = folder / str(number)
            runtime.mkdir(mode=0o700)
            host = Host(f"{prefix}{number}", number, runtime)
            made.append(host)
            _ip("netns", "add", host.namespace)
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            host.end()
        _remove(prefix)
        shutil.rmtree(folder, ignore_errors=True)


def _names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(_MARK)]


def _remove(prefix: str) -> None:
    for name in _names():
        if name.startswith(prefix):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _sweep() -> None:
    """Remove the namespaces of runs that are dead."""
    for name in _names():
        pid = name.removeprefix(_MARK).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(f"{_MARK}{pid}-")
