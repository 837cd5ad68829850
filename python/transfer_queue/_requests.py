"""The requests of the queue: what each sends, and how its answer is read. Sync and async calls share them.

Those that write are in ``_put_requests``, those about the session as a whole in ``_controller_requests``.

Bodies are arrays in the order of the structs of core/wire/messages.go. A list of strings or dicts crosses as bytes that
hold one msgpack array, a list of integers as little-endian int64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue import _lib, _results, _tags, sampler
from transfer_queue._arguments import (
    checked_name,
    fetch_seconds,
    field_list,
    key_list,
    packed_samples,
    packed_strings,
    refuse_surrogates,
    seconds,
    some_keys,
)
from transfer_queue._calls import Call, Reply, decode, decode_ints, encode, encode_ints, no_result
from transfer_queue._field_schema import FieldSchema
from transfer_queue._ops import Op
from transfer_queue._whole_numbers import whole_number
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta, KVBatchMeta

if TYPE_CHECKING:
    from transfer_queue._session import Session

_INLINE_BYTES = 64 << 10  # a get of at most so many bytes brings them in its reply
_VIEWS, _DENSE = 1, 2
_LAYOUTS = ("jagged", "dense")


def _read_table(reply: Reply) -> TensorDict:
    (names,) = decode(reply.body)
    return _results.build(decode(names), reply.columns, reply.rows, _lib.library().tq_release)


def _get_call(
    session: Session,
    partition: str,
    keys: list[str] | None,
    samples: list[bytes] | None,
    fields: list[str] | None,
    timeout: float | None,
    *,
    strict: bool = False,
    layout: str | None = None,
    copy: bool = True,
    op: str,
) -> Call[TensorDict]:
    layout = session.layout if layout is None else layout
    if layout not in _LAYOUTS:
        raise InvalidArgumentError(f"layout {layout!r}: want one of {list(_LAYOUTS)}", op)
    body = encode(
        [
            partition,
            packed_strings(keys),
            samples,
            packed_strings(fields),
            strict,
            not copy,
            _INLINE_BYTES if copy else -1,
        ]
    )
    flags = (0 if copy else _VIEWS) | (_DENSE if layout == "dense" else 0)
    return Call(Op.GET, body, _read_table, flags=flags, timeout=seconds(timeout, session.timeout_s), name=op)


def kv_batch_get(
    session: Session,
    keys: Any,
    partition_id: Any,
    select_fields: Any,
    strict: bool,
    layout: str | None,
    copy: bool,
    timeout: float | None,
    op: str = "kv_batch_get",
) -> Call[TensorDict]:
    listed = some_keys(keys, op)
    fields = field_list(select_fields, op, "select_fields")
    partition = checked_name("partition_id", partition_id)
    return _get_call(session, partition, listed, None, fields, timeout, strict=strict, layout=layout, copy=copy, op=op)


def by_meta_fields(meta: KVBatchMeta, select_fields: Any) -> list[str] | None:
    """The fields that a get by meta reads.

    Raises:
        TypeError: there is no meta.
        ValueError: the meta has no partition, or not all the selected fields.
    """
    op = "kv_batch_get_by_meta"
    if not hasattr(meta, "partition_id") or not hasattr(meta, "fields"):
        raise WrongTypeError(f"meta: got {type(meta).__name__}, want a KVBatchMeta", op)
    if meta.partition_id is None:
        raise InvalidArgumentError("meta.partition_id is None, want the partition of its keys", op)
    wanted = field_list(select_fields, op, "select_fields")
    if wanted is None:
        return meta.fields
    missing = sorted(set(wanted) - set(meta.fields or []))
    if missing:
        raise InvalidArgumentError(f"select_fields {missing} not found in meta.fields {meta.fields}", op)
    return wanted


def get_data(
    session: Session, metadata: BatchMeta, layout: str | None, copy: bool, timeout: float | None
) -> Call[TensorDict]:
    partition = metadata.partition_ids[0]
    return _get_call(
        session,
        partition,
        None,
        packed_samples(metadata),
        metadata.field_names,
        timeout,
        layout=layout,
        copy=copy,
        op="get_data",
    )


def kv_clear(session: Session, keys: Any, partition_id: Any, fields: Any, timeout: float | None) -> Call[None]:
    op = "kv_clear"
    names = field_list(fields, op)
    listed = some_keys(keys, op) if names is None else key_list(keys, op)
    body = encode([checked_name("partition_id", partition_id), packed_strings(listed), None, packed_strings(names)])
    return Call(Op.CLEAR, body, no_result, timeout=seconds(timeout, session.timeout_s), name=op)


def clear_samples(session: Session, metadata: BatchMeta, fields: Any, timeout: float | None) -> Call[None]:
    op = "clear_samples"
    body = encode([metadata.partition_ids[0], None, packed_samples(metadata), packed_strings(field_list(fields, op))])
    return Call(Op.CLEAR, body, no_result, timeout=seconds(timeout, session.timeout_s), name=op)


def clear_partition(session: Session, partition_id: Any, timeout: float | None) -> Call[None]:
    body = encode([checked_name("partition_id", partition_id)])
    return Call(Op.CLEAR_PARTITION, body, no_result, timeout=seconds(timeout, session.timeout_s))


def kv_list(
    session: Session,
    partition_id: Any,
    keys: Any,
    prefix: Any,
    tags: Any,
    with_fields: Any,
    timeout: float | None,
) -> Call[dict[str, dict[str, dict[str, Any]]]]:
    op = "kv_list"
    body = encode(
        [
            None if partition_id is None else checked_name("partition_id", partition_id),
            None if keys is None else encode(key_list(keys, op)),
            "" if prefix is None else checked_name("prefix", prefix),
            _tags.encode_filter(tags, op),
            packed_strings(field_list(with_fields, op, "with_fields")),
        ]
    )

    def read(reply: Reply) -> dict[str, dict[str, dict[str, Any]]]:
        listed = {}
        for name, raw_keys, raw_tags in decode(reply.body)[0] or []:
            names = decode(raw_keys) if raw_keys else []
            listed[name] = dict(zip(names, _tags.decode(raw_tags, len(names)), strict=True))
        return listed

    return Call(Op.LIST, body, read, timeout=seconds(timeout, session.timeout_s), name=op)


def kv_wait(
    session: Session, partition_id: Any, keys: Any, fields: Any, count: Any, tags: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_wait"
    partition = checked_name("partition_id", partition_id)
    listed = None if keys is None else some_keys(keys, op)
    if count is not None and (isinstance(count, bool) or not hasattr(count, "__index__")):
        raise WrongTypeError(f"count: got {type(count).__name__}, want an int", op)
    if listed is None and (count is None or count < 1):
        raise InvalidArgumentError(f"count {count}: give keys, or a count of at least 1", op)
    most = 0 if count is None else whole_number(count, "count", op, least=0)
    names = packed_strings(field_list(fields, op))
    body = encode([partition, packed_strings(listed), names, most, _tags.encode_filter(tags, op)])

    def read(reply: Reply) -> KVBatchMeta:
        raw_keys, raw_tags, raw_fields = decode(reply.body)
        met = decode(raw_keys) if raw_keys else []
        held = decode(raw_fields) if raw_fields else []
        return KVBatchMeta._from_parts(met, _tags.decode(raw_tags, len(met)), partition, held, {})

    return Call(Op.WAIT, body, read, timeout=seconds(timeout, session.timeout_s), name=op)


def watch_open(session: Session, partition_id: Any) -> Call[int]:
    body = encode([checked_name("partition_id", partition_id)])
    return Call(Op.WATCH_OPEN, body, lambda reply: decode(reply.body)[0], timeout=session.timeout_s, name="kv_watch")


def watch_next(watch: int, timeout: float) -> Call[list[tuple[str, str, list[str] | None, dict[str, Any] | None]]]:
    def read(reply: Reply) -> list[Any]:
        return [
            (kind, key, decode(fields) if fields else None, _tags.decode_one(tags) if tags else None)
            for kind, key, fields, tags in decode(reply.body)[0] or []
        ]

    return Call(Op.WATCH_NEXT, encode([watch]), read, timeout=timeout, name="kv_watch")


def watch_close(session: Session, watch: int) -> Call[None]:
    return Call(Op.WATCH_CLOSE, encode([watch]), no_result, timeout=session.timeout_s)


def _read_meta(partition: str) -> Callable[[Reply], BatchMeta]:
    def read(reply: Reply) -> BatchMeta:
        indexes, generations, columns, status, tags, end, *_ = decode(reply.body)
        count = len(indexes or b"") // 8
        if not count:
            empty = BatchMeta.empty()
            if end:
                empty.extra_info["end_of_stream"] = True
            return empty
        described = [FieldSchema.from_wire(column) for column in columns or []]
        return BatchMeta._from_reply(
            indexes, generations, partition, described, status, _tags.decode(tags, count) if tags else None
        )

    return read


def get_meta(
    session: Session,
    data_fields: Any,
    batch_size: Any,
    partition_id: Any,
    mode: Any,
    task_name: Any,
    sampling_config: Any,
    timeout: float | None,
    token_budget: Any = None,
) -> Call[BatchMeta]:
    op = "get_meta"
    fields = field_list(data_fields, op, "data_fields")
    if token_budget is not None:
        sampling_config, batch_size = {**(sampling_config or {}), "token_budget": token_budget}, batch_size or 1
    if mode not in ("insert", "fetch", "force_fetch"):
        raise InvalidArgumentError(f"mode {mode!r}: want 'insert', 'fetch' or 'force_fetch'", op)
    size = 0 if mode == "force_fetch" else whole_number(batch_size, "batch_size", op)
    if mode == "fetch" and not isinstance(task_name, str):
        raise InvalidArgumentError(f"task_name {task_name!r}: want the name of the consuming task", op)
    partition = checked_name("partition_id", partition_id)
    if isinstance(task_name, str):
        refuse_surrogates("task_name", [task_name], op)
    sampling = _sampling(sampling_config, op)
    body = encode([partition, mode, packed_strings(fields or []), size, task_name or "", sampling])
    limit = fetch_seconds(timeout) if mode == "fetch" else seconds(timeout, session.timeout_s)
    return Call(Op.META, body, _read_meta(partition), timeout=limit)


def _sampling(config: Any, op: str) -> bytes | None:
    """The arguments of the sampler; numbers of numpy and torch become plain ones where the core reads them."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise WrongTypeError(f"sampling_config: got {type(config).__name__}, want a dict", op)
    plain = dict(config)
    for name in ("dp_rank", "batch_index", "token_budget"):
        value = plain.get(name)
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            plain[name] = value.item()
    return _tags.encode_map(plain, "sampling_config", op)


def decode_sampling(raw: bytes | None) -> dict[str, Any]:
    """The arguments of the sampler; tuples come as lists, but for the batch number, which must stay hashable."""
    decoded = _tags.decode_one(raw)
    if isinstance(decoded.get("batch_index"), list):
        decoded["batch_index"] = tuple(decoded["batch_index"])
    return decoded


def tags_by_index(reply: Reply) -> dict[int, dict[str, Any]]:
    """The tags of all samples of a metadata reply."""
    indexes, _, _, _, tags, *_ = decode(reply.body)
    listed = decode_ints(indexes)
    return dict(zip(listed, _tags.decode(tags, len(listed)), strict=True))


def register_sampler(session: Session, sampler_or_class: Any, timeout: float | None) -> Call[None]:
    """Replace the sampler of the session by a sampler, its class, or the sampler of that name."""
    op = "register_sampler"
    described = sampler.describe(sampler.resolve(sampler_or_class), op)
    body = encode([described["name"], described["group"], described["ranks"], described["pickled"]])
    return Call(Op.REGISTER_SAMPLER, body, no_result, timeout=seconds(timeout, session.timeout_s))


def production_completed(session: Session, partition_id: Any, timeout: float | None) -> Call[bool]:
    """Whether production is complete."""
    body = encode([checked_name("partition_id", partition_id), ""])
    limit = seconds(timeout, session.timeout_s)
    return Call(Op.STREAM, body, lambda reply: decode(reply.body)[0], timeout=limit, name="check_production_completed")


def stream_drained(session: Session, task_name: Any, partition_id: Any, timeout: float | None) -> Call[bool]:
    """Whether production is complete and the task has consumed everything."""
    if not checked_name("task_name", task_name):
        raise InvalidArgumentError("task_name '': want the name of the consuming task", "check_stream_drained")
    body = encode([checked_name("partition_id", partition_id), task_name])
    return Call(Op.STREAM, body, lambda reply: decode(reply.body)[1], timeout=seconds(timeout, session.timeout_s))


def kv_retrieve_meta(
    session: Session, keys: Any, partition_id: Any, create: bool, timeout: float | None
) -> Call[BatchMeta]:
    listed = some_keys(keys, "kv_retrieve_meta")
    partition = checked_name("partition_id", partition_id)
    body = encode([partition, packed_strings(listed), bool(create)])
    return Call(Op.RETRIEVE_META, body, _read_meta(partition), timeout=seconds(timeout, session.timeout_s))


def keys_or_none(reply: Reply) -> list[str | None]:
    """The keys of a reply, None where a sample has none."""
    keys, known = decode(reply.body)
    return [key if there else None for key, there in zip(decode(keys), known, strict=True)]


def kv_retrieve_keys(
    session: Session, global_indexes: Any, partition_id: Any, timeout: float | None
) -> Call[list[str | None]]:
    op = "kv_retrieve_keys"
    listed = [global_indexes] if isinstance(global_indexes, int) else global_indexes
    if not isinstance(listed, list | tuple):
        raise WrongTypeError(f"global_indexes: got {type(global_indexes).__name__}, want an int or a list of int", op)
    if not listed:
        raise InvalidArgumentError("global_indexes: got an empty list, want at least one", op)
    for i, index in enumerate(listed):
        if not isinstance(index, int):
            raise WrongTypeError(f"global_indexes[{i}]: got {type(index).__name__}, want an int", op)
        if index.bit_length() > 63:
            raise InvalidArgumentError(f"global_indexes: {index} does not fit into 64 bits", op)

    body = encode([checked_name("partition_id", partition_id), encode_ints(listed)])
    return Call(Op.RETRIEVE_KEYS, body, keys_or_none, timeout=seconds(timeout, session.timeout_s))


def set_custom_meta(session: Session, metadata: BatchMeta, timeout: float | None) -> Call[None]:
    tags = _tags.encode(metadata.custom_meta, "set_custom_meta")
    body = encode([metadata.partition_ids[0], packed_samples(metadata), tags])
    return Call(Op.SET_TAGS, body, no_result, timeout=seconds(timeout, session.timeout_s))


def consumption(
    session: Session, task_name: Any, partition_id: Any, timeout: float | None
) -> Call[tuple[list[int], int, bytes] | None]:
    """(indexes, columns, table) of a task, or None when the partition is unknown."""
    body = [checked_name("partition_id", partition_id), checked_name("task_name", task_name)]
    return _status(session, Op.CONSUMPTION, body, timeout)


def production(
    session: Session, data_fields: Any, partition_id: Any, timeout: float | None
) -> Call[tuple[list[int], int, bytes] | None]:
    """(indexes, columns, table) of fields, or None when the partition or a field is unknown."""
    names = field_list(data_fields, "get_production_status", "data_fields")
    body = [checked_name("partition_id", partition_id), packed_strings(names or [])]
    return _status(session, Op.PRODUCTION, body, timeout)


def _status(
    session: Session, op: Op, body: list[Any], timeout: float | None
) -> Call[tuple[list[int], int, bytes] | None]:
    def read(reply: Reply) -> tuple[list[int], int, bytes] | None:
        known, indexes, width, table = decode(reply.body)
        return (decode_ints(indexes), width, table or b"") if known else None

    return Call(op, encode(body), read, timeout=seconds(timeout, session.timeout_s))


def progress(
    session: Session, partition_id: Any, task_name: Any, timeout: float | None
) -> Call[tuple[int, int] | None]:
    """How many samples a partition has and how many of them a task has consumed; None for an unknown partition."""

    def read(reply: Reply) -> tuple[int, int] | None:
        known, samples, consumed = decode(reply.body)
        return (samples, consumed) if known else None

    body = encode([checked_name("partition_id", partition_id), checked_name("task_name", task_name)])
    return Call(Op.PROGRESS, body, read, timeout=seconds(timeout, session.timeout_s))


def reset_consumption(session: Session, partition_id: Any, task_name: Any, timeout: float | None) -> Call[None]:
    task = "" if task_name is None else checked_name("task_name", task_name)
    body = encode([checked_name("partition_id", partition_id), task])
    return Call(Op.RESET_CONSUMPTION, body, no_result, timeout=seconds(timeout, session.timeout_s))


def partitions(session: Session, timeout: float | None) -> Call[list[str]]:
    def read(reply: Reply) -> list[str]:
        (names,) = decode(reply.body)
        listed: list[str] = decode(names) if names else []
        return listed

    return Call(Op.PARTITIONS, b"", read, timeout=seconds(timeout, session.timeout_s))


def units(session: Session, timeout: float | None) -> Call[list[list[Any]]]:
    def read(reply: Reply) -> list[list[Any]]:
        return decode(reply.body)[0] or []

    return Call(Op.UNITS, b"", read, timeout=seconds(timeout, session.timeout_s))


def summary(session: Session) -> Call[list[Any]]:
    return Call(Op.STATUS, b"", lambda reply: decode(reply.body), timeout=session.timeout_s)
