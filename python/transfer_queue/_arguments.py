"""The arguments of calls: checked, named when they are wrong, and packed as they cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue import _environment
from transfer_queue._calls import encode, encode_ints
from transfer_queue._environment import MOST_SECONDS
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta


def seconds(timeout: float | None, default: float) -> float:
    """The timeout of a call in seconds."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise WrongTypeError(f"timeout: got {type(timeout).__name__}, want seconds as a number")
    if not timeout >= 0:
        raise InvalidArgumentError(f"timeout {timeout}: want 0 or more seconds")
    return min(float(timeout), MOST_SECONDS)


def fetch_seconds(timeout: float | None) -> float:
    """How long a fetch waits for data."""
    return seconds(timeout, _environment.seconds("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1.0))


def checked_name(what: str, value: Any) -> str:
    """The name of something, once it is known to be text that can be written."""
    if not isinstance(value, str):
        raise WrongTypeError(f"{what}: got {type(value).__name__}, want a str")
    refuse_surrogates(what, [value], "")
    return value


def refuse_surrogates(what: str, names: list[str], op: str) -> None:
    """Raise for a name that is no text that can be written."""
    if "".join(names).isascii():
        return
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{what} {name!r}: {error.reason}", op) from None


def key_list(keys: Any, op: str) -> list[str]:
    """One key or several as a list."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list | tuple):
        raise WrongTypeError(f"keys: got {type(keys).__name__}, want a str or a list of str", op)
    return all_str("keys", list(keys), op)


def all_str(what: str, names: list[Any], op: str) -> list[str]:
    """The names, once all of them are known to be text that can be written."""
    if not set(map(type, names)) <= {str}:
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise WrongTypeError(f"{what}[{i}]: got {type(name).__name__}, want a str", op)
    refuse_surrogates(what, names, op)
    return names


def some_keys(keys: Any, op: str) -> list[str]:
    """At least one key."""
    listed = key_list(keys, op)
    if not listed:
        raise InvalidArgumentError("keys: got an empty list, want at least one key", op)
    return listed


def field_list(fields: Any, op: str, what: str = "fields") -> list[str] | None:
    """One field or several as a list; None stays None."""
    if fields is None:
        return None
    if isinstance(fields, str):
        return [fields]
    if not isinstance(fields, list | tuple | set | frozenset):
        raise WrongTypeError(f"{what}: got {type(fields).__name__}, want a str or a list of str", op)
    return all_str(what, list(fields), op)


def packed_strings(names: Sequence[str] | None) -> bytes | None:
    """Names as they cross."""
    return None if names is None else encode(names)


def batch_meta(metadata: Any, op: str) -> BatchMeta:
    """The metadata of a call, once it is known to be some.

    Raises:
        WrongTypeError: it is something else (a TypeError).
    """
    if not isinstance(metadata, BatchMeta):
        raise WrongTypeError(f"metadata: got {type(metadata).__name__}, want a BatchMeta", op)
    return metadata


def one_partition(metadata: BatchMeta, op: str) -> str:
    """The partition of all the samples: a write is all or nothing within one."""
    if batch_meta(metadata, op).size == 0:
        raise InvalidArgumentError("metadata cannot be empty: got no samples, want at least one", op)
    if not metadata._in_one_partition():
        names = ", ".join(f'"{name}"' for name in sorted(set(metadata.partition_ids)))
        raise InvalidArgumentError(f"metadata: got samples of partitions {names}, want those of one", op)
    return metadata.partition_ids[0]


def packed_samples(metadata: BatchMeta) -> list[bytes]:
    """Indexes and generations as they cross."""
    try:
        indexes = encode_ints(metadata.global_indexes)
    except (TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"metadata: global_indexes are no list of whole numbers: {error}") from None
    return [indexes, metadata._generations.tobytes()]


def kind_of(value: Any) -> str:
    """What a value is, for an error."""
    return f"an empty {type(value).__name__}" if hasattr(value, "__len__") and not len(value) else type(value).__name__
