"""Clients of key-value stores, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from transfer_queue.errors import InvalidArgumentError, WrongTypeError

__all__ = ["StorageClientFactory", "StorageKVClient"]

_Class = TypeVar("_Class", bound=type)


class StorageKVClient(ABC):
    """A store of values by key, as ``KVStorageManager`` uses it.

    Args:
        config: section of the backend.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store values; returns one object per key that a later get or clear is given, or nothing."""

    @abstractmethod
    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """The values in the order of the keys."""

    @abstractmethod
    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        """Remove values."""


class StorageClientFactory:
    """Makes clients of key-value stores by the name of their class.

    Example:
        >>> from transfer_queue.storage import StorageClientFactory, StorageKVClient
        >>> @StorageClientFactory.register("Dict")
        ... class DictClient(StorageKVClient):
        ...     def put(self, keys, values): self.config.update(zip(keys, values))
        ...     def get(self, keys, shapes=None, dtypes=None, custom_backend_meta=None):
        ...         return [self.config[key] for key in keys]
        ...     def clear(self, keys, custom_backend_meta=None): [self.config.pop(key) for key in keys]
        >>> client = StorageClientFactory.create("Dict", {})
        >>> client.put(["0@ids"], [7])
        >>> client.get(["0@ids"])
        [7]
    """

    _known: ClassVar[dict[str, type[StorageKVClient]]] = {}

    @classmethod
    def register(cls, client_type: str) -> Callable[[_Class], _Class]:
        """Decorator of a subclass of `StorageKVClient`.

        Raises:
            WrongTypeError: the class is none (a TypeError).
        """

        def known(made: _Class) -> _Class:
            if not (isinstance(made, type) and issubclass(made, StorageKVClient)):
                raise WrongTypeError(
                    f"storage client {client_type!r}: got {made!r}, want a subclass of StorageKVClient"
                )
            cls._known[client_type] = made
            return made

        return known

    @classmethod
    def create(cls, client_type: str, config: dict[str, Any]) -> StorageKVClient:
        """A client of a registered class.

        Raises:
            InvalidArgumentError: nothing of that name is registered (a ValueError).
        """
        if client_type not in cls._known:
            raise InvalidArgumentError(f"Unknown StorageClient {client_type!r}, have {sorted(cls._known)}")
        return cls._known[client_type](config)
