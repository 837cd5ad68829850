"""Samples move between units that stay: `move` chosen ones, `rebalance` until all units hold about the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transfer_queue import _calls, _session
from transfer_queue._arguments import checked_name, key_list, packed_strings, seconds
from transfer_queue._calls import Call, Reply, decode, encode
from transfer_queue._ops import Op

__all__ = ["Moved", "async_move", "async_rebalance", "move", "rebalance"]

_TIMEOUT_S = 3600.0


class Moved(NamedTuple):
    """What has moved from one unit to another; of a dry run, the bytes that would."""

    source: str
    target: str
    samples: int
    cells: int
    bytes: int


def _read(reply: Reply) -> list[Moved]:
    return [Moved(*row[:5]) for row in decode(reply.body)[0] or []]


def _move(keys: str | Sequence[str] | None, partition_id: str, to: str, timeout: float | None) -> Call[list[Moved]]:
    names = None if keys is None else key_list(keys, "move")
    body = encode([checked_name("partition_id", partition_id), packed_strings(names), checked_name("to", to)])
    return Call(Op.MOVE, body, _read, timeout=seconds(timeout, _TIMEOUT_S))


def _rebalance(dry_run: bool, timeout: float | None) -> Call[list[Moved]]:
    return Call(Op.REBALANCE, encode([bool(dry_run)]), _read, timeout=seconds(timeout, _TIMEOUT_S))


def move(keys: str | Sequence[str] | None, partition_id: str, *, to: str, timeout: float | None = None) -> list[Moved]:
    """Move samples with all their cells to a unit while everybody goes on working. Each cell keeps its tier.

    Args:
        keys: names of the samples; None: all samples of the partition.
        partition_id: their partition.
        to: name of the unit, see `list_units`.
        timeout: seconds, by default an hour.

    Returns:
        What has moved, by the unit that it has left; nothing of samples that were there already.

    Raises:
        NotFoundError: a unit, partition or key of that name does not exist, and nothing has moved (a KeyError).
        InvalidStateError: the unit takes no samples.
        ResourceExhaustedError: it has no room (a MemoryError). What has moved until then stays there.

    Example:
        >>> import torch, transfer_queue as tq
        >>> conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
        >>> meta = tq.kv_put("a", "train", fields={"x": torch.arange(3)})
        >>> busy, idle = sorted(tq.list_units(), key=lambda unit: -unit.cells)
        >>> (moved,) = tq.move("a", "train", to=idle.unit_id)
        >>> moved.target == idle.unit_id, moved.cells, moved.bytes
        (True, 1, 24)
        >>> tq.close()
    """
    session = _session.current("move", timeout)
    return _calls.run(session.handle, _move(keys, partition_id, to, timeout))


async def async_move(
    keys: str | Sequence[str] | None, partition_id: str, *, to: str, timeout: float | None = None
) -> list[Moved]:
    """Async twin of `move`."""
    session = _session.current("move", timeout)
    return await _calls.run_async(session.handle, _move(keys, partition_id, to, timeout))


def rebalance(dry_run: bool = False, timeout: float | None = None) -> list[Moved]:
    """Move samples from units that hold more bytes than others to those that hold less, as after a unit has joined.

    Units that take no samples are left alone, and so are samples that somebody writes.

    Args:
        dry_run: only tell how many bytes would move from which unit to which.
        timeout: seconds, by default an hour.

    Returns:
        What has moved; nothing when all units hold about the same.

    Example:
        >>> import transfer_queue as tq
        >>> conf = tq.init()
        >>> tq.rebalance()
        []
        >>> tq.close()
    """
    session = _session.current("rebalance", timeout)
    return _calls.run(session.handle, _rebalance(dry_run, timeout))


async def async_rebalance(dry_run: bool = False, timeout: float | None = None) -> list[Moved]:
    """Async twin of `rebalance`."""
    session = _session.current("rebalance", timeout)
    return await _calls.run_async(session.handle, _rebalance(dry_run, timeout))
