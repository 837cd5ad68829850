"""TransferQueue: the data layer of RL post-training. See README.md for a first example."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_HOMES = {
    "interface": [
        *["init", "close", "get_client", "get_metrics_endpoint", "list_units", "async_list_units"],
        *["kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear"],
        *["kv_update", "kv_batch_update", "kv_wait", "kv_watch"],
        *["async_kv_put", "async_kv_batch_put", "async_kv_batch_get", "async_kv_batch_get_by_meta", "async_kv_list"],
        *["async_kv_clear", "async_kv_update", "async_kv_batch_update", "async_kv_wait", "async_kv_watch"],
        *["Change"],
    ],
    "client": ["TransferQueueClient", "AsyncTransferQueueClient", "UnitInfo"],
    "metadata": ["BatchMeta", "KVBatchMeta"],
    "sampler": ["BaseSampler", "SequentialSampler"],
    "errors": ["TransferQueueError", "StorageKeyNotFoundError"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ["errors", "merge"]

__all__ = [*_HOME_OF, *_MODULES, "__version__"]

if TYPE_CHECKING:
    from transfer_queue import errors, merge
    from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient, UnitInfo
    from transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
    from transfer_queue.interface import (
        Change,
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_batch_update,
        async_kv_clear,
        async_kv_list,
        async_kv_put,
        async_kv_update,
        async_kv_wait,
        async_kv_watch,
        async_list_units,
        close,
        get_client,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_batch_update,
        kv_clear,
        kv_list,
        kv_put,
        kv_update,
        kv_wait,
        kv_watch,
        list_units,
    )
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.sampler import BaseSampler, SequentialSampler

    __version__: str


def _load() -> None:
    """Make every public name an attribute of this module."""
    from transfer_queue._session import version

    here = globals()
    for module, names in _HOMES.items():
        home = importlib.import_module(f"transfer_queue.{module}")
        for name in names:
            here.setdefault(name, getattr(home, name))
    for module in _MODULES:
        here.setdefault(module, importlib.import_module(f"transfer_queue.{module}"))
    here["__version__"] = version()


def __getattr__(name: str) -> Any:
    if name in __all__ and name not in globals():
        _load()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `python -m transfer_queue serve` hosts units and needs no torch until a callable of a user does, so there names are loaded
# when they are first used; everywhere else they are there at once.
if sys.argv[:1] != ["-m"]:
    _load()
