"""Who fetches next: what the workers of a loader agree on.

Batch numbers of a stream are fetched one after the other, whichever worker each belongs to: worker ``w`` of ``W`` has
the numbers ``first + w``, ``first + w + W`` and so on, and fetches one when the number before it has been fetched. So
the stream is the same for any number of workers, no number is left out at the end, and only one worker at a time asks
the controller. What follows a fetch, reading and processing, runs in parallel.

A run is the life of the numbers of one partition; a new one ends all those before it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

from transfer_queue.errors import InvalidArgumentError

_RUNS = 64  # so many runs later, no worker is still busy with a run
_NAME_BYTES = 1 << 16
_FIRST, _NEXT, _ENDED, _CONSUMED = range(4)


class Run:
    """A stream of batch numbers.

    Attributes:
        first: the number it begins with.
    """

    def __init__(self, cells: Any, ended_by: Callable[[], bool]) -> None:
        self._cells, self._ended_by = cells, ended_by
        self.first: int = cells[_FIRST]

    @property
    def alive(self) -> bool:
        """Whether there is still somebody who wants its batches."""
        return not self._cells[_ENDED] and not self._ended_by()

    @property
    def next(self) -> int:
        """The number that is to be fetched next."""
        number: int = self._cells[_NEXT]
        return number

    def fetched(self, number: int) -> None:
        """The next number may be fetched."""
        self._cells[_NEXT] = max(self._cells[_NEXT], number + 1)

    def end(self) -> None:
        """There is no further number."""
        self._cells[_ENDED] = 1

    @property
    def consumed(self) -> bool:
        """Whether the task had consumed the whole partition when somebody looked last."""
        return bool(self._cells[_CONSUMED])

    @consumed.setter
    def consumed(self, value: bool) -> None:
        self._cells[_CONSUMED] = int(value)

    def wait_for(self, number: int) -> bool:
        """Wait for the turn of a number; returns whether it comes."""
        pause = Pause(0.0002, 0.01)
        while self.alive:
            if self.next >= number:
                return True
            pause.sleep(self)
        return False


def alone(ended_by: Callable[[], bool], consumed: bool = False) -> Run:
    """A run of which no other process knows."""
    return Run([0, 0, 0, int(consumed)], ended_by)


class Pause:
    """Waits that grow from ``least_s`` to ``most_s``, so that waiting costs little and ends not much too late."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.seconds, self._most_s = min(least_s, most_s), most_s

    def sleep(self, run: Run, since: float | None = None) -> None:
        """Sleep for what is left of the pause that began at ``since``; the next one is longer."""
        until = (time.monotonic() if since is None else since) + self.seconds
        while run.alive and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        self.seconds = min(2 * self.seconds, self._most_s)


class Turns:
    """The run of a loader, in memory that it shares with its workers."""

    def __init__(self) -> None:
        self._generation = RawArray(ctypes.c_int64, 1)
        self._cells = RawArray(ctypes.c_int64, _RUNS * 4)
        self._name = RawArray(ctypes.c_char, _NAME_BYTES)

    def begin(self, partition_id: str, first: int, consumed: bool) -> Run:
        """Begin a run in the main process; ``consumed`` is what an earlier run of the partition has seen.

        Raises:
            InvalidArgumentError: the name of the partition is too long.
        """
        name = partition_id.encode()
        if len(name) >= _NAME_BYTES:
            raise InvalidArgumentError(f"partition_id: {len(name)} bytes, limit {_NAME_BYTES - 1}")
        generation = self._generation[0] + 1
        at = generation % _RUNS * 4
        self._cells[at : at + 4] = [first, first, 0, int(consumed)]
        self._name.value = name
        self._generation[0] = generation
        return self._run(generation)

    def end(self) -> None:
        """End the run without a new one."""
        generation = self._generation[0] + 1
        self._cells[generation % _RUNS * 4 + _ENDED] = 1
        self._generation[0] = generation

    def current(self) -> tuple[str, Run]:
        """The partition and its run, in a worker, for which it also ends with the main process."""
        return self._name.value.decode(), self._run(self._generation[0])

    def _run(self, generation: int) -> Run:
        cells = memoryview(self._cells).cast("B").cast("q")[generation % _RUNS * 4 :][:4]
        parent = os.getppid()

        def ended() -> bool:
            return self._generation[0] != generation or os.getppid() != parent

        return Run(cells, ended)
