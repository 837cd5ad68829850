"""What moves the data of a client to and from a backend, by the name of the backend."""

from __future__ import annotations

import inspect
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transfer_queue import _calls, _controller_requests
from transfer_queue.errors import InvalidArgumentError, UnimplementedError, WrongTypeError
from transfer_queue.storage.clients import StorageClientFactory
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue._session import Session
    from transfer_queue.metadata import BatchMeta

__all__ = [
    "AsyncSimpleStorageManager",
    "KVStorageManager",
    "StorageManager",
    "StorageManagerFactory",
    "UnknownManagerError",
    "initialized",
    "unit_addresses",
]

_Class = TypeVar("_Class", bound=type)


class UnknownManagerError(InvalidArgumentError, AssertionError):
    """No storage manager has that name."""


class StorageManager(ABC):
    """Base of the managers of all backends.

    Args:
        controller_info: address of the controller.
        config: section of the backend.
    """

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any]) -> None:
        self.controller_info, self.config = controller_info, config

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> None:
        """Store the columns of samples."""

    @abstractmethod
    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the fields of samples."""

    @abstractmethod
    async def clear_data(self, metadata: BatchMeta, fields: list[str] | None = None) -> None:
        """Remove the cells of samples."""

    async def notify_data_update(
        self,
        partition_id: str,
        global_indexes: list[int],
        field_schema: Mapping[str, Mapping[str, Any]],
        custom_backend_meta: Any = None,
    ) -> bool:
        """Tell the controller that cells exist which lie in another store than its units.

        Raises:
            UnimplementedError: always, as this release has no such cells (a NotImplementedError).
        """
        raise self._missing("cells outside of the session's own units")

    async def update_data(self, metadata: BatchMeta, values: TensorDict, merge_fn: Any) -> Any:
        """Merge values into stored cells.

        Raises:
            UnimplementedError: the backend cannot do it (a NotImplementedError).
        """
        raise self._missing("kv_update")

    async def save_checkpoint(self, directory: str) -> None:
        """Write what is stored into a directory.

        Raises:
            UnimplementedError: the backend cannot do it (a NotImplementedError).
        """
        raise self._missing("save_checkpoint")

    async def load_checkpoint(self, directory: str) -> None:
        """Read what `save_checkpoint` has written.

        Raises:
            UnimplementedError: the backend cannot do it (a NotImplementedError).
        """
        raise self._missing("load_checkpoint")

    def _missing(self, what: str) -> UnimplementedError:
        name = type(self).__name__
        return UnimplementedError(f"{what} is not supported by {name}; it requires the SimpleStorage backend")

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Give back what the manager holds."""


class AsyncSimpleStorageManager(StorageManager):
    """The manager of the session's own units. It adds nothing to the client, which exchanges data with them directly.

    Args:
        controller_info: address of the controller.
        config: section of the backend, with the addresses of the units in ``zmq_info``.
    """

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any]) -> None:
        super().__init__(controller_info, config)
        from transfer_queue.client import AsyncTransferQueueClient

        self._client = AsyncTransferQueueClient("AsyncSimpleStorageManager", controller_info)

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> None:
        """Store the columns of samples; the metadata gets the new fields."""
        await self._client.async_put(data, metadata, data_parser=data_parser)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the fields of samples."""
        return await self._client.async_get_data(metadata)

    async def update_data(self, metadata: BatchMeta, values: TensorDict, merge_fn: Any) -> BatchMeta:
        """Merge values into stored cells."""
        return await self._client.async_update(metadata, values, merge_fn)

    async def clear_data(self, metadata: BatchMeta, fields: list[str] | None = None) -> None:
        """Remove the samples, or fields of them."""
        from transfer_queue import _requests

        for part in metadata.chunk_by_partition() if metadata.size else []:
            await self._client._await(_requests.clear_samples(self._client._session(), part, fields, None))


class KVStorageManager(StorageManager):
    """Base of the managers of key-value stores, whose client `StorageClientFactory` knows as ``client_name``.

    The values of a session are in its own units, and its controller knows of no others. This release moves none to or
    from such a store: what would do so raises before the store sees anything.

    Args:
        controller_info: address of the controller.
        config: section of the backend.

    Raises:
        InvalidArgumentError: no ``client_name``, or one that is not registered (a ValueError).
    """

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any]) -> None:
        super().__init__(controller_info, config)
        name = config.get("client_name")
        if not name:
            raise InvalidArgumentError(f"{type(self).__name__}: config has no client_name")
        self.storage_client = StorageClientFactory.create(name, dict(config))

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> None:
        """Store the columns of samples.

        Raises:
            UnimplementedError: always (a NotImplementedError).
        """
        raise self._missing("put")

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the fields of samples.

        Raises:
            UnimplementedError: always (a NotImplementedError).
        """
        raise self._missing("get_data")

    async def clear_data(self, metadata: BatchMeta, fields: list[str] | None = None) -> None:
        """Remove the cells of samples.

        Raises:
            UnimplementedError: always (a NotImplementedError).
        """
        raise self._missing("clear")

    @staticmethod
    def storage_keys(metadata: BatchMeta) -> list[str]:
        """The key of every cell, ``"<index>@<field>"``: field by field in their order, row by row."""
        return [f"{index}@{field}" for field in metadata.field_names for index in metadata.global_indexes]


class StorageManagerFactory:
    """Makes storage managers by the name of their backend."""

    _known: ClassVar[dict[str, type[StorageManager]]] = {
        "SimpleStorage": AsyncSimpleStorageManager,
        "AsyncSimpleStorageManager": AsyncSimpleStorageManager,
    }

    @classmethod
    def register(cls, manager_type: str) -> Callable[[_Class], _Class]:
        """Decorator of a subclass of `StorageManager`.

        Raises:
            WrongTypeError: the class is none (a TypeError).
        """

        def known(made: _Class) -> _Class:
            if not (isinstance(made, type) and issubclass(made, StorageManager)):
                raise WrongTypeError(
                    f"storage manager {manager_type!r}: got {made!r}, want a subclass of StorageManager"
                )
            cls._known[manager_type] = made
            return made

        return known

    @classmethod
    def registered(cls, manager_type: str) -> type[StorageManager]:
        """The class of that name.

        Raises:
            UnknownManagerError: nothing of that name is registered (an AssertionError and a ValueError).
        """
        if manager_type not in cls._known:
            raise UnknownManagerError(f"Unknown storage manager {manager_type!r}, have {sorted(cls._known)}")
        return cls._known[manager_type]

    @classmethod
    def create(
        cls, manager_type: str, controller_info: ZMQServerInfo, config: Mapping[str, Any], **options: Any
    ) -> StorageManager:
        """A manager of a registered class. Options that its constructor does not take are left out with a warning.

        Raises:
            UnknownManagerError: nothing of that name is registered (an AssertionError and a ValueError).
        """
        made = cls.registered(manager_type)
        taken = inspect.signature(made).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            foreign = sorted(set(options) - set(taken))
            if foreign:
                logging.getLogger(__name__).warning("%s does not take %s", made.__name__, ", ".join(foreign))
            options = {name: value for name, value in options.items() if name in taken}
        return made(controller_info, config, **options)


def initialized(session: Session, manager_type: str, config: Any) -> StorageManager:
    """A manager for a client of a session. Units of the session's own backend join the session, unless they have.

    Raises:
        UnknownManagerError: nothing of that name is registered (an AssertionError and a ValueError).
        UnimplementedError: it is not that of the session's own units, past which a client would go (a
            NotImplementedError).
        InvalidArgumentError: the section has no addresses of units (a ValueError).
        UnavailableError: a unit is gone (a ConnectionError).
    """
    if not hasattr(config, "get"):
        raise WrongTypeError(f"config: got {type(config).__name__}, want the section of the backend", _INITIALIZE)
    made = StorageManagerFactory.registered(manager_type)
    if made is not AsyncSimpleStorageManager:
        what = f"storage manager {manager_type!r} ({made.__name__})"
        raise UnimplementedError(f"{what}: a client exchanges data with the session's own units only", _INITIALIZE)
    units = [info for info in unit_addresses(config) if info.session != session.id]
    if units:
        _calls.run(session.handle, _controller_requests.join_units(units, session.timeout_s))
    return made(session.info, config)


_INITIALIZE = "initialize_storage_manager"


def unit_addresses(config: Mapping[str, Any]) -> list[ZMQServerInfo]:
    """The addresses of the units in the section of a backend.

    Raises:
        InvalidArgumentError: there are none (a ValueError).
        WrongTypeError: they are something else (a TypeError).
    """
    given, key = config.get("zmq_info"), "zmq_info"
    if given is None and config.get("storage_unit_infos") is not None:
        warnings.warn("storage_unit_infos is called zmq_info now", DeprecationWarning, stacklevel=3)
        given, key = config["storage_unit_infos"], "storage_unit_infos"
    if given is None:
        raise InvalidArgumentError("the configuration has no zmq_info, want the addresses of the storage units")
    if isinstance(given, ZMQServerInfo):
        return [given]
    listed = list(given.values()) if hasattr(given, "values") else list(given)
    for info in listed:
        if not isinstance(info, ZMQServerInfo):
            raise WrongTypeError(f"{key}: got {type(info).__name__}, want the ZMQServerInfo of a storage unit")
    if not listed:
        raise InvalidArgumentError(f"{key} is empty, want the addresses of the storage units")
    return listed
