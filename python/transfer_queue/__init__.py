"""TransferQueue: the data layer of RL post-training. See README.md for a first example."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from transfer_queue._environment import set_logging_level as _set_logging_level
from transfer_queue._session import version as _version

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "Change",
    "DrainJob",
    "DrainStatus",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "SimpleStorageUnit",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "StreamingTokenBudgetSampler",
    "TransferQueueClient",
    "TransferQueueController",
    "TransferQueueError",
    "UnitInfo",
    "__version__",
    "async_drain",
    "async_dump_data_by_key",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_batch_update",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "async_kv_update",
    "async_kv_wait",
    "async_kv_watch",
    "async_list_lost",
    "async_list_units",
    "async_load_checkpoint",
    "async_load_data_by_key",
    "async_move",
    "async_read_row_index",
    "async_rebalance",
    "async_save_checkpoint",
    "async_uncordon",
    "close",
    "drain",
    "dump_data_by_key",
    "errors",
    "get_client",
    "get_metrics_endpoint",
    "get_placement_group",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_batch_update",
    "kv_clear",
    "kv_list",
    "kv_put",
    "kv_update",
    "kv_wait",
    "kv_watch",
    "list_lost",
    "list_units",
    "load_checkpoint",
    "load_data_by_key",
    "merge",
    "move",
    "process_zmq_server_info",
    "read_row_index",
    "rebalance",
    "register_sampler",
    "save_checkpoint",
    "uncordon",
]

__version__ = _version()
_set_logging_level(logging.getLogger(__name__))

# `python -m transfer_queue serve` hosts units and needs no torch until a callable of a user does, nor do actors of Ray
# that host a session, so there a name is loaded when it is first used. Everywhere else all of them are plain
# attributes, which programs replace in their tests.
_hosting = sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"
if TYPE_CHECKING or not _hosting:
    from transfer_queue import errors, merge
    from transfer_queue._drain import DrainJob, DrainStatus, async_drain, async_uncordon, drain, uncordon
    from transfer_queue._moves import async_move, async_rebalance, move, rebalance
    from transfer_queue._register import register_sampler
    from transfer_queue.checkpoint import (
        async_dump_data_by_key,
        async_load_checkpoint,
        async_load_data_by_key,
        async_read_row_index,
        async_save_checkpoint,
        dump_data_by_key,
        load_checkpoint,
        load_data_by_key,
        read_row_index,
        save_checkpoint,
    )
    from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient, UnitInfo
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
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
        async_list_lost,
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
        list_lost,
        list_units,
    )
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.sampler import (
        BaseSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
        StreamingTokenBudgetSampler,
    )
    from transfer_queue.storage import SimpleStorageUnit
    from transfer_queue.utils.common import get_placement_group
    from transfer_queue.utils.zmq_utils import process_zmq_server_info
else:
    _HOMES = [
        *["interface", "checkpoint", "client", "metadata", "sampler", "errors", "controller", "dataloader", "storage"],
        *["utils.common", "utils.zmq_utils", "_register", "_drain", "_moves"],
    ]

    def __getattr__(name: str) -> Any:
        if name in ("errors", "merge"):
            return importlib.import_module(f"{__name__}.{name}")
        if name in __all__:
            for home in _HOMES:
                module = importlib.import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
