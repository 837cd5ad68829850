"""The requests that write: puts and updates, by key and by metadata. See ``_requests`` for the form of bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tensordict.base import TensorDictBase

from transfer_queue import _tags, merge
from transfer_queue._arguments import (
    all_str,
    checked_name,
    field_list,
    kind_of,
    one_partition,
    packed_samples,
    packed_strings,
    refuse_surrogates,
    seconds,
    some_keys,
)
from transfer_queue._calls import Call, Reply, decode, encode
from transfer_queue._columns import Packed, pack_row, pack_table
from transfer_queue._field_schema import FieldSchema
from transfer_queue._ops import Op
from transfer_queue._shipping import shipped
from transfer_queue.errors import FailedError, InvalidArgumentError, TransferQueueError, WrongTypeError
from transfer_queue.metadata import BatchMeta, KVBatchMeta

if TYPE_CHECKING:
    from transfer_queue._session import Session


def _put_call(
    session: Session,
    partition: str,
    packed: Packed | None,
    read: Callable[[Reply], Any],
    timeout: float | None,
    op: str,
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
    refuse_surrogates("field", names, op)
    parts = [partition, packed_strings(keys), samples, insert, encode(names), tags, update, native, function, last]
    if dedup or tags:
        parts += [encode(dedup) if dedup else None, True]
    body = encode(parts)
    call = Call(Op.PUT, body, read, timeout=seconds(timeout, session.timeout_s), name=op)
    if packed:
        call.columns, call.n_columns, call.rows, call.keep = packed.address, len(packed), packed.rows, packed
    return call


def _result(reply: Reply) -> list[Any]:
    result: list[Any] = decode(reply.body)[2]
    return result


def _kv_result(keys: list[str], partition: str, sent: bytes | None = None) -> Callable[[Reply], KVBatchMeta]:
    def read(reply: Reply) -> KVBatchMeta:
        _, _, fields, tags, _, *as_sent = _result(reply)
        if as_sent[:1] == [True]:
            tags = sent
        return KVBatchMeta._with_packed_tags(keys, tags, partition, decode(fields) if fields else [])

    return read


def _packed(pack: Callable[[Any], Packed], fields: Any, op: str) -> Packed:
    """The fields as they cross; what cannot is told with the name of the call."""
    try:
        return pack(fields)
    except TransferQueueError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(str(error), op) from None


def kv_put(
    session: Session, key: Any, partition_id: Any, fields: Any, tag: Any, data_parser: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_put"
    if fields is None and tag is None:
        raise InvalidArgumentError("give fields, a tag, or both", op)
    keys = [checked_name("key", key)]
    packed = None
    if isinstance(fields, TensorDictBase):
        packed = _packed(pack_table, fields, "kv_put")
        if packed.rows != 1:
            raise InvalidArgumentError(f"fields: got {packed.rows} rows, want 1 for one key", op)
    elif isinstance(fields, dict):
        packed = _packed(pack_row, fields, "kv_put")
    elif fields is not None:
        raise InvalidArgumentError(f"fields: got {type(fields).__name__}, want a dict or a TensorDict", op)
    packed_tags = None if tag is None else _tags.encode([tag], op)
    return _put_call(
        session,
        checked_name("partition_id", partition_id),
        packed,
        _kv_result(keys, partition_id, packed_tags),
        timeout,
        op,
        keys=keys,
        tags=packed_tags,
        function=_parser(data_parser, op) if packed else None,
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
    listed = list(some_keys(keys, op))
    packed = None
    if fields is not None:
        packed = _table(fields, len(listed), op)
    tags = _tags.listed(tags, op)
    if tags is not None and len(tags) != len(listed):
        raise InvalidArgumentError(f"tags: got {len(tags)}, want one for each of {len(listed)} keys", op)
    packed_tags = _tags.encode(tags, op)
    return _put_call(
        session,
        checked_name("partition_id", partition_id),
        packed,
        _kv_result(listed, partition_id, packed_tags),
        timeout,
        op,
        keys=listed,
        tags=packed_tags,
        function=_parser(data_parser, op) if packed else None,
        dedup=_stored_once(dedup, packed, op),
    )


def _stored_once(dedup: Any, packed: Packed | None, op: str) -> list[str] | None:
    fields = field_list(dedup, op, "dedup")
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
    return _packed(pack_table, fields, op)


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
        raise WrongTypeError(f"fields: got {kind_of(fields)}, want a dict with at least one field", op)
    all_str("field names", list(fields), op)
    packed = _packed(pack_row, fields, op)
    return _update(session, [checked_name("key", key)], partition_id, packed, merge_fn, timeout, op)


def kv_batch_update(
    session: Session, keys: Any, partition_id: Any, fields: Any, merge_fn: Any, timeout: float | None
) -> Call[KVBatchMeta]:
    op = "kv_batch_update"
    if not isinstance(keys, list) or not keys:
        raise WrongTypeError(f"keys: got {kind_of(keys)}, want a list with at least one key", op)
    all_str("keys", keys, op)
    if not isinstance(fields, TensorDictBase) or len(fields.keys()) == 0:
        raise WrongTypeError(f"fields: got {kind_of(fields)}, want a TensorDict with at least one field", op)
    packed = _table(fields, len(keys), op)
    return _update(session, list(keys), partition_id, packed, merge_fn, timeout, op)


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
        checked_name("partition_id", partition_id),
        packed,
        _kv_result(keys, partition_id),
        timeout,
        op,
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
    packed = _packed(pack_table, data, op)
    function = _parser(data_parser, op)
    more = _row_tags(custom_meta, packed.rows, op)
    if metadata is None:
        if partition_id is None:
            raise InvalidArgumentError("partition_id must be provided if there is no metadata", op)
        return _insert(
            session, packed, checked_name("partition_id", partition_id), function, timeout, more, bool(is_last)
        )
    partition = one_partition(metadata, op)
    if metadata.size != packed.rows:
        wrong = f"length mismatch: got {packed.rows} rows, want {metadata.size} as in the metadata"
        raise InvalidArgumentError(f"data: {wrong}", op)
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
        op,
        samples=packed_samples(metadata),
        tags=_tags.encode(tags, op) if tags and any(tags) else None,
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

    encoded = _tags.encode(tags, "put") if tags and any(tags) else None
    return _put_call(
        session, partition, packed, read, timeout, "put", insert=packed.rows, tags=encoded, function=function, last=last
    )


def update(session: Session, metadata: BatchMeta, values: Any, merge_fn: Any, timeout: float | None) -> Call[BatchMeta]:
    op = "update"
    partition = one_partition(metadata, op)
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
        op,
        samples=packed_samples(metadata),
        update=True,
        native=native,
        function=function,
    )
