"""Classes that run as Ray actors, without Ray being needed to import them."""

from __future__ import annotations

import importlib
from typing import Any

from transfer_queue.errors import InvalidStateError, WrongTypeError

__all__ = ["ActorClass", "node_address", "ray_module"]


def ray_module(op: str = "") -> Any:
    """The package ray.

    Raises:
        InvalidStateError: it is not installed (a RuntimeError).
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InvalidStateError("Ray is not installed here: pip install 'ray[default]'", op) from error


def node_address() -> str:
    """Any free port at the address of this node of the cluster, as ``tcp://HOST:0``."""
    host = str(ray_module().util.get_node_ip_address())
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


class _Prepared:
    """An actor class with options, as ``options`` returns it."""

    def __init__(self, actor_class: ActorClass, options: dict[str, Any]) -> None:
        self._class, self._options = actor_class, options

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an actor; returns its handle."""
        ray = ray_module(self._class.__name__)
        host = getattr(importlib.import_module(self._class.home), self._class.host)
        return ray.remote(host).options(**self._options).remote(*args, **kwargs)


class ActorClass:
    """Stands for a class that Ray runs as an actor; has ``options`` and ``remote`` as what ``ray.remote`` makes.

    ``remote`` goes through ``options``, which programs replace on the object to add options of their own.

    Args:
        name: name of the class for users.
        doc: its documentation.
        home: module of the class that runs in the actor; it is imported when the first actor is made.
        host: name of that class.
        options: of every actor, unless its maker gives others.
    """

    def __init__(self, name: str, doc: str, home: str, host: str, **options: Any) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self.home, self.host, self._defaults = home, host, options

    def options(self, **options: Any) -> Any:
        """The class with options of ``ray.actor.ActorClass.options`` for its actors."""
        return _Prepared(self, {**self._defaults, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an actor; returns its handle."""
        return self.options().remote(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there are only actors of it."""
        raise WrongTypeError(f"{self.__name__} runs as a Ray actor: use {self.__name__}.remote(...)")

    def __repr__(self) -> str:
        return f"ActorClass({self.__name__})"
