"""What has to be started for a backend, by the name of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from transfer_queue.errors import WrongTypeError

__all__ = ["StorageBootstrapProvider"]

Provider = Callable[[Any], Any]
_Provider = TypeVar("_Provider", bound=Provider)


class StorageBootstrapProvider:
    """Functions that start a backend. They take the configuration of the session and return what they have started.

    Example:
        >>> from transfer_queue.storage import StorageBootstrapProvider
        >>> @StorageBootstrapProvider.register_provider("MyStore")
        ... def start(conf):
        ...     return {"server": "started"}
        >>> StorageBootstrapProvider.get_provider("mystore")({})
        {'server': 'started'}
    """

    _known: ClassVar[dict[str, Provider]] = {}

    @classmethod
    def register_provider(cls, name: str) -> Callable[[_Provider], _Provider]:
        """Decorator of the function of a backend; capitals in the name do not matter.

        Raises:
            WrongTypeError: it is no function (a TypeError).
        """

        def known(provider: _Provider) -> _Provider:
            if not callable(provider):
                raise WrongTypeError(f"bootstrap provider {name!r}: got {type(provider).__name__}, want a function")
            cls._known[name.lower()] = provider
            return provider

        return known

    @classmethod
    def get_provider(cls, name: str) -> Provider | None:
        """The function of a backend, None when there is none."""
        return cls._known.get(name.lower())
