"""The requests of checkpoints and dumps, with the bodies of core/wire/checkpoint.go."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from transfer_queue._arguments import checked_name, seconds, some_keys
from transfer_queue._calls import Call, Reply, decode, decode_ints, encode, no_result
from transfer_queue._ops import Op
from transfer_queue.errors import InvalidArgumentError, WrongTypeError

_DEFAULT_S = 3600.0  # a slow disk may take long; what is given up too early is lost work


class Parts(NamedTuple):
    """Where the two parts of a save go."""

    state: str
    values: str


def new_number() -> int:
    """A number for a save, by which it can be given up whether its begin was heard back from or not."""
    return secrets.randbits(63) | 1


def absolute(path: Any, op: str) -> str:
    """The path as the owner of the session, who may be in another folder, must name it."""
    try:
        text = os.fspath(path)
    except TypeError:
        raise WrongTypeError(f"path: got {type(path).__name__}, want a str or a path", op) from None
    if not isinstance(text, str):
        raise WrongTypeError(f"path: got {type(text).__name__}, want a str or a path", op)
    if not text or "\0" in text:
        raise InvalidArgumentError(f"path {text!r} names no folder", op)
    return os.path.abspath(text)


def _limit(timeout: float | None) -> float:
    return seconds(timeout, _DEFAULT_S)


def save_begin(number: int, path: str, metadata: str, timeout: float | None) -> Call[Parts]:
    def read(reply: Reply) -> Parts:
        state, values, *_ = decode(reply.body)
        return Parts(state, values)

    return Call(Op.SAVE_CHECKPOINT, encode(["begin", path, number, metadata]), read, timeout=_limit(timeout))


def save_part(step: str, path: Any, op: str, timeout: float | None) -> Call[None]:
    body = encode([step, absolute(path, op), 0, ""])
    return Call(Op.SAVE_CHECKPOINT, body, no_result, timeout=_limit(timeout))


def save_commit(number: int, timeout: float | None) -> Call[None]:
    return Call(Op.SAVE_CHECKPOINT, encode(["commit", "", number, ""]), no_result, timeout=_limit(timeout))


def save_abort(number: int, timeout: float) -> Call[None]:
    return Call(Op.SAVE_CHECKPOINT, encode(["abort", "", number, ""]), no_result, timeout=timeout)


def load(step: str, path: Any, op: str, timeout: float | None) -> Call[None]:
    return Call(Op.LOAD_CHECKPOINT, encode([step, absolute(path, op)]), no_result, timeout=_limit(timeout), name=op)


def dump(path: Any, keys: Any, partition_id: Any, timeout: float | None) -> Call[dict[str, Any]]:
    op = "dump_data_by_key"
    listed = list(dict.fromkeys(some_keys(keys, op)))

    def read(reply: Reply) -> dict[str, Any]:
        rows, files, size, *_ = decode(reply.body)
        return {"keys": listed, "rows_with_data": rows, "shards": files, "bytes": size}

    body = encode([absolute(path, op), checked_name("partition_id", partition_id), encode(listed)])
    return Call(Op.DUMP_ROWS, body, read, timeout=_limit(timeout))


def _rows(path: Any, op: str, index: bool, read: Callable[[Reply], Any], timeout: float | None) -> Call[Any]:
    return Call(Op.LOAD_ROWS, encode([absolute(path, op), index]), read, timeout=_limit(timeout))


def _opaque(code: int, data: memoryview) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, bytes(data))


_tags = msgspec.msgpack.Decoder(ext_hook=_opaque)


def load_rows(path: Any, timeout: float | None) -> Call[dict[str, dict[str, Any]]]:
    def read(reply: Reply) -> dict[str, dict[str, Any]]:
        _, keys, tags, *_ = decode(reply.body)
        return {key: tag or {} for key, tag in zip(decode(keys), _tags.decode(tags), strict=True)}

    return _rows(path, "load_data_by_key", False, read, timeout)


def row_index(path: Any, timeout: float | None) -> Call[dict[str, dict[str, Any]]]:
    def read(reply: Reply) -> dict[str, dict[str, Any]]:
        partition, keys, tags, indexes, sets, set_of, *_ = decode(reply.body)
        fields = [decode(names) if names else [] for names in sets or []]
        rows = zip(decode(keys), _tags.decode(tags), decode_ints(indexes), decode_ints(set_of), strict=True)
        return {
            key: {"partition_id": partition, "global_index": i, "fields": list(fields[n]), "tag": tag or {}}
            for key, tag, i, n in rows
        }

    return _rows(path, "read_row_index", True, read, timeout)
