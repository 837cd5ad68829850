"""What a job that drains a unit tells of itself."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue._calls import Reply, decode

__all__ = ["DrainStatus", "FailedCell", "MovedTier"]


class MovedTier(NamedTuple):
    """What there was to move in one tier when the job began, or came later, and what has moved. Bytes are payload.

    The last two are what other units have room for; only a dry run says so.
    """

    cells_total: int
    cells_moved: int
    bytes_total: int
    bytes_moved: int
    cells_fit: int | None = None
    bytes_fit: int | None = None


class FailedCell(NamedTuple):
    """A cell that has stayed on its unit. ``key`` is the index of a sample without a key."""

    partition: str
    key: str | int
    field: str
    attempts: int
    reason: str


class DrainStatus(NamedTuple):
    """What has become of a job so far.

    Attributes:
        job_id: number of the job.
        unit_id: the unit that is drained.
        state: ``"PENDING"``, ``"RUNNING"``, ``"CANCELLING"``, or how it has ended: ``"SUCCEEDED"`` (the unit has
            reported that it holds nothing), ``"PARTIAL"``, ``"FAILED"`` or ``"CANCELLED"``.
        phase: ``"copying"``, or ``"waiting"`` for those who still use what the unit keeps for them; ``""`` at the end.
        memory: counts of the tier in memory.
        disk: counts of the local disk.
        cells_total: cells that there were and that have come; always the sum of the four that follow.
        cells_moved: live on other units.
        cells_dropped_obsolete: were cleared or overwritten before they could move.
        cells_failed: stay, because they could not be moved.
        cells_remaining: have not moved yet.
        attempts: batches that were tried.
        blocked: why samples do not move at the moment, and how many: ``"NO_CAPACITY"``, ``"WRITING"``, ``"RETRYING"``,
            ``"STREAM_BROKEN"``, ``"PINNED"``, ``"STAGED"``, ``"CLEARING"``.
        failed: the first 100 of the cells that stay.
        elapsed_s: seconds since the job began.
        eta_s: seconds that it may still take, None while that is not known.
        error: why it has not succeeded, ``""`` otherwise.
    """

    job_id: int
    unit_id: str
    state: str
    phase: str
    memory: MovedTier
    disk: MovedTier
    cells_total: int
    cells_moved: int
    cells_dropped_obsolete: int
    cells_failed: int
    cells_remaining: int
    attempts: int
    blocked: dict[str, int]
    failed: list[FailedCell]
    elapsed_s: float
    eta_s: float | None
    error: str

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("SUCCEEDED", "PARTIAL", "FAILED", "CANCELLED")


def read(reply: Reply) -> DrainStatus:
    """The status out of the answer, which is core/wire.JobReply."""
    row = decode(reply.body)
    (
        job,
        unit,
        state,
        phase,
        memory,
        disk,
        dropped,
        failed,
        remaining,
        attempts,
        blocked,
        cells,
        elapsed,
        eta,
        why,
        *_,
    ) = row
    known = 4 if job else 6
    tiers = MovedTier(*memory[:known]), MovedTier(*disk[:known])
    moved = tiers[0].cells_moved + tiers[1].cells_moved
    return DrainStatus(
        job,
        unit,
        state,
        phase,
        *tiers,
        moved + dropped + failed + remaining,
        moved,
        dropped,
        failed,
        remaining,
        attempts,
        {reason: count for reason, count, *_ in blocked or []},
        [
            FailedCell(partition, key if keyed else index, field, tries, reason)
            for partition, key, keyed, index, field, tries, reason, *_ in cells or []
        ],
        elapsed / 1000,
        None if eta < 0 else eta / 1000,
        why,
    )
