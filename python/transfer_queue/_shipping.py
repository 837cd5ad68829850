"""Objects of users as bytes that other processes can load. Needs no torch."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from typing import Any

import cloudpickle

from transfer_queue.errors import InvalidArgumentError

__all__ = ["shipped"]

_registry = threading.Lock()  # of cloudpickle: modules that are pickled by value


def _after_fork() -> None:
    global _registry
    _registry = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def shipped(function: Any, what: str, op: str, of: Any = None) -> bytes:
    """The callable as bytes that any process can load, also when its module is only on the caller's path.

    ``of`` is the part whose module counts, when it is not the whole.
    """
    module = _own_module(function if of is None else of)
    try:
        if module is None:
            packed: bytes = cloudpickle.dumps(function)
            return packed
        with _registry:
            ours = module.__name__ not in cloudpickle.list_registry_pickle_by_value()
            if ours:
                cloudpickle.register_pickle_by_value(module)
            try:
                packed = cloudpickle.dumps(function)
            finally:
                if ours:
                    cloudpickle.unregister_pickle_by_value(module)
        return packed
    except Exception as error:
        raise InvalidArgumentError(f"{what} cannot be pickled: {type(error).__name__}: {error}", op) from error


def _own_module(function: Any) -> Any:
    """The module of a callable when other processes may not have it: a file that was not installed."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if name == "__main__" or path is None or path.startswith(_installed):
        return None
    return module
