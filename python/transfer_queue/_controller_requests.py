"""Requests about the session as a whole: its configuration, its units. They need no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue._calls import Call, decode, encode, no_result
from transfer_queue._ops import Op
from transfer_queue._shipping import shipped
from transfer_queue.errors import WrongTypeError
from transfer_queue.utils.zmq_utils import ZMQServerInfo


def packed_config(conf: Any, op: str = "init") -> bytes:
    """The configuration for processes that attach, which may not have the module of its sampler.

    Raises:
        InvalidArgumentError: something in it cannot be pickled (a ValueError).
    """
    controller = conf.get("controller") if isinstance(conf, Mapping) else None
    given = controller.get("sampler") if isinstance(controller, Mapping) else None
    return shipped(conf, "the configuration", op, of="" if given is None else given)  # a name has no module


def store_config(conf: Any, timeout: float) -> Call[None]:
    """Replace the configuration that joining processes are given."""
    return Call(Op.STORE_CONFIG, encode([packed_config(conf, "store_config")]), no_result, timeout=timeout)


def create_partition(partition_id: Any, timeout: float) -> Call[bool]:
    """Create a partition; the result is False when it existed."""
    if not isinstance(partition_id, str):
        raise WrongTypeError(f"partition_id: got {type(partition_id).__name__}, want a str", "create_partition")
    return Call(Op.CREATE_PARTITION, encode([partition_id]), lambda reply: bool(decode(reply.body)[0]), timeout=timeout)


def join_units(units: Sequence[ZMQServerInfo], timeout: float) -> Call[None]:
    """Make units that run in other processes part of the session; those that are already stay as they are."""
    addresses = []
    for unit in units:
        at = unit.to_addr("requests") if unit.ports else ""
        addresses.append([unit.id, unit.socket, unit.secret, unit.ip, at, unit.machine, unit.key])
    return Call(Op.JOIN_UNITS, encode([addresses]), no_result, timeout=timeout)
