"""What runs in the process of a unit actor: one storage unit, which a controller is told of by its address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from transfer_queue._actor_class import node_address, ray_module
from transfer_queue._unit import UnitHost, limits
from transfer_queue.errors import TransferQueueError, UnavailableError
from transfer_queue.utils.zmq_utils import ZMQServerInfo

_AGAIN_S = 0.5


def _started_again() -> bool:
    """Whether Ray runs this actor once more because its process had ended."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's property uses one that Ray has deprecated
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class UnitActor:
    """A storage unit.

    Args:
        config: section ``backend.SimpleStorage``; or, as older programs have it, ``storage_unit_size``.
        storage_unit_size: most samples it takes, None for no limit.
        name: its name in the session, by default a new one.
        environment: variables of the creator, for those that are not set here.
        listen: whether other nodes of the cluster have to reach it, at the address of this one.
        security: of the session, for what crosses to other nodes.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | int | None = None,
        storage_unit_size: int | None = None,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        listen: bool = False,
        security: str = "",
    ) -> None:
        self._host: UnitHost | None = None
        self._failed: BaseException | None = None
        try:
            for variable, value in (environment or {}).items():
                os.environ.setdefault(variable, value)
            if isinstance(config, int) and not isinstance(config, bool):
                config, storage_unit_size = None, config
            memory, samples = limits(config, storage_unit_size)
            storage = None if isinstance(config, bool) else config
            name = name or f"TQ_STORAGE_UNIT_{uuid.uuid4().hex[:8]}"
            at = node_address() if listen else ""
            self._host = UnitHost(name, memory, samples, storage=storage, listen=at, security=security)
            if _started_again():
                threading.Thread(target=self._join_again, name="tq-join", daemon=True).start()
        except BaseException as error:
            self._failed = error  # an error of the constructor would reach nobody as what it is

    def _join_again(self) -> None:
        """Take the place of the process before this one, whose end the controller may not know of yet."""
        from transfer_queue import _ray

        ray = ray_module()
        while (host := self._host) is not None:
            with contextlib.suppress(ray.exceptions.RayError, TransferQueueError, ValueError):
                controller = ray.get_actor(_ray.NAME, namespace=_ray.NAMESPACE)
                ray.get(controller.join_units.remote([host.address]))
                return
            time.sleep(_AGAIN_S)

    @property
    def _open(self) -> UnitHost:
        if self._failed is not None:
            raise self._failed
        assert self._host is not None
        return self._host

    async def get_zmq_server_info(self) -> ZMQServerInfo:
        """The address with which it joins a session."""
        return self._open.address

    async def shutdown(self) -> None:
        """End the unit. What it holds is gone."""
        host, self._host = self._host, None
        if host is not None:
            self._failed = UnavailableError("the unit was shut down")
            await asyncio.to_thread(host.close)
