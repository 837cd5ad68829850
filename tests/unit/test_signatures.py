"""Arguments have the names, the order and the defaults that programs of the peer package call them with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import transfer_queue

_CACHED = {"has_cached_result": "partition_id, task_name, sampling_config=None", "clear_cache": "partition_id"}
_GROUPED = "ready_indexes, batch_size, task_name='', partition_id=''"

# What may follow are arguments that this package adds.
SIGNATURES = {
    "": {
        "init": "conf=None",
        "kv_put": "key, partition_id, fields=None, tag=None, data_parser=None",
        "kv_batch_put": "keys, partition_id, fields=None, tags=None, data_parser=None",
        "kv_batch_get": "keys, partition_id, select_fields=None",
        "kv_batch_get_by_meta": "meta, select_fields=None",
        "kv_list": "partition_id=None",
        "kv_clear": "keys, partition_id, fields=None",
        "kv_update": "key, partition_id, fields, merge_fn",
        "kv_batch_update": "keys, partition_id, fields, merge_fn",
        "save_checkpoint": "checkpoint_dir, include_storage=True, metadata=None",
        "load_checkpoint": "checkpoint_dir",
        "dump_data_by_key": "dump_dir, keys, partition_id",
        "load_data_by_key": "dump_dir",
        "read_row_index": "dump_dir",
    },
    "TransferQueueClient": {
        "__init__": "self, client_id, controller_info, zmq_io_threads=None, zmq_max_sockets=None",
        "initialize_storage_manager": "manager_type, config",
        "get_meta": "data_fields, batch_size, partition_id, mode='fetch', task_name=None, sampling_config=None",
        "put": "data, metadata=None, partition_id=None, data_parser=None",
        "update": "metadata, values, merge_fn",
        "get_data": "metadata",
        "set_custom_meta": "metadata",
        "clear_samples": "metadata",
        "clear_partition": "partition_id",
        "get_consumption_status": "task_name, partition_id",
        "check_consumption_status": "task_name, partition_id",
        "get_production_status": "data_fields, partition_id",
        "check_production_status": "data_fields, partition_id",
        "reset_consumption": "partition_id, task_name=None",
        "kv_retrieve_meta": "keys, partition_id, create=False",
        "kv_retrieve_keys": "global_indexes, partition_id",
        "kv_list": "partition_id=None",
        "kv_clear_fields": "keys, partition_id, fields",
        "save_controller_checkpoint": "path",
        "load_controller_checkpoint": "path",
        "save_storage_checkpoint": "directory",
        "load_storage_checkpoint": "directory",
    },
    "BatchMeta": {
        "add_fields": "tensor_dict, set_all_ready=True",
        "apply_field_schema": "schema, set_all_ready=True",
        "chunk": "chunks",
        "concat": "data, validate=True",
        "empty": "extra_info=None",
        "get_dtypes": "field_name",
        "get_shapes": "field_name",
        "get_extra_info": "key, default=None",
        "set_extra_info": "key, value",
        "update_extra_info": "info_dict",
        "remove_extra_info": "key",
        "has_extra_info": "key",
        "update_custom_meta": "custom_meta",
        "select_samples": "sample_indices",
        "select_fields": "field_names",
        "union": "other",
        "reorder": "indices",
    },
    "KVBatchMeta": {
        "select_keys": "keys_to_select",
        "reorder": "indexes",
        "chunk": "chunks",
        "concat": "data",
    },
    "BaseSampler": {"sample": "ready_indexes, batch_size", "load_checkpoint": "state", **_CACHED},
    "SequentialSampler": {"sample": "ready_indexes, batch_size", **_CACHED},
    "GRPOGroupNSampler": {"__init__": "self, n_samples_per_prompt=1", "sample": _GROUPED, **_CACHED},
    "SeqlenBalancedSampler": {"__init__": "self, n_samples_per_prompt=1, dp_size=1", "sample": _GROUPED, **_CACHED},
    "RankAwareSampler": {
        "sample": "ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id",
        **_CACHED,
    },
    "StreamingDataset": {
        "__init__": "self, config, batch_size, micro_batch_size, data_fields, partition_id, task_name, dp_rank, "
        "should_check_consumption_status=False, fetch_batch_fn=None, process_batch_fn=None",
        "step": "partition_id",
    },
    "StreamingDataLoader": {
        "__init__": "self, dataset, num_workers=0, collate_fn=None, pin_memory=False, worker_init_fn=None, "
        "multiprocessing_context=None, prefetch_factor=None, persistent_workers=False, pin_memory_device=''",
        "step": "partition_id",
    },
}


def _given(function: Any) -> list[str]:
    return [
        one.name if one.default is inspect.Parameter.empty else f"{one.name}={one.default!r}"
        for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("owner", SIGNATURES)
def test_arguments_are_called_as_programs_call_them(owner: str) -> None:
    home = getattr(transfer_queue, owner) if owner else transfer_queue
    for name, text in SIGNATURES[owner].items():
        want = text.split(", ")
        got = [one for one in _given(getattr(home, name)) if one != "self" or want[0] == "self"]
        assert got[: len(want)] == want, f"{owner}.{name}"
        assert all("=" in one or one in ("args", "kwargs") for one in got[len(want) :]), "what is added may be left out"
