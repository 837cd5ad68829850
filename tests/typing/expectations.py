"""What type checkers make of programs that use the package. Checked by mypy, never run: see `test_typing`."""

from collections.abc import AsyncGenerator
from typing import Any

import torch
from tensordict import TensorDict
from typing_extensions import assert_type

import transfer_queue as tq
from transfer_queue import BatchMeta, KVBatchMeta, TransferQueueClient, UnitInfo
from transfer_queue.errors import NotFoundError, TransferQueueError
from transfer_queue.merge import NativeMerge
from transfer_queue.sampler import BaseSampler


def session() -> None:
    assert_type(tq.init(), Any)
    assert_type(tq.init({"namespace": "a"}), Any)
    assert_type(tq.get_client(), TransferQueueClient)
    assert_type(tq.list_units(), list[UnitInfo])
    assert_type(tq.list_units()[0].memory_used_bytes, int)
    assert_type(tq.get_metrics_endpoint(), str | None)
    assert_type(tq.drain("a", targets=["b"], deadline_s=1.5, tier_policy="disk"), tq.DrainJob)
    assert_type(tq.drain("a").wait(timeout=1), tq.DrainStatus)
    assert_type(tq.rebalance()[0].bytes, int)
    tq.uncordon("a")
    tq.move(["a"], "p", "unit")  # type: ignore[call-arg]
    assert_type(tq.__version__, str)
    tq.close()
    tq.init(sampler=1)  # type: ignore[call-arg]


def key_value(batch: TensorDict) -> None:
    meta = tq.kv_put("a", "p", {"x": torch.ones(1), "text": "hi"}, tag={"n": 1})
    assert_type(meta, KVBatchMeta)
    assert_type(meta.keys, list[str])
    assert_type(meta.tags, list[dict[str, Any]])
    assert_type(meta.fields, list[str] | None)
    assert_type(meta.partition_id, str | None)
    assert_type(tq.kv_batch_put(["a", "b"], "p", batch, tags=[{}, {}], timeout=5), KVBatchMeta)
    assert_type(tq.kv_batch_get(["a"], "p"), TensorDict)
    assert_type(tq.kv_batch_get("a", "p", select_fields=("x",), strict=True, layout="dense", copy=False), TensorDict)
    assert_type(tq.kv_batch_get_by_meta(meta), TensorDict)
    assert_type(tq.kv_list(), dict[str, dict[str, dict[str, Any]]])
    assert_type(tq.kv_list("p", prefix="a", tags={"n": 1}, with_fields=["x"]), dict[str, dict[str, dict[str, Any]]])
    assert_type(tq.kv_wait("p", keys=["a"], fields="x", timeout=1.5), KVBatchMeta)
    tq.kv_clear("a", "p", fields=["x"])
    tq.kv_put(5, "p")  # type: ignore[arg-type]
    tq.kv_batch_get(["a"])  # type: ignore[call-arg]
    tq.kv_list(partition="p")  # type: ignore[call-arg]


def updates(batch: TensorDict) -> None:
    def merge(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return stored + new

    assert_type(tq.kv_update("a", "p", {"x": torch.ones(1)}, merge), KVBatchMeta)
    assert_type(tq.kv_update("a", "p", {"x": torch.ones(1)}, lambda stored, new: new), KVBatchMeta)
    assert_type(tq.kv_batch_update(["a"], "p", batch, "concat"), KVBatchMeta)
    assert_type(tq.kv_batch_update(["a"], "p", batch, tq.merge.add), KVBatchMeta)
    assert_type(tq.merge.max, NativeMerge)
    tq.kv_update("a", "p", {"x": torch.ones(1)}, 5)  # type: ignore[arg-type]
    tq.kv_update("a", "p", {"x": torch.ones(1)}, lambda stored: stored)  # type: ignore[arg-type, misc]


async def asynchronous(batch: TensorDict) -> None:
    assert_type(await tq.async_kv_put("a", "p", {"x": torch.ones(1)}), KVBatchMeta)
    assert_type(await tq.async_kv_batch_put(["a"], "p", batch), KVBatchMeta)
    assert_type(await tq.async_kv_batch_get("a", "p"), TensorDict)
    assert_type(await tq.async_kv_list(), dict[str, dict[str, dict[str, Any]]])
    assert_type(await tq.async_kv_wait("p", count=1), KVBatchMeta)
    assert_type(await tq.async_list_units(), list[UnitInfo])
    await tq.async_kv_clear("a", "p")
    assert_type(tq.kv_watch("p"), AsyncGenerator[tq.Change, None])
    async for change in tq.kv_watch("p"):
        assert_type(change, tq.Change)
        assert_type(change.kind, str)
        assert_type(change.fields, list[str] | None)


def client(batch: TensorDict) -> None:
    low = tq.get_client()
    meta = low.put(batch, partition_id="p")
    assert_type(meta, BatchMeta)
    assert_type(low.get_meta(["x"], 4, "p", task_name="t"), BatchMeta)
    assert_type(low.get_data(meta), TensorDict)
    assert_type(meta.size, int)
    assert_type(meta.global_indexes, list[int])
    assert_type(meta.partition_ids, list[str])
    assert_type(meta.field_names, list[str])
    assert_type(meta.select_fields(["x"]), BatchMeta)
    assert_type(meta.chunk(2), list[BatchMeta])
    assert_type(BatchMeta.concat([meta, meta]), BatchMeta)
    assert_type(low.get_partition_list(), list[str])
    assert_type(low.get_consumption_status("t", "p"), tuple[torch.Tensor | None, torch.Tensor | None])
    assert_type(low.check_production_status(["x"], "p"), bool)
    low.clear_samples(meta)
    low.set_custom_meta(meta)
    low.steal(meta)  # type: ignore[attr-defined]


async def asynchronous_client(batch: TensorDict) -> None:
    low = tq.get_client()
    assert_type(await low.async_put(batch, partition_id="p"), BatchMeta)
    assert_type(await low.async_get_meta(["x"], 4, "p", task_name="t"), BatchMeta)
    assert_type(await low.async_get_data(BatchMeta()), TensorDict)
    assert_type(await low.async_get_partition_list(), list[str])


def errors() -> None:
    try:
        tq.kv_batch_get("a", "p")
    except NotFoundError as error:
        assert_type(error.op, str)
        assert_type(error.retryable, bool)
    except tq.TransferQueueError as error:
        assert_type(error, TransferQueueError)


class Shortest(BaseSampler):
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        return ready_indexes[:batch_size], ready_indexes[:batch_size]
