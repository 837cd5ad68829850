"""The requests of the queue: what each sends, and how its answer is read. Sync and async calls share them.

Bodies are arrays in the order of the structs of core/wire/messages.go. A list of strings or dicts crosses as bytes that
hold one msgpack array, a list of integers as little-endian int64.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from transfer_queue import _environment, _lib, _results, merge, sampler
from transfer_queue._calls import Call, Reply, decode, decode_ints, encode, encode_ints, no_result
from transfer_queue._columns import Packed, pack_row, pack_table
from transfer_queue._field_schema import FieldSchema
from transfer_queue._ops import Op
from transfer_queue._shipping import shipped
from transfer_queue.errors import FailedError, InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta, KVBatchMeta

if TYPE_CHECKING:
    from transfer_queue._session import Session

_INLINE_BYTES = 64 << 10  # a get of at most so many bytes brings them in its reply
_VIEWS, _DENSE = 1, 2
_LAYOUTS = ("jagged", "dense")


# ---- arguments ------------------------------------------------------------------------------------------------------


def seconds(timeout: float | None, default: float) -> float:
    """The timeout of a call in seconds."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise WrongTypeError(f"timeout: got {type(timeout).__name__}, want seconds as a number")
    if not timeout >= 0:
        raise InvalidArgumentError(f"timeout {timeout}: want 0 or more seconds")
    return min(float(timeout), 1e9)


def fetch_seconds(timeout: float | None) -> float:
    """How long a fetch waits for data."""
    return seconds(timeout, _environment.seconds("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1.0))


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise WrongTypeError(f"{what}: got {type(value).__name__}, want a str")
    _refuse_surrogates(what, [value], "")
    return value


def _refuse_surrogates(what: str, names: list[str], op: str) -> None:
    """Raise for a name that is no text that can be written."""
    if "".join(names).isascii():
        return
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{what} {name!r}: {error.reason}", op) from None


def _key_list(keys: Any, op: str) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list | tuple):
        raise WrongTypeError(f"keys: got {type(keys).__name__}, want a str or a list of str", op)
    return _all_str("keys", list(keys), op)


def _all_str(what: str, names: list[Any], op: str) -> list[str]:
    if not set(map(type, names)) <= {str}:
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise WrongTypeError(f"{what}[{i}]: got {type(name).__name__}, want a str", op)
    _refuse_surrogates(what, names, op)
    return names


def _some_keys(keys: Any, op: str) -> list[str]:
    listed = _key_list(keys, op)
    if not listed:
        raise InvalidArgumentError("keys: got an empty list, want at least one key", op)
    return listed


def _field_list(fields: Any, op: str, what: str = "fields") -> list[str] | None:
    if fields is None:
        return None
    if isinstance(fields, str):
        return [fields]
    if not isinstance(fields, list | tuple | set | frozenset):
        raise WrongTypeError(f"{what}: got {type(fields).__name__}, want a str or a list of str", op)
    return _all_str(what, list(fields), op)


def _strings(names: Sequence[str] | None) -> bytes | None:
    return None if names is None else encode(names)


def batch_meta(metadata: Any, op: str) -> BatchMeta:
    """The metadata of a call, once it is known to be some.

    Raises:
        WrongTypeError: it is something else (a TypeError).
    """
    if not isinstance(metadata, BatchMeta):
        raise WrongTypeError(f"metadata: got {type(metadata).__name__}, want a BatchMeta", op)
    return metadata


def _one_partition(metadata: BatchMeta, op: str) -> str:
    """The partition of all the samples: a write is all or nothing within one."""
    if batch_meta(metadata, op).size == 0:
        raise InvalidArgumentError("metadata cannot be empty: got no samples, want at least one", op)
    if not metadata._in_one_partition():
        names = ", ".join(f'"{name}"' for name in sorted(set(metadata.partition_ids)))
        raise InvalidArgumentError(f"metadata: got samples of partitions {names}, want those of one", op)
    return metadata.partition_ids[0]


def _samples(metadata: BatchMeta) -> list[bytes]:
    return [encode_ints(metadata.global_indexes), metadata._generations.tobytes()]


# ---- tags -----------------------------------------------------------------------------------------------------------

# A number of numpy or torch is pickled behind its value as a float64, which samplers of the core read.
_PICKLED, _NUMBER = 1, 2
_FLOAT = struct.Struct(">d")


def _pickled(value: Any) -> msgspec.msgpack.Ext:
    packed = cloudpickle.dumps(value)
    if isinstance(value, np.number) or (isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex()):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return msgspec.msgpack.Ext(_NUMBER, _FLOAT.pack(float(value)) + packed)
    return msgspec.msgpack.Ext(_PICKLED, packed)


def _unpickled(code: int, data: memoryview) -> Any:
    if code == _NUMBER:
        return pickle.loads(data[_FLOAT.size :])
    return pickle.loads(data) if code == _PICKLED else msgspec.msgpack.Ext(code, bytes(data))


_tag_encoder = msgspec.msgpack.Encoder(enc_hook=_pickled)
_tag_decoder = msgspec.msgpack.Decoder(ext_hook=_unpickled)


def _encode_tags(tags: Sequence[Mapping[Any, Any]] | None, op: str) -> bytes | None:
    if tags is None:
        return None
    if set(map(type, tags)) != {dict}:
        for i, tag in enumerate(tags):
            if not isinstance(tag, Mapping):
                raise WrongTypeError(f"tags[{i}]: got {type(tag).__name__}, want a dict", op)
    try:
        return _tag_encoder.encode(tags)
    except (OverflowError, TypeError, ValueError, RecursionError):
        return _tag_encoder.encode([{key: _safe(value) for key, value in tag.items()} for tag in tags])


def _safe(value: Any) -> Any:
    try:
        _tag_encoder.encode(value)
    except (OverflowError, TypeError, ValueError, RecursionError):
        return _pickled(value)
    return value


def _decode_tags(raw: bytes | None, count: int) -> list[dict[str, Any]]:
    if raw is None:
        return [{} for _ in range(count)]
    tags: list[dict[str, Any]] = _tag_decoder.decode(raw)
    return tags if None not in tags else [tag or {} for tag in tags]


# ---- put and update -------------------------------------------------------------------------------------------------


def _put_call(
    session: Session,
    partition: str,
    packed: Packed | None,
    read: Callable[[Reply], Any],
    timeout: float | None,
    *,
    keys: list[str] | None = None,
    samples: list[bytes] | None = None,
    insert: int = 0,
    tags: bytes | None = None,
    update: bool = False,
    native: str = "",
    function: bytes | None = None,
    last: bool = False,
    dedup: list[str] | None = None,
) -> Call[Any]:
    names = packed.names if packed else []
    _refuse_surrogates("field", names, "")
    parts = [partition, _strings(keys), samples, insert, encode(names), tags, update, native, function, last]
    if dedup:
        parts.append(encode(dedup))
    body = encode(parts)
    call = Call(Op.PUT, body, read, timeout=seconds(timeout, session.timeout_s))
    if packed:
        call.columns, call.n_columns, call.rows, call.keep = packed.address, len(packed), packed.rows, packed
    return call


def _result(reply: Reply) -> list[Any]:
    result: list[Any] = decode(reply.body)[2]
    return result


def _kv_result(keys: list[str], partition: str) -> Callable[[Reply], KVBatchMeta]:
    def read(reply: Reply) -> KVBatchMeta:
        _, _, fields, tags, *_ = _result(reply)
        return KVBatchMeta._from_parts(
            keys, _decode_tags(tags, len(keys)), partition, decode(fields) if fields else [], {}
        )

    return read


def kv_put(
    session: Session, key: Any, partition_id: Any, fields: Any, tag: Any, data_parser: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    if fields is None and tag is None:
        raise InvalidArgumentError("give fields, a tag, or both", "kv_put")
    keys = [_name("key", key)]
    packed = None
    if isinstance(fields, TensorDictBase):
        packed = pack_table(fields)
        if packed.rows != 1:
            raise InvalidArgumentError(f"fields: got {packed.rows} rows, want 1 for one key", "kv_put")
    elif isinstance(fields, dict):
        packed = pack_row(fields)
    elif fields is not None:
        raise InvalidArgumentError(f"fields: got {type(fields).__name__}, want a dict or a TensorDict", "kv_put")
    return _put_call(
        session,
        _name("partition_id", partition_id),
        packed,
        _kv_result(keys, partition_id),
        timeout,
        keys=keys,
        tags=None if tag is None else _encode_tags([tag], "kv_put"),
        function=_parser(data_parser, "kv_put") if packed else None,
    )


def kv_batch_put(
    session: Session,
    keys: Any,
    partition_id: Any,
    fields: Any,
    tags: Any,
    data_parser: Any,
    timeout: float | None,
    dedup: Any = None,
) -> Call[KVBatchMeta]:
    op = "kv_batch_put"
    if fields is None and tags is None:
        raise InvalidArgumentError("give fields, tags, or both", op)
    listed = list(_some_keys(keys, op))
    packed = None
    if fields is not None:
        packed = _table(fields, len(listed), op)
    if tags is not None and len(tags) != len(listed):
        raise InvalidArgumentError(f"tags: got {len(tags)}, want one for each of {len(listed)} keys", op)
    return _put_call(
        session,
        _name("partition_id", partition_id),
        packed,
        _kv_result(listed, partition_id),
        timeout,
        keys=listed,
        tags=_encode_tags(tags, op),
        function=_parser(data_parser, op) if packed else None,
        dedup=_stored_once(dedup, packed, op),
    )


def _stored_once(dedup: Any, packed: Packed | None, op: str) -> list[str] | None:
    fields = _field_list(dedup, op, "dedup")
    names = packed.names if packed else []
    for field in fields or ():
        if field not in names:
            raise InvalidArgumentError(f'dedup: field "{field}" is not among those that are put: {names}', op)
    return fields


def _table(fields: Any, rows: int, op: str) -> Packed:
    if not isinstance(fields, TensorDictBase):
        raise InvalidArgumentError(f"fields: got {type(fields).__name__}, want a TensorDict", op)
    if not fields.batch_size or fields.batch_size[0] != rows:
        raise InvalidArgumentError(
            f"fields: got batch_size {list(fields.batch_size)}, want [{rows}] for {rows} keys", op
        )
    return pack_table(fields)


def _parser(data_parser: Any, op: str) -> bytes | None:
    if data_parser is None:
        return None
    if not callable(data_parser):
        raise FailedError(f"data_parser must be callable, got {type(data_parser).__name__}", op)
    return shipped(data_parser, "data_parser", op)


def kv_update(
    session: Session, key: Any, partition_id: Any, fields: Any, merge_fn: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_update"
    if not isinstance(fields, dict) or not fields:
        raise WrongTypeError(f"fields: got {_described(fields)}, want a dict with at least one field", op)
    _all_str("field names", list(fields), op)
    packed = pack_row(fields)
    return _update(session, [_name("key", key)], partition_id, packed, merge_fn, timeout, op)


def kv_batch_update(
    session: Session, keys: Any, partition_id: Any, fields: Any, merge_fn: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_batch_update"
    if not isinstance(keys, list) or not keys:
        raise WrongTypeError(f"keys: got {_described(keys)}, want a list with at least one key", op)
    _all_str("keys", keys, op)
    if not isinstance(fields, TensorDictBase) or len(fields.keys()) == 0:
        raise WrongTypeError(f"fields: got {_described(fields)}, want a TensorDict with at least one field", op)
    packed = _table(fields, len(keys), op)
    return _update(session, list(keys), partition_id, packed, merge_fn, timeout, op)


def _described(value: Any) -> str:
    return f"an empty {type(value).__name__}" if hasattr(value, "__len__") and not len(value) else type(value).__name__


def _update(
    session: Session,
    keys: list[str],
    partition_id: Any,
    packed: Packed,
    merge_fn: Any,
    timeout: float | None,
    op: str,
) -> Call[KVBatchMeta]:
    native, function = _merge(merge_fn, op)
    return _put_call(
        session,
        _name("partition_id", partition_id),
        packed,
        _kv_result(keys, partition_id),
        timeout,
        keys=keys,
        update=True,
        native=native,
        function=function,
    )


def _merge(merge_fn: Any, op: str) -> tuple[str, bytes | None]:
    if isinstance(merge_fn, merge.NativeMerge):
        return merge_fn.name, None
    if isinstance(merge_fn, str):
        if merge_fn not in merge.NAMES:
            raise InvalidArgumentError(f"merge_fn {merge_fn!r}: want one of {sorted(merge.NAMES)} or a callable", op)
        return merge_fn, None
    if not callable(merge_fn):
        raise WrongTypeError(f"merge_fn: got {type(merge_fn).__name__}, want a callable or the name of a merge", op)
    return "", shipped(merge_fn, "merge_fn", op)


def put(
    session: Session,
    data: Any,
    metadata: BatchMeta | None,
    partition_id: Any,
    data_parser: Any,
    timeout: float | None,
    custom_meta: Any = None,
    is_last: bool = False,
) -> Call[BatchMeta]:
    op = "put"
    if not isinstance(data, TensorDictBase):
        raise InvalidArgumentError(f"data: got {type(data).__name__}, want a TensorDict", op)
    packed = pack_table(data)
    function = _parser(data_parser, op)
    more = _row_tags(custom_meta, packed.rows, op)
    if metadata is None:
        if partition_id is None:
            raise InvalidArgumentError("partition_id must be provided if there is no metadata", op)
        return _insert(session, packed, _name("partition_id", partition_id), function, timeout, more, bool(is_last))
    partition = _one_partition(metadata, op)
    if metadata.size != packed.rows:
        raise InvalidArgumentError(f"data: got {packed.rows} rows, want {metadata.size} as in the metadata", op)
    schemas = packed.schemas()

    def read(reply: Reply) -> BatchMeta:
        columns = _result(reply)[4]
        if more is not None:
            metadata.update_custom_meta(tags)
        return metadata._apply_columns([FieldSchema.from_wire(c) for c in columns] if columns else schemas)

    tags = metadata._tags
    if more is not None:
        tags = [{**(tags[row] if tags else {}), **tag} for row, tag in enumerate(more)]
    return _put_call(
        session,
        partition,
        packed,
        read,
        timeout,
        samples=_samples(metadata),
        tags=_encode_tags(tags, op) if tags and any(tags) else None,
        function=function,
        last=bool(is_last),
    )


def _row_tags(custom_meta: Any, rows: int, op: str) -> list[Any] | None:
    if custom_meta is None:
        return None
    if not isinstance(custom_meta, list | tuple):
        raise WrongTypeError(f"custom_meta: got {type(custom_meta).__name__}, want a list of one dict per row", op)
    if len(custom_meta) != rows:
        raise InvalidArgumentError(f"custom_meta: got {len(custom_meta)} dicts, want one for each of {rows} rows", op)
    for row, tag in enumerate(custom_meta):
        if not isinstance(tag, Mapping):
            raise WrongTypeError(f"custom_meta[{row}]: got {type(tag).__name__}, want a dict", op)
    return list(custom_meta)


def _insert(
    session: Session,
    packed: Packed,
    partition: str,
    function: bytes | None,
    timeout: float | None,
    tags: list[Any] | None,
    last: bool,
) -> Call[BatchMeta]:
    if packed.rows == 0:
        raise InvalidArgumentError("data: got no rows, want at least one", "put")
    schemas = packed.schemas()

    def read(reply: Reply) -> BatchMeta:
        indexes, generations, _, _, columns, *_ = _result(reply)
        described = [FieldSchema.from_wire(c) for c in columns] if columns else schemas
        stored = None if tags is None else [dict(tag) for tag in tags]
        return BatchMeta._from_reply(indexes, generations, partition, described, None, stored)

    encoded = _encode_tags(tags, "put") if tags and any(tags) else None
    return _put_call(
        session, partition, packed, read, timeout, insert=packed.rows, tags=encoded, function=function, last=last
    )


def update(session: Session, metadata: BatchMeta, values: Any, merge_fn: Any, timeout: float | None) -> Call[BatchMeta]:
    op = "update"
    partition = _one_partition(metadata, op)
    packed = _table(values, metadata.size, op)
    native, function = _merge(merge_fn, op)

    def read(reply: Reply) -> BatchMeta:
        return metadata._apply_columns([FieldSchema.from_wire(c) for c in _result(reply)[4]])

    return _put_call(
        session,
        partition,
        packed,
        read,
        timeout,
        samples=_samples(metadata),
        update=True,
        native=native,
        function=function,
    )


# ---- get ------------------------------------------------------------------------------------------------------------


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
) -> Call[TensorDict]:
    layout = session.layout if layout is None else layout
    if layout not in _LAYOUTS:
        raise InvalidArgumentError(f"layout {layout!r}: want one of {list(_LAYOUTS)}", "get")
    body = encode(
        [partition, _strings(keys), samples, _strings(fields), strict, not copy, _INLINE_BYTES if copy else -1]
    )
    flags = (0 if copy else _VIEWS) | (_DENSE if layout == "dense" else 0)
    return Call(Op.GET, body, _read_table, flags=flags, timeout=seconds(timeout, session.timeout_s))


def kv_batch_get(
    session: Session,
    keys: Any,
    partition_id: Any,
    select_fields: Any,
    strict: bool,
    layout: str | None,
    copy: bool,
    timeout: float | None,
) -> Call[TensorDict]:
    op = "kv_batch_get"
    listed = _some_keys(keys, op)
    fields = _field_list(select_fields, op, "select_fields")
    partition = _name("partition_id", partition_id)
    return _get_call(session, partition, listed, None, fields, timeout, strict=strict, layout=layout, copy=copy)


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
    wanted = _field_list(select_fields, op, "select_fields")
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
        session, partition, None, _samples(metadata), metadata.field_names, timeout, layout=layout, copy=copy
    )


# ---- clear, list, wait, watch ---------------------------------------------------------------------------------------


def kv_clear(session: Session, keys: Any, partition_id: Any, fields: Any, timeout: float | None) -> Call[None]:
    op = "kv_clear"
    names = _field_list(fields, op)
    listed = _some_keys(keys, op) if names is None else _key_list(keys, op)
    body = encode([_name("partition_id", partition_id), _strings(listed), None, _strings(names)])
    return Call(Op.CLEAR, body, no_result, timeout=seconds(timeout, session.timeout_s))


def clear_samples(session: Session, metadata: BatchMeta, fields: Any, timeout: float | None) -> Call[None]:
    body = encode([metadata.partition_ids[0], None, _samples(metadata), _strings(_field_list(fields, "clear_samples"))])
    return Call(Op.CLEAR, body, no_result, timeout=seconds(timeout, session.timeout_s))


def clear_partition(session: Session, partition_id: Any, timeout: float | None) -> Call[None]:
    body = encode([_name("partition_id", partition_id)])
    return Call(Op.CLEAR_PARTITION, body, no_result, timeout=seconds(timeout, session.timeout_s))


def _tag_filter(tags: Any, op: str) -> bytes | None:
    if tags is None:
        return None
    if not isinstance(tags, Mapping):
        raise WrongTypeError(f"tags: got {type(tags).__name__}, want a dict", op)
    encoded = _encode_tags([dict(tags)], op)
    return None if encoded is None else encoded[1:]  # the one element of a list, behind its header


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
            None if partition_id is None else _name("partition_id", partition_id),
            None if keys is None else encode(_key_list(keys, op)),
            "" if prefix is None else _name("prefix", prefix),
            _tag_filter(tags, op),
            _strings(_field_list(with_fields, op, "with_fields")),
        ]
    )

    def read(reply: Reply) -> dict[str, dict[str, dict[str, Any]]]:
        listed = {}
        for name, raw_keys, raw_tags in decode(reply.body)[0] or []:
            names = decode(raw_keys) if raw_keys else []
            listed[name] = dict(zip(names, _decode_tags(raw_tags, len(names)), strict=True))
        return listed

    return Call(Op.LIST, body, read, timeout=seconds(timeout, session.timeout_s))


def kv_wait(
    session: Session, partition_id: Any, keys: Any, fields: Any, count: Any, tags: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_wait"
    partition = _name("partition_id", partition_id)
    listed = None if keys is None else _some_keys(keys, op)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise WrongTypeError(f"count: got {type(count).__name__}, want an int", op)
    if listed is None and (count is None or count < 1):
        raise InvalidArgumentError(f"count {count}: give keys, or a count of at least 1", op)
    names = _strings(_field_list(fields, op))
    body = encode([partition, _strings(listed), names, count or 0, _tag_filter(tags, op)])

    def read(reply: Reply) -> KVBatchMeta:
        raw_keys, raw_tags, raw_fields = decode(reply.body)
        met = decode(raw_keys) if raw_keys else []
        held = decode(raw_fields) if raw_fields else []
        return KVBatchMeta._from_parts(met, _decode_tags(raw_tags, len(met)), partition, held, {})

    return Call(Op.WAIT, body, read, timeout=seconds(timeout, session.timeout_s))


def watch_open(session: Session, partition_id: Any) -> Call[int]:
    body = encode([_name("partition_id", partition_id)])
    return Call(Op.WATCH_OPEN, body, lambda reply: decode(reply.body)[0], timeout=session.timeout_s)


def watch_next(watch: int, timeout: float) -> Call[list[tuple[str, str, list[str] | None, dict[str, Any] | None]]]:
    def read(reply: Reply) -> list[Any]:
        return [
            (kind, key, decode(fields) if fields else None, _tag_decoder.decode(tags) if tags else None)
            for kind, key, fields, tags in decode(reply.body)[0] or []
        ]

    return Call(Op.WATCH_NEXT, encode([watch]), read, timeout=timeout)


def watch_close(session: Session, watch: int) -> Call[None]:
    return Call(Op.WATCH_CLOSE, encode([watch]), no_result, timeout=session.timeout_s)


# ---- metadata -------------------------------------------------------------------------------------------------------


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
            indexes, generations, partition, described, status, _decode_tags(tags, count) if tags else None
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
    fields = _field_list(data_fields, op, "data_fields")
    if token_budget is not None:
        sampling_config, batch_size = {**(sampling_config or {}), "token_budget": token_budget}, batch_size or 1
    if mode not in ("insert", "fetch", "force_fetch"):
        raise InvalidArgumentError(f"mode {mode!r}: want 'insert', 'fetch' or 'force_fetch'", op)
    if mode != "force_fetch" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise InvalidArgumentError(f"batch_size {batch_size!r}: want a whole number of at least 1", op)
    if mode == "fetch" and not isinstance(task_name, str):
        raise InvalidArgumentError(f"task_name {task_name!r}: want the name of the consuming task", op)
    partition = _name("partition_id", partition_id)
    if isinstance(task_name, str):
        _refuse_surrogates("task_name", [task_name], op)
    size = batch_size if mode != "force_fetch" else 0
    sampling = _sampling(sampling_config, op)
    body = encode([partition, mode, _strings(fields or []), size, task_name or "", sampling])
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
    return _tag_encoder.encode(plain)


def decode_sampling(raw: bytes | None) -> dict[str, Any]:
    """The arguments of the sampler; tuples come as lists, but for the batch number, which must stay hashable."""
    decoded: dict[str, Any] = _tag_decoder.decode(raw) if raw else {}
    if isinstance(decoded.get("batch_index"), list):
        decoded["batch_index"] = tuple(decoded["batch_index"])
    return decoded


def tags_by_index(reply: Reply) -> dict[int, dict[str, Any]]:
    """The tags of all samples of a metadata reply."""
    indexes, _, _, _, tags, *_ = decode(reply.body)
    listed = decode_ints(indexes)
    return dict(zip(listed, _decode_tags(tags, len(listed)), strict=True))


def register_sampler(session: Session, sampler_or_class: Any, timeout: float | None) -> Call[None]:
    """Replace the sampler of the session by a sampler, its class, or the sampler of that name."""
    op = "register_sampler"
    described = sampler.describe(sampler.resolve(sampler_or_class), op)
    body = encode([described["name"], described["group"], described["ranks"], described["pickled"]])
    return Call(Op.REGISTER_SAMPLER, body, no_result, timeout=seconds(timeout, session.timeout_s))


def stream(session: Session, partition_id: Any, task_name: Any, timeout: float | None) -> Call[tuple[bool, bool]]:
    """Whether production is complete, and whether the task has consumed everything then."""

    def read(reply: Reply) -> tuple[bool, bool]:
        completed, drained, *_ = decode(reply.body)
        return completed, drained

    task = "" if task_name is None else _name("task_name", task_name)
    body = encode([_name("partition_id", partition_id), task])
    return Call(Op.STREAM, body, read, timeout=seconds(timeout, session.timeout_s))


def kv_retrieve_meta(
    session: Session, keys: Any, partition_id: Any, create: bool, timeout: float | None
) -> Call[BatchMeta]:
    listed = _some_keys(keys, "kv_retrieve_meta")
    partition = _name("partition_id", partition_id)
    body = encode([partition, _strings(listed), bool(create)])
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
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
        raise WrongTypeError(f"global_indexes: got {type(global_indexes).__name__}, want an int or a list of int", op)
    if not listed:
        raise InvalidArgumentError("global_indexes: got an empty list, want at least one", op)
    for index in listed:
        if index.bit_length() > 63:
            raise InvalidArgumentError(f"global_indexes: {index} does not fit into 64 bits", op)

    body = encode([_name("partition_id", partition_id), encode_ints(listed)])
    return Call(Op.RETRIEVE_KEYS, body, keys_or_none, timeout=seconds(timeout, session.timeout_s))


def set_custom_meta(session: Session, metadata: BatchMeta, timeout: float | None) -> Call[None]:
    tags = _encode_tags(metadata.custom_meta, "set_custom_meta")
    body = encode([metadata.partition_ids[0], _samples(metadata), tags])
    return Call(Op.SET_TAGS, body, no_result, timeout=seconds(timeout, session.timeout_s))


# ---- status ---------------------------------------------------------------------------------------------------------


def consumption(
    session: Session, task_name: Any, partition_id: Any, timeout: float | None
) -> Call[tuple[list[int], int, bytes] | None]:
    """(indexes, columns, table) of a task, or None when the partition is unknown."""
    body = [_name("partition_id", partition_id), _name("task_name", task_name)]
    return _status(session, Op.CONSUMPTION, body, timeout)


def production(
    session: Session, data_fields: Any, partition_id: Any, timeout: float | None
) -> Call[tuple[list[int], int, bytes] | None]:
    """(indexes, columns, table) of fields, or None when the partition or a field is unknown."""
    names = _field_list(data_fields, "get_production_status", "data_fields")
    body = [_name("partition_id", partition_id), _strings(names or [])]
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

    body = encode([_name("partition_id", partition_id), _name("task_name", task_name)])
    return Call(Op.PROGRESS, body, read, timeout=seconds(timeout, session.timeout_s))


def reset_consumption(session: Session, partition_id: Any, task_name: Any, timeout: float | None) -> Call[None]:
    task = "" if task_name is None else _name("task_name", task_name)
    body = encode([_name("partition_id", partition_id), task])
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
