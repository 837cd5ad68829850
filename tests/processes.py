"""Other processes of a test: functions that run beside it, and programs.

A function that a test starts gets its end of a line, ``Connection.send`` and ``recv``, as the first argument; the
`Child` that the test holds has the other. It runs at the top of a program of its own, see `nursery`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

PATIENCE_S = 45.0
_NURSERY = Path(__file__).with_name("nursery.py")


def until(condition: Callable[[], Any], what: str, patience_s: float = 10.0) -> Any:
    """Poll until the condition is true and return its value; fail with ``what`` after the patience."""
    deadline = time.monotonic() + patience_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {patience_s} s"
        time.sleep(0.005)


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Threads of this process, those of the core included."""
    return len(os.listdir("/proc/self/task"))


class Child:
    """A process that runs a function of the test."""

    def __init__(self, pid: int, line: Connection, output: Path, status_of: Callable[[int], int]) -> None:
        self.pid, self.line, self.output, self._status_of = pid, line, output, status_of
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None
        self._result: Any = None

    def recv(self, patience_s: float = PATIENCE_S) -> Any:
        """What the function sends next, which must not be its result."""
        kind, value = self._next(patience_s)
        assert kind == "word", f"the process ended instead of speaking:\n{self.text()}"
        return value

    def _next(self, patience_s: float) -> tuple[str, Any]:
        assert self.line.poll(patience_s), f"nothing heard from the process for {patience_s} s:\n{self.text()}"
        try:
            got = self.line.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the process has gone, status {self.wait()}:\n{self.text()}") from None
        return got if isinstance(got, tuple) and len(got) == 2 and got[0] == "result" else ("word", got)

    def send(self, value: Any) -> None:
        """Give the function something to receive."""
        self.line.send(value)

    def signal(self, number: int) -> None:
        """Send a signal; one that comes too late does nothing."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Exit status, negative for a signal."""
        if self._status is None:
            ready, _, _ = select.select([self._pidfd], [], [], patience_s)
            assert ready, f"the process did not end within {patience_s} s:\n{self.text()}"
            self._status = self._status_of(self.pid)
            os.close(self._pidfd)
        return self._status

    def result(self, patience_s: float = PATIENCE_S) -> Any:
        """What the function returned; fails when the process did not end with status 0."""
        while True:
            kind, value = self._next(patience_s)
            if kind == "result":
                status = self.wait(patience_s)
                assert status == 0, f"status {status}:\n{self.text()}"
                return value

    def text(self) -> str:
        """What the process has printed."""
        return self.output.read_text(errors="replace")


class Nursery:
    """Starts functions as processes. Whatever still runs at the end of a test is killed."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, self._children = ours, list[Child]()
        self._folder = Path(tempfile.mkdtemp(prefix="tq-out-"))
        self._process = subprocess.Popen(
            [sys.executable, str(_NURSERY), str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def _ask(self, request: Any, descriptors: list[int]) -> int:
        socket.send_fds(self._control, [pickle.dumps(request)], descriptors)
        answer: int = pickle.loads(self._control.recv(1 << 10))
        return answer

    def start(self, function: Callable[..., Any], *arguments: Any, ends_as_program: bool = False) -> Child:
        """Run ``function(line, *arguments)`` in a new process with this process's environment.

        The process ends as a forked worker does, without shutting Python down, unless it is to end as a program.
        """
        path = self._folder / f"{len(os.listdir(self._folder))}.txt"
        ours, theirs = socket.socketpair()
        with open(path, "wb") as output, theirs:
            order = (dict(os.environ), _packed(function, arguments), ends_as_program)
            pid = self._ask(order, [theirs.fileno(), output.fileno()])
        child = Child(pid, Connection(ours.detach()), path, lambda pid: self._ask(pid, []))
        self._children.append(child)
        return child

    def clear(self) -> None:
        """End all processes of a test."""
        for child in self._children:
            child.signal(9)
        for child in self._children:
            child.wait()
            child.line.close()
        self._children.clear()

    def close(self) -> None:
        self.clear()
        self._control.close()
        self._process.wait(PATIENCE_S)
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()


def _packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """By value: the new process cannot import test modules."""
    ours = [module for name, module in sys.modules.items() if name == __name__ or name == function.__module__]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps((function, arguments))
        return packed
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def program(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program beside the test, with its output on ``stdout``; it is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
