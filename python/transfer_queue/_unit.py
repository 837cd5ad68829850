"""A storage unit in this process, for a controller in another process of this host."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

from transfer_queue import _lib, _session
from transfer_queue._jobs import Workers
from transfer_queue.errors import InvalidArgumentError, TransferQueueError, WrongTypeError
from transfer_queue.utils.zmq_utils import Role, ZMQServerInfo

_CLOSE_S = 5.0


class UnitHost:
    """A storage unit that this process hosts until it ends or closes it.

    It does nothing by itself: a controller joins it by its address. Merge functions of updates and data parsers of the
    cells that it stores run on threads of this process.

    Args:
        name: what listings and errors call it; the units of a session have different names.
        memory_limit_bytes: bytes of memory for cells; 0 for no limit.
        sample_limit: samples that it takes; 0 for no limit.
        namespace: of the session that it is for.
        storage: section ``backend.SimpleStorage``, for its disk; None for memory alone. A durable disk has what an
            earlier unit of this name and namespace has left there.

    Raises:
        InvalidArgumentError: the name is empty or too long, or a limit is negative.
        AlreadyExistsError: another process uses the folder of a durable unit, or it holds something else.
        CorruptionError: what a durable unit has left is not as it was written. Nothing is removed.

    Example:
        >>> from transfer_queue._unit import UnitHost
        >>> host = UnitHost("unit-a", memory_limit_bytes=1 << 20)
        >>> host.address.id, host.address.role.value
        ('unit-a', 'TransferQueueStorage')
        >>> host.close()
    """

    def __init__(
        self,
        name: str,
        memory_limit_bytes: int = 0,
        sample_limit: int = 0,
        namespace: str = "default",
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        options = {
            "mode": "unit",
            "dir": os.environ.get("TQ_RUNTIME_DIR", ""),
            "namespace": namespace,
            "name": name,
            "memory_limit_bytes": memory_limit_bytes,
            "disk": _session.disk_options(storage or {}),
            "total_storage_size": sample_limit,
            "version": _session.version(),
        }
        self._handle, described = _session._opened(options)
        self._pid = os.getpid()
        self._workers: Workers | None = None
        #: Where a controller reaches it. Whoever has it may join.
        self.address = ZMQServerInfo(
            Role.STORAGE,
            name,
            ip=socket.gethostname(),
            socket=described["socket"],
            secret=described["secret"],
            pid=described["pid"],
        )
        atexit.register(self._at_exit)
        try:
            self._workers = Workers(self._handle)
        except BaseException:
            self.close()
            raise

    def close(self, join_s: float = _CLOSE_S) -> None:
        """Give its memory back and remove its socket; what it stores is lost, but for the disk of a durable unit.

        A second call does nothing.

        Args:
            join_s: seconds to wait for callables of users that still run here.
        """
        handle, self._handle = self._handle, 0
        atexit.unregister(self._at_exit)
        if not handle or self._pid != os.getpid():
            return
        _session._ended(handle)
        if self._workers is not None:
            self._workers.join(join_s)

    def _at_exit(self) -> None:
        if _lib.loaded():
            with contextlib.suppress(TransferQueueError):
                self.close(join_s=0)


def limits(config: Any, storage_unit_size: Any = None) -> tuple[int, int]:
    """Memory and number of samples that the unit takes at most, 0 for no limit."""
    if config is None:
        return 0, _count("storage_unit_size", storage_unit_size)
    if not hasattr(config, "get"):
        raise WrongTypeError(f"config: got {type(config).__name__}, want the section backend.SimpleStorage")
    total, units = _count("total_storage_size", config.get("total_storage_size")), config.get("num_data_storage_units")
    samples = -(-total // (_count("num_data_storage_units", units) or 1))
    return _count("memory_limit_bytes", config.get("memory_limit_bytes")), samples


def _count(name: str, value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}: got {value!r}, want null or a whole number of at least 1")
    return value
