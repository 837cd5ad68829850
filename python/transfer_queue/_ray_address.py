"""The address of a session in the key-value store of its Ray cluster, beside what its controller answers.

The first call of an actor makes a process load what Ray needs to serialise anything, which takes longer than all the
rest of joining. A process that only wants to join finds the address here instead, and asks the controller when there is
none or nobody answers there. So an entry that is old or missing, or a store that fails, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from transfer_queue._actor_class import ray_module
from transfer_queue.utils.zmq_utils import ZMQServerInfo

__all__ = ["find", "publish", "withdraw"]

# One entry, as there is one controller of that name. It says whose it is, because who is killed does not remove it.
_ENTRY = {"key": b"TransferQueueController", "namespace": b"transfer_queue"}


def _store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def _no_failure() -> contextlib.suppress:
    """Ray promises neither the functions of the store nor that they succeed."""
    return contextlib.suppress(ImportError, AttributeError, ray_module().exceptions.RayError)


def publish(controller: Any, info: ZMQServerInfo) -> None:
    """Store the address of the session of a controller, which lets others in."""
    with _no_failure():
        _store()._internal_kv_put(value=pickle.dumps((controller._actor_id.binary(), info)), **_ENTRY)


def find(controller: Any) -> ZMQServerInfo | None:
    """The address of the session of a controller, None when it is not known."""
    with _no_failure():
        if packed := _store()._internal_kv_get(**_ENTRY):
            of, info = pickle.loads(packed)
            return info if of == controller._actor_id.binary() else None
    return None


def withdraw(controller: Any) -> None:
    """Remove the address of the session of a controller that is about to end."""
    if find(controller) is not None:
        with _no_failure():
            _store()._internal_kv_del(**_ENTRY)
