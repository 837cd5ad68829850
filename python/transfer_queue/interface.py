"""The public functions: a session, and the key-value interface. Every ``kv_x`` has a twin ``async_kv_x``.

A key names a sample of a partition, a field is a column, a tag is a small dict kept with the key. Unless said otherwise
a call that fails has changed nothing. Every ``kv_x`` but `kv_watch` takes ``timeout`` in seconds, and so do
`list_units`, checkpoints and dumps; the default is ``client.timeout_s`` of the configuration, for checkpoints and dumps
an hour.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDict

from transfer_queue import _calls, _lost, _put_requests, _ray, _requests, _session, config, sampler
from transfer_queue.checkpoint import (  # noqa: F401  programs look for them here
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
from transfer_queue.client import TransferQueueClient, UnitInfo, unit_infos
from transfer_queue.errors import DeadlineExceededError, NotInitializedError, TransferQueueError
from transfer_queue.merge import NativeMerge
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.storage.managers import AsyncSimpleStorageManager

MergeFn = str | NativeMerge | Callable[[Any, Any], Any]
DataParser = Callable[[dict[str, Any]], dict[str, Any]]

# Handles of this process, where programs written for other releases look for them.
_TQ_CLIENT: TransferQueueClient | None = None
_TQ_CONTROLLER: Any = None
_TQ_STORAGE: Any = None


def init(conf: Any = None) -> Any:
    """Start a session, or join the one that runs on this host.

    The first process of a host that calls it owns the session: controller and units run inside it, and its ``close`` or
    its end is the end of the session. Every other process attaches, and its configuration is ignored. A process whose
    session has lost its owner gets another one by calling it again.

    Args:
        conf: dict or DictConfig laid over the packaged ``config.yaml``; unknown keys are kept and ignored.

    Returns:
        The configuration of the running session, a DictConfig.

    Raises:
        ValueError: a known key has a wrong type or value, or no sampler has the configured name.
        UnavailableError: another process is opening the session and does not finish in time (a ConnectionError).
        InvalidStateError: this process has a session of another namespace than the one asked for (a RuntimeError).

    Example:
        >>> import transfer_queue as tq
        >>> conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        >>> conf.backend.SimpleStorage.num_data_storage_units
        1
        >>> tq.close()
    """
    effective = config.load(conf)
    sampler.resolve(effective["controller"]["sampler"])
    _ray.forget_stale()
    if _session.forget_lost():
        _TQ_CLIENT = None
    _session.refuse_another(conf)
    session = _session.open_session(effective)
    _remember(session)
    return session.config


def _remember(session: _session.Session) -> None:
    """Keep the handles of the session of this process, whether ``init`` or another call has joined it."""
    global _TQ_CLIENT, _TQ_CONTROLLER, _TQ_STORAGE
    actors = _ray.actors()
    _TQ_CONTROLLER = actors.controller if actors is not None else session.info
    _TQ_STORAGE = (actors.units or None) if actors is not None else None
    if _TQ_CLIENT is None or _TQ_CLIENT.controller_info != session.info:
        _TQ_CLIENT = _new_client(session)


_session.on_join.append(_remember)


def _new_client(session: _session.Session) -> TransferQueueClient:
    client = TransferQueueClient(f"TransferQueueClient_{session.pid}", session.info)
    section = (session.config.get("backend") or {}).get("SimpleStorage") or {}
    client.storage_manager = AsyncSimpleStorageManager(session.info, section)  # the units have joined
    return client


def close() -> None:
    """End the session when this process owns it, and leave it otherwise. Calling it twice is fine."""
    global _TQ_CLIENT, _TQ_CONTROLLER, _TQ_STORAGE
    _TQ_CLIENT = _TQ_CONTROLLER = _TQ_STORAGE = None
    try:
        _session.close()
    finally:
        _ray.close()


def get_client() -> TransferQueueClient:
    """The low-level client of this process.

    Raises:
        NotInitializedError: neither ``init`` nor a KV function was called in this process (an AssertionError).
    """
    global _TQ_CLIENT
    if _TQ_CLIENT is None:
        if not _session.has_session():
            raise NotInitializedError("this process has no session, call init() first", "get_client")
        _TQ_CLIENT = _new_client(_session.current("get_client"))
    return _TQ_CLIENT


def get_metrics_endpoint() -> str | None:
    """``host:port`` of the metrics page of the session, which is at ``http://host:port/metrics``.

    A process without a session joins the one that runs on this host. None when there is none, or it serves no metrics.

    Example:
        >>> import transfer_queue as tq
        >>> conf = tq.init({"metrics": {"enabled": True}})
        >>> tq.get_metrics_endpoint() == conf.metrics.endpoint
        True
        >>> tq.close()
    """
    try:
        session = _session.current("get_metrics_endpoint")
    except NotInitializedError:
        return None
    endpoint: str | None = (session.config.get("metrics") or {}).get("endpoint")
    return endpoint


def list_units(timeout: float | None = None) -> list[UnitInfo]:
    """The storage units with their state, memory and limits."""
    session = _session.current("list_units", timeout)
    return unit_infos(_calls.run(session.handle, _requests.units(session, timeout)))


async def async_list_units(timeout: float | None = None) -> list[UnitInfo]:
    """Async twin of `list_units`."""
    session = _session.current("list_units", timeout)
    return unit_infos(await _calls.run_async(session.handle, _requests.units(session, timeout)))


def list_lost(partition_id: str | None = None, timeout: float | None = None) -> dict[str, dict[str | int, list[str]]]:
    """What was lost with a storage unit: partition -> key -> fields.

    A sample without a key is named by its index. Reading such a field raises DataLostError until it is written again,
    or its key or the field is cleared; it counts as not produced.

    Args:
        partition_id: only of this partition; None: of all.
        timeout: seconds, by default ``client.timeout_s``.

    Example:
        >>> import transfer_queue as tq
        >>> conf = tq.init()
        >>> tq.list_lost()
        {}
        >>> tq.close()
    """
    session = _session.current("list_lost", timeout)
    return _calls.run(session.handle, _lost.lost(session, partition_id, timeout))


async def async_list_lost(
    partition_id: str | None = None, timeout: float | None = None
) -> dict[str, dict[str | int, list[str]]]:
    """Async twin of `list_lost`."""
    session = _session.current("list_lost", timeout)
    return await _calls.run_async(session.handle, _lost.lost(session, partition_id, timeout))


def kv_put(
    key: str,
    partition_id: str,
    fields: Mapping[str, Any] | TensorDict | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: DataParser | None = None,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Write fields and a tag of one sample; key and partition are created when they do not exist.

    Args:
        key: name of the sample.
        partition_id: its partition.
        fields: one value per field: a tensor of any shape, or any Python object. Or a TensorDict of batch size [1].
        tag: merged onto the stored tag.
        data_parser: see `kv_batch_put`.
        timeout: seconds.

    Returns:
        The key, its stored tag, and all fields it has now.

    Raises:
        InvalidArgumentError: neither fields nor tag, or a value that cannot be stored (a ValueError).
        SchemaMismatchError: other samples hold a field with another dtype or kind (a ValueError).
        ResourceExhaustedError: no room within ``put_wait_s`` (a MemoryError).

    Example:
        >>> import torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> tq.kv_put("a", "train", {"ids": torch.tensor([1, 2]), "text": "hi"}, tag={"step": 1}).fields
        ['ids', 'text']
        >>> tq.kv_put("a", "train", tag={"score": 0.5}).tags
        [{'step': 1, 'score': 0.5}]
        >>> tq.close()
    """
    session = _session.current("kv_put", timeout)
    return _calls.run(
        session.handle, _put_requests.kv_put(session, key, partition_id, fields, tag, data_parser, timeout)
    )


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: Mapping[str, Any] | TensorDict | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: DataParser | None = None,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Async twin of `kv_put`. The values have been copied when the coroutine is first suspended."""
    session = _session.current("kv_put", timeout)
    call = _put_requests.kv_put(session, key, partition_id, fields, tag, data_parser, timeout)
    return await _calls.run_async(session.handle, call)


def kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[dict[str, Any]] | None = None,
    data_parser: DataParser | None = None,
    timeout: float | None = None,
    dedup: str | Sequence[str] | None = None,
) -> KVBatchMeta:
    """Write columns and tags of many samples, all or nothing.

    Args:
        keys: names of the samples, without repetition; row i of every column belongs to ``keys[i]``.
        partition_id: their partition, created when it does not exist.
        fields: TensorDict of batch size ``[len(keys)]``: dense or nested tensors, stacks of Python objects.
        tags: one dict per key, merged onto the stored one.
        data_parser: called where the data is stored with ``{field: column}``; what it returns is stored instead.
        timeout: seconds.
        dedup: fields of which equal payloads in this batch, such as the image of a prompt in all its samples, are sent
            and stored once, and freed with the last sample that has them. Reads and writes show no difference.

    Returns:
        The keys in their order, their stored tags, and the fields that all of them have.

    Raises:
        InvalidArgumentError: sizes that do not fit, repeated keys, values that cannot be stored (a ValueError).
        SchemaMismatchError: other samples hold a field with another dtype or kind (a ValueError).
        ResourceExhaustedError: no room within ``put_wait_s`` (a MemoryError).
        FailedError: the parser failed (a RuntimeError).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> batch = TensorDict({"ids": torch.arange(6).reshape(2, 3)}, batch_size=[2])
        >>> tq.kv_batch_put(["a", "b"], "train", fields=batch, tags=[{"step": 1}, {"step": 1}]).fields
        ['ids']
        >>> tq.kv_batch_get("b", "train")["ids"].unbind()[0]
        tensor([3, 4, 5])
        >>> tq.close()
    """
    session = _session.current("kv_batch_put", timeout)
    call = _put_requests.kv_batch_put(session, keys, partition_id, fields, tags, data_parser, timeout, dedup)
    return _calls.run(session.handle, call)


async def async_kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[dict[str, Any]] | None = None,
    data_parser: DataParser | None = None,
    timeout: float | None = None,
    dedup: str | Sequence[str] | None = None,
) -> KVBatchMeta:
    """Async twin of `kv_batch_put`. The values have been copied when the coroutine is first suspended."""
    session = _session.current("kv_batch_put", timeout)
    call = _put_requests.kv_batch_put(session, keys, partition_id, fields, tags, data_parser, timeout, dedup)
    return await _calls.run_async(session.handle, call)


def kv_update(
    key: str, partition_id: str, fields: Mapping[str, Any], merge_fn: MergeFn, timeout: float | None = None
) -> KVBatchMeta:
    """Store ``merge_fn(stored, new)`` in every given field of one sample; see `kv_batch_update`."""
    session = _session.current("kv_update", timeout)
    return _calls.run(session.handle, _put_requests.kv_update(session, key, partition_id, fields, merge_fn, timeout))


async def async_kv_update(
    key: str, partition_id: str, fields: Mapping[str, Any], merge_fn: MergeFn, timeout: float | None = None
) -> KVBatchMeta:
    """Async twin of `kv_update`."""
    session = _session.current("kv_update", timeout)
    call = _put_requests.kv_update(session, key, partition_id, fields, merge_fn, timeout)
    return await _calls.run_async(session.handle, call)


def kv_batch_update(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict,
    merge_fn: MergeFn,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Store ``merge_fn(stored, new)`` in every cell of the samples, computed where the cells lie.

    Applied exactly once, also when a reply is lost, and all or nothing over all samples, fields and units. Updates of
    one cell happen one after another. Tags and consumption are left alone.

    Args:
        keys: samples that exist.
        partition_id: their partition.
        fields: TensorDict of batch size ``[len(keys)]`` with the new values; every key must have every field.
        merge_fn: ``"concat"``, ``"add"``, ``"replace"``, ``"max"``, ``"min"`` or an object of ``transfer_queue.merge``,
            which run in the core; or a callable, which is shipped with cloudpickle and called for every cell with
            private copies of the stored and the new value. dtype and kind must stay, the shape may change.
        timeout: seconds; when it is over nothing was changed.

    Raises:
        WrongTypeError: keys, fields or merge_fn of another type, or empty (a TypeError).
        NotFoundError: a key does not exist (a ValueError and a KeyError).
        InvalidArgumentError: a field is not produced by every key, sizes that do not fit (a ValueError).
        FailedError: merge_fn raised or changed dtype or kind (a RuntimeError).

    Example:
        >>> import torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> _ = tq.kv_put("a", "train", {"ids": torch.tensor([1, 2]), "n": torch.tensor(1)})
        >>> _ = tq.kv_update("a", "train", {"ids": torch.tensor([3])}, "concat")
        >>> _ = tq.kv_update("a", "train", {"n": torch.tensor(5)}, lambda stored, new: stored + new)
        >>> got = tq.kv_batch_get("a", "train")
        >>> got["ids"].unbind()[0], got["n"]
        (tensor([1, 2, 3]), tensor([6]))
        >>> tq.close()
    """
    session = _session.current("kv_batch_update", timeout)
    call = _put_requests.kv_batch_update(session, keys, partition_id, fields, merge_fn, timeout)
    return _calls.run(session.handle, call)


async def async_kv_batch_update(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict,
    merge_fn: MergeFn,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Async twin of `kv_batch_update`."""
    session = _session.current("kv_batch_update", timeout)
    call = _put_requests.kv_batch_update(session, keys, partition_id, fields, merge_fn, timeout)
    return await _calls.run_async(session.handle, call)


def kv_batch_get(
    keys: str | Sequence[str],
    partition_id: str,
    select_fields: str | Sequence[str] | None = None,
    strict: bool = False,
    layout: str | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> TensorDict:
    """Read fields of samples.

    Rows are in the order of the keys, columns in that of the alphabet. Rows of rank 1 and more come back as one jagged
    nested tensor, numbers as one dense tensor, Python objects as a stack.

    Args:
        keys: one key or several; a repeated key is a repeated row. Missing ones are left out.
        partition_id: their partition.
        select_fields: fields to read, by default those that every key has. Others are left out.
        strict: raise for missing keys and fields instead.
        layout: ``"jagged"``, or ``"dense"`` for plain tensors ``[keys, ...]`` where all rows have one shape; by default
            ``client.layout`` of the configuration.
        copy: False returns writable private views of unit memory where possible. A view keeps its memory until the last
            tensor over it dies; do not keep views over a fork.
        timeout: seconds.

    Raises:
        NotFoundError: no key exists, or with strict something is missing (a ValueError and a KeyError).
        InvalidArgumentError: the keys have no field in common (a ValueError).

    Example:
        >>> import torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> for n, key in enumerate("abc"):
        ...     _ = tq.kv_put(key, "train", {"ids": torch.arange(n + 1), "reward": torch.tensor(n / 2)})
        >>> got = tq.kv_batch_get(["c", "a"], "train")
        >>> got["ids"].unbind()
        (tensor([0, 1, 2]), tensor([0]))
        >>> got["reward"]
        tensor([1., 0.])
        >>> tq.kv_batch_get("a", "train", "ids", layout="dense")["ids"]
        tensor([[0]])
        >>> tq.close()
    """
    session = _session.current("kv_batch_get", timeout)
    call = _requests.kv_batch_get(session, keys, partition_id, select_fields, strict, layout, copy, timeout)
    return _calls.run(session.handle, call)


async def async_kv_batch_get(
    keys: str | Sequence[str],
    partition_id: str,
    select_fields: str | Sequence[str] | None = None,
    strict: bool = False,
    layout: str | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> TensorDict:
    """Async twin of `kv_batch_get`."""
    session = _session.current("kv_batch_get", timeout)
    call = _requests.kv_batch_get(session, keys, partition_id, select_fields, strict, layout, copy, timeout)
    return await _calls.run_async(session.handle, call)


def kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: str | Sequence[str] | None = None,
    strict: bool = False,
    layout: str | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> TensorDict:
    """Read the keys and fields that a put returned; see `kv_batch_get`.

    Raises:
        InvalidArgumentError: the meta has no partition, or lacks a selected field (a ValueError).
    """
    session = _session.current("kv_batch_get_by_meta", timeout)
    fields = _requests.by_meta_fields(meta, select_fields)
    op = "kv_batch_get_by_meta"
    call = _requests.kv_batch_get(session, meta.keys, meta.partition_id, fields, strict, layout, copy, timeout, op)
    return _calls.run(session.handle, call)


async def async_kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: str | Sequence[str] | None = None,
    strict: bool = False,
    layout: str | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> TensorDict:
    """Async twin of `kv_batch_get_by_meta`."""
    session = _session.current("kv_batch_get_by_meta", timeout)
    fields = _requests.by_meta_fields(meta, select_fields)
    op = "kv_batch_get_by_meta"
    call = _requests.kv_batch_get(session, meta.keys, meta.partition_id, fields, strict, layout, copy, timeout, op)
    return await _calls.run_async(session.handle, call)


def kv_list(
    partition_id: str | None = None,
    keys: str | Sequence[str] | None = None,
    prefix: str | None = None,
    tags: Mapping[str, Any] | None = None,
    with_fields: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Keys and tags, ``{partition: {key: tag}}``, in the order of creation.

    Args:
        partition_id: one partition, by default all. An unknown one gives ``{}``.
        keys: only these keys.
        prefix: only keys that begin with it.
        tags: only keys whose tag has all these entries.
        with_fields: only keys that have all these fields.
        timeout: seconds.

    Example:
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> for n in range(3):
        ...     _ = tq.kv_put(f"step {n}", "train", tag={"even": n % 2 == 0})
        >>> tq.kv_list("train", tags={"even": True})
        {'train': {'step 0': {'even': True}, 'step 2': {'even': True}}}
        >>> tq.close()
    """
    session = _session.current("kv_list", timeout)
    call = _requests.kv_list(session, partition_id, keys, prefix, tags, with_fields, timeout)
    return _calls.run(session.handle, call)


async def async_kv_list(
    partition_id: str | None = None,
    keys: str | Sequence[str] | None = None,
    prefix: str | None = None,
    tags: Mapping[str, Any] | None = None,
    with_fields: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Async twin of `kv_list`."""
    session = _session.current("kv_list", timeout)
    call = _requests.kv_list(session, partition_id, keys, prefix, tags, with_fields, timeout)
    return await _calls.run_async(session.handle, call)


def kv_clear(
    keys: str | Sequence[str],
    partition_id: str,
    fields: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> None:
    """Remove samples, or fields of samples. Memory is free when it returns. What does not exist is ignored.

    Args:
        keys: the samples.
        partition_id: their partition.
        fields: only these fields; key, tag, consumption and other fields stay.
        timeout: seconds.

    Example:
        >>> import torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> _ = tq.kv_put("a", "train", {"ids": torch.arange(3), "logits": torch.zeros(3, 100)})
        >>> tq.kv_clear("a", "train", fields="logits")
        >>> sum(unit.memory_used_bytes for unit in tq.list_units())
        24
        >>> tq.close()
    """
    session = _session.current("kv_clear", timeout)
    _calls.run(session.handle, _requests.kv_clear(session, keys, partition_id, fields, timeout))


async def async_kv_clear(
    keys: str | Sequence[str],
    partition_id: str,
    fields: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> None:
    """Async twin of `kv_clear`."""
    session = _session.current("kv_clear", timeout)
    await _calls.run_async(session.handle, _requests.kv_clear(session, keys, partition_id, fields, timeout))


def kv_wait(
    partition_id: str,
    keys: str | Sequence[str] | None = None,
    fields: str | Sequence[str] | None = None,
    count: int | None = None,
    tags: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Wait until all ``keys``, or at least ``count`` keys, have all ``fields`` and ``tags``.

    Args:
        partition_id: the partition; it need not exist yet.
        keys: the samples to wait for.
        fields: fields that they must have.
        count: without ``keys``, so many of any samples.
        tags: entries that their tags must have.
        timeout: seconds.

    Returns:
        The keys that were waited for, with their tags and the fields all of them have.

    Raises:
        DeadlineExceededError: it did not happen in time (a TimeoutError).

    Example:
        >>> import threading
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> threading.Timer(0.05, tq.kv_put, ("a", "train", None, {"done": True})).start()
        >>> tq.kv_wait("train", count=1, tags={"done": True}, timeout=10).keys
        ['a']
        >>> tq.close()
    """
    session = _session.current("kv_wait", timeout)
    return _calls.run(session.handle, _requests.kv_wait(session, partition_id, keys, fields, count, tags, timeout))


async def async_kv_wait(
    partition_id: str,
    keys: str | Sequence[str] | None = None,
    fields: str | Sequence[str] | None = None,
    count: int | None = None,
    tags: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> KVBatchMeta:
    """Async twin of `kv_wait`."""
    session = _session.current("kv_wait", timeout)
    call = _requests.kv_wait(session, partition_id, keys, fields, count, tags, timeout)
    return await _calls.run_async(session.handle, call)


class Change(NamedTuple):
    """One change that `kv_watch` yields.

    Attributes:
        kind: ``"put"``, ``"update"``, ``"clear"``, or ``"lost"`` for what was lost with a storage unit.
        key: the sample.
        fields: fields that were written, cleared or lost; None when the whole sample was cleared.
        tags: the tag after the change; None after a clear and a loss.
    """

    kind: str
    key: str
    fields: list[str] | None
    tags: dict[str, Any] | None


_WATCH_S = 30.0


async def kv_watch(partition_id: str) -> AsyncGenerator[Change, None]:
    """Yield the changes of samples with keys in a partition, from the first ``anext`` on, in their order.

    Nothing is missed between two reads. The watch ends with ``aclose()`` or the generator's end.

    Args:
        partition_id: the partition; it need not exist yet.

    Raises:
        ResourceExhaustedError: more than a million changes were not read.

    Example:
        >>> import asyncio
        >>> import transfer_queue as tq
        >>> async def first_change():
        ...     watch = tq.kv_watch("train")
        ...     change = asyncio.ensure_future(anext(watch))
        ...     await asyncio.sleep(0.05)  # it watches from here on
        ...     await tq.async_kv_put("a", "train", tag={"step": 1})
        ...     return await change
        >>> _ = tq.init()
        >>> asyncio.run(first_change())
        Change(kind='put', key='a', fields=[], tags={'step': 1})
        >>> tq.close()
    """
    session = _session.current("kv_watch")
    watch = await _calls.run_async(session.handle, _requests.watch_open(session, partition_id))
    try:
        while True:
            try:
                changes = await _calls.run_async(session.handle, _requests.watch_next(watch, _WATCH_S))
            except DeadlineExceededError:
                continue
            for change in changes:
                yield Change(*change)
    finally:
        with contextlib.suppress(TransferQueueError):  # the end of the session has ended the watch
            await _calls.run_async(session.handle, _requests.watch_close(session, watch))


async_kv_watch = kv_watch
