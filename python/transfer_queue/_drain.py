"""A unit leaves a running session: `drain` moves everything off it, `uncordon` lets it take samples again.

docs/drain.md says how it works and what can keep a unit from becoming empty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from transfer_queue import _calls, _session
from transfer_queue._arguments import checked_name, packed_strings, seconds
from transfer_queue._calls import Call, encode, no_result
from transfer_queue._drain_status import DrainStatus, read
from transfer_queue._environment import MOST_SECONDS
from transfer_queue._ops import Op
from transfer_queue._whole_numbers import whole_number
from transfer_queue.errors import DeadlineExceededError, InvalidArgumentError, UnimplementedError, WrongTypeError

__all__ = ["DrainJob", "DrainStatus", "async_drain", "async_uncordon", "drain", "uncordon"]


def _run(call: tuple[int, Call[DrainStatus]]) -> DrainStatus:
    return _calls.run(*call)


async def _run_async(call: tuple[int, Call[DrainStatus]]) -> DrainStatus:
    return await _calls.run_async(*call)


class _Bar:
    """A bar of tqdm over the bytes of a job."""

    def __init__(self, unit: str) -> None:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError as error:
            raise UnimplementedError("progress=True needs the package tqdm, which is not installed", "drain") from error
        self._bar = tqdm(desc=f"drain {unit}", unit="B", unit_scale=True, unit_divisor=1024)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def turns(self, timeout: float | None) -> Iterator[float]:
        """How long to wait before the bar is drawn anew, until the time is over."""
        end = time.monotonic() + seconds(timeout, MOST_SECONDS)
        while (left := end - time.monotonic()) > 0:
            yield min(left, _REDRAW_S)

    def show(self, status: DrainStatus) -> DrainStatus:
        """Draw what a status says, and hand it on."""
        self._bar.total = status.memory.bytes_total + status.disk.bytes_total
        self._bar.n = status.memory.bytes_moved + status.disk.bytes_moved
        blocked = [f"{reason} {count}" for reason, count in status.blocked.items()]
        self._bar.set_postfix_str(", ".join([f"{status.cells_moved} of {status.cells_total} cells", *blocked]))
        return status


_REDRAW_S = 0.25


class DrainJob:
    """A job of the session. It runs in the controller, whatever becomes of this object and this process.

    Attributes:
        job_id: number of the job.
        unit_id: the unit that is drained.
    """

    __slots__ = ("_plan", "_progress", "job_id", "unit_id")

    def __init__(self, job_id: int, unit_id: str, *, progress: bool = False, plan: DrainStatus | None = None) -> None:
        self.job_id, self.unit_id, self._progress, self._plan = job_id, unit_id, progress, plan

    def __repr__(self) -> str:
        return f"DrainJob(job_id={self.job_id}, unit_id={self.unit_id!r})"

    def status(self, timeout: float | None = None) -> DrainStatus:
        """What has become of the job so far; of a dry run, what there is to move."""
        return self._plan or _run(self._call(timeout))

    async def async_status(self, timeout: float | None = None) -> DrainStatus:
        """Async twin of `status`."""
        return self._plan or await _run_async(self._call(timeout))

    def wait(self, timeout: float | None = None) -> DrainStatus:
        """Return the status when the job has ended, however it has.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            DeadlineExceededError: it goes on (a TimeoutError).
        """
        if self._plan or not self._progress:
            return self._plan or _run(self._call(timeout, wait=True))
        with _Bar(self.unit_id) as bar:
            for left in bar.turns(timeout):
                try:
                    return bar.show(_run(self._call(left, wait=True)))
                except DeadlineExceededError:
                    bar.show(self.status())
        return _run(self._call(0, wait=True))

    async def async_wait(self, timeout: float | None = None) -> DrainStatus:
        """Async twin of `wait`."""
        if self._plan or not self._progress:
            return self._plan or await _run_async(self._call(timeout, wait=True))
        with _Bar(self.unit_id) as bar:
            for left in bar.turns(timeout):
                try:
                    return bar.show(await _run_async(self._call(left, wait=True)))
                except DeadlineExceededError:
                    bar.show(await self.async_status())
        return await _run_async(self._call(0, wait=True))

    def cancel(self, timeout: float | None = None) -> DrainStatus:
        """Let the job end soon. What has moved stays moved, everything stays readable, and the unit stays cordoned."""
        return self._plan or _run(self._call(timeout, cancel=True))

    async def async_cancel(self, timeout: float | None = None) -> DrainStatus:
        """Async twin of `cancel`."""
        return self._plan or await _run_async(self._call(timeout, cancel=True))

    def _call(
        self, timeout: float | None, *, wait: bool = False, cancel: bool = False
    ) -> tuple[int, Call[DrainStatus]]:
        session = _session.current("drain", timeout)
        limit = seconds(timeout, MOST_SECONDS if wait else session.timeout_s)
        return session.handle, Call(Op.JOB, encode([self.job_id, wait, cancel]), read, timeout=limit)


def _milliseconds(what: str, value: float | None) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(f"{what}: got {type(value).__name__}, want seconds as a number", "drain")
    if not value > 0:
        raise InvalidArgumentError(f"{what} {value}: want more than 0 seconds", "drain")
    return math.ceil(min(value, MOST_SECONDS) * 1000)


def _start(
    session: _session.Session,
    unit: str,
    targets: Sequence[str] | None,
    max_slots: int,
    max_inflight_bytes: int,
    rate_bytes_per_s: int | None,
    deadline_s: float | None,
    max_attempts: int,
    tier_policy: str,
    dry_run: bool,
    timeout: float | None,
) -> Call[DrainStatus]:
    if not isinstance(targets, list | tuple | set | frozenset | None):
        raise WrongTypeError(f"targets: got {type(targets).__name__}, want a list of units", "drain")
    names = None if targets is None else [checked_name("targets", name) for name in targets]
    if names == []:
        raise InvalidArgumentError("targets: the list is empty", "drain")
    body = encode(
        [
            checked_name("unit", unit),
            packed_strings(names),
            whole_number(max_slots, "max_slots", "drain"),
            whole_number(max_inflight_bytes, "max_inflight_bytes", "drain"),
            0 if rate_bytes_per_s is None else whole_number(rate_bytes_per_s, "rate_bytes_per_s", "drain"),
            _milliseconds("deadline_s", deadline_s),
            whole_number(max_attempts, "max_attempts", "drain"),
            checked_name("tier_policy", tier_policy),
            bool(dry_run),
        ]
    )
    return Call(Op.DRAIN, body, read, timeout=seconds(timeout, session.timeout_s))


def drain(
    unit: str,
    *,
    targets: Sequence[str] | None = None,
    max_slots: int = 4,
    max_inflight_bytes: int = 256 << 20,
    rate_bytes_per_s: int | None = None,
    deadline_s: float | None = None,
    max_attempts: int = 3,
    tier_policy: str = "preserve",
    dry_run: bool = False,
    progress: bool = False,
    timeout: float | None = None,
) -> DrainJob:
    """Move everything that a unit holds, in memory and on its disk, to other units, while everybody goes on working.

    The unit takes no new samples from now on. When the job has succeeded the unit is ``"DRAINED"``: it has reported
    that it holds nothing, and may be stopped. When the job ends in another way the unit stays ``"CORDONED"``: what it
    still holds can be read and written as before, and `uncordon` lets it take samples again.

    Args:
        unit: name of the unit, see `list_units`.
        targets: names of the units that take its samples; None: all others that are active.
        max_slots: batches of samples that move at a time.
        max_inflight_bytes: their bytes together; a sample that has more moves alone.
        rate_bytes_per_s: bytes that move in a second on average; None: as fast as it goes.
        deadline_s: seconds after which the job ends with what it has achieved; None: none.
        max_attempts: how often a cell is tried.
        tier_policy: ``"preserve"``: a cell lies in memory or on disk as before; ``"memory"``: it lies where it would
            lie if it was put anew; ``"disk"``: everything goes to disk.
        dry_run: move nothing. The status of the job, which has number 0, tells what there is to move, for how much of
            each tier there is room, and under ``blocked`` how many samples have none.
        progress: `DrainJob.wait` shows a bar, with the package tqdm.
        timeout: seconds for the beginning of the job, by default ``client.timeout_s``.

    Raises:
        NotFoundError: a unit of that name does not exist (a KeyError and a ValueError).
        InvalidStateError: it is being drained, is drained, or is the last one that takes samples.
        UnavailableError: it is gone (a ConnectionError).

    Example:
        >>> import torch, transfer_queue as tq
        >>> conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
        >>> meta = tq.kv_put("a", "train", fields={"x": torch.arange(3)})
        >>> first, second = (unit.unit_id for unit in tq.list_units())
        >>> tq.drain(first).wait(timeout=30).state
        'SUCCEEDED'
        >>> [unit.state for unit in tq.list_units()]
        ['DRAINED', 'ACTIVE']
        >>> tq.uncordon(first)
        >>> tq.close()
    """
    session = _session.current("drain", timeout)
    call = _start(
        session,
        unit,
        targets,
        max_slots,
        max_inflight_bytes,
        rate_bytes_per_s,
        deadline_s,
        max_attempts,
        tier_policy,
        dry_run,
        timeout,
    )
    status = _calls.run(session.handle, call)
    return DrainJob(status.job_id, status.unit_id, progress=progress, plan=status if dry_run else None)


async def async_drain(
    unit: str,
    *,
    targets: Sequence[str] | None = None,
    max_slots: int = 4,
    max_inflight_bytes: int = 256 << 20,
    rate_bytes_per_s: int | None = None,
    deadline_s: float | None = None,
    max_attempts: int = 3,
    tier_policy: str = "preserve",
    dry_run: bool = False,
    progress: bool = False,
    timeout: float | None = None,
) -> DrainJob:
    """Async twin of `drain`."""
    session = _session.current("drain", timeout)
    call = _start(
        session,
        unit,
        targets,
        max_slots,
        max_inflight_bytes,
        rate_bytes_per_s,
        deadline_s,
        max_attempts,
        tier_policy,
        dry_run,
        timeout,
    )
    status = await _calls.run_async(session.handle, call)
    return DrainJob(status.job_id, status.unit_id, progress=progress, plan=status if dry_run else None)


def _uncordon(session: _session.Session, unit: Any, timeout: float | None) -> Call[None]:
    return Call(
        Op.UNCORDON, encode([checked_name("unit", unit)]), no_result, timeout=seconds(timeout, session.timeout_s)
    )


def uncordon(unit: str, timeout: float | None = None) -> None:
    """Let a unit take new samples again, after a drain that has ended in whatever way.

    Raises:
        NotFoundError: a unit of that name does not exist (a KeyError and a ValueError).
        InvalidStateError: it is being drained.
    """
    session = _session.current("uncordon", timeout)
    _calls.run(session.handle, _uncordon(session, unit, timeout))


async def async_uncordon(unit: str, timeout: float | None = None) -> None:
    """Async twin of `uncordon`."""
    session = _session.current("uncordon", timeout)
    await _calls.run_async(session.handle, _uncordon(session, unit, timeout))
