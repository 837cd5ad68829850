"""Requests about the session as a whole: its configuration, its units. They need no torch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

from transfer_queue._calls import Call, decode, encode, no_result
from transfer_queue._ops import Op
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.utils.zmq_utils import ZMQServerInfo


def store_config(conf: Any, timeout: float) -> Call[None]:
    """Replace the configuration that joining processes are given."""
    try:
        packed = cloudpickle.dumps(conf)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise InvalidArgumentError(f"the configuration cannot be pickled: {error}", "store_config") from error
    return Call(Op.STORE_CONFIG, encode([packed]), no_result, timeout=timeout)


def create_partition(partition_id: Any, timeout: float) -> Call[bool]:
    """Create a partition; the result is False when it existed."""
    if not isinstance(partition_id, str):
        raise WrongTypeError(f"partition_id: got {type(partition_id).__name__}, want a str", "create_partition")
    return Call(Op.CREATE_PARTITION, encode([partition_id]), lambda reply: bool(decode(reply.body)[0]), timeout=timeout)


def join_units(units: Sequence[ZMQServerInfo], timeout: float) -> Call[None]:
    """Make units that run in other processes part of the session; those that are already stay as they are."""
    addresses = [[unit.id, unit.socket, unit.secret, unit.ip] for unit in units]
    return Call(Op.JOIN_UNITS, encode([addresses]), no_result, timeout=timeout)
