"""What was lost with a storage unit: a listing by key."""

from __future__ import annotations

from typing import Any

from transfer_queue._calls import Call, Reply, decode, decode_ints, encode
from transfer_queue._ops import Op
from transfer_queue._requests import seconds
from transfer_queue._session import Session
from transfer_queue.errors import WrongTypeError

Lost = dict[str, dict[str | int, list[str]]]


def lost(session: Session, partition_id: Any, timeout: float | None) -> Call[Lost]:
    """Ask for the lost cells of a partition, or with None of all."""
    if partition_id is not None and not isinstance(partition_id, str):
        raise WrongTypeError(f"partition_id: got {type(partition_id).__name__}, want a str or None", "list_lost")
    return Call(Op.LOST, encode([partition_id]), _read, timeout=seconds(timeout, session.timeout_s))


def _read(reply: Reply) -> Lost:
    out: Lost = {}
    for partition, field, indexes, keys, known, *_ in decode(reply.body)[0] or []:
        names = decode(keys) if keys else []
        of = out.setdefault(partition, {})
        for index, key, has_key in zip(decode_ints(indexes), names, known, strict=True):
            of.setdefault(key if has_key else index, []).append(field)
    return {partition: {name: sorted(fields) for name, fields in of.items()} for partition, of in out.items()}
