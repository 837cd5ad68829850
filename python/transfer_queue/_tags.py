"""Tags as they cross: a msgpack array with a map per sample.

What msgpack does not have is pickled where it stands. A number of numpy or torch is pickled behind its value as a
float64, which samplers of the core read.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import torch

from transfer_queue.errors import InvalidArgumentError, WrongTypeError

__all__ = ["decode", "decode_one", "encode", "encode_filter", "encode_map", "listed"]

_PICKLED, _NUMBER = 1, 2
_FLOAT = struct.Struct(">d")

_log = logging.getLogger(__name__)
_MOST_TOLD = 100
_told: set[str] = set()


def _pickled(value: Any) -> msgspec.msgpack.Ext:
    packed = cloudpickle.dumps(value)
    if isinstance(value, np.number) or (isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex()):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return msgspec.msgpack.Ext(_NUMBER, _FLOAT.pack(float(value)) + packed)
    return msgspec.msgpack.Ext(_PICKLED, packed)


def _unpickled(code: int, data: memoryview) -> Any:
    """The value, or what it is packed as when it cannot be made here.

    One value of one sample must not keep a reader from all the others, least of all after a fetch, which has consumed
    them. Written back, what it is packed as is the same value.
    """
    packed = data[_FLOAT.size :] if code == _NUMBER else data
    if code in (_NUMBER, _PICKLED):
        try:
            return pickle.loads(packed)
        except MemoryError:
            raise
        except Exception as error:  # whatever a __setstate__ of the user raises
            _tell(f"{type(error).__name__}: {error}")
    return msgspec.msgpack.Ext(code, bytes(data))


def _tell(reason: str) -> None:
    if reason not in _told and len(_told) < _MOST_TOLD:
        _told.add(reason)
        _log.warning("a value of a tag cannot be read here, it comes as a msgspec.msgpack.Ext: %s", reason)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pickled)
_decoder = msgspec.msgpack.Decoder(ext_hook=_unpickled)


def listed(tags: Any, op: str, what: str = "tags") -> list[Any] | None:
    """Tags of several samples as a list.

    Raises:
        WrongTypeError: they are no list (a TypeError).
    """
    if tags is None or isinstance(tags, list):
        return tags
    try:
        return list(tags)
    except TypeError:
        raise WrongTypeError(f"{what}: got {type(tags).__name__}, want a list of dicts", op) from None


def encode(tags: Sequence[Mapping[Any, Any]] | None, op: str) -> bytes | None:
    """The tags as bytes.

    Raises:
        WrongTypeError: one is no dict (a TypeError).
        InvalidArgumentError: something in one cannot be packed (a ValueError).
    """
    if tags is None:
        return None
    if set(map(type, tags)) != {dict}:
        tags = [_dict(tag, f"tags[{row}]", op) for row, tag in enumerate(tags)]
    try:
        return _encoder.encode(tags)
    except MemoryError:
        raise
    except Exception:  # also whatever a __reduce__ of the user raises
        return _encoder.encode([_packed(tag, f"tags[{row}]", op) for row, tag in enumerate(tags)])


def encode_map(values: Mapping[Any, Any], what: str, op: str) -> bytes:
    """One map, packed as a tag.

    Raises:
        InvalidArgumentError: something in it cannot be packed (a ValueError).
    """
    try:
        return _encoder.encode(values)
    except MemoryError:
        raise
    except Exception:  # see encode
        return _encoder.encode(_packed(values, what, op))


def encode_filter(tags: Any, op: str) -> bytes | None:
    """Entries that tags must have."""
    return None if tags is None else encode_map(_dict(tags, "tags", op), "tags", op)


def _dict(tag: Any, where: str, op: str) -> dict[Any, Any]:
    if not isinstance(tag, Mapping):
        raise WrongTypeError(f"{where}: got {type(tag).__name__}, want a dict", op)
    return dict(tag)


def _packed(tag: Mapping[Any, Any], where: str, op: str) -> dict[Any, Any]:
    """The tag with all of it that msgpack does not have pickled."""
    for key in tag:
        if isinstance(key, str):
            try:
                key.encode()
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(f"{where}: key {key!r}: {error.reason}", op) from None
    return {key: _value(value, f"{where}: {key!r}", op) for key, value in tag.items()}


def _value(value: Any, where: str, op: str) -> Any:
    with contextlib.suppress(Exception):  # it is pickled instead
        _encoder.encode(value)
        return value
    try:
        return _pickled(value)
    except MemoryError:
        raise
    except Exception as error:
        deep = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
        reason = "it is nested too deeply" if deep else str(error) or type(error).__name__
        text = f"{where}: a value of type {type(value).__name__} cannot be stored: {reason}"
        raise InvalidArgumentError(text, op) from error


def decode(raw: bytes | None, count: int) -> list[dict[str, Any]]:
    """The tags of ``count`` samples; no bytes are empty tags."""
    if raw is None:
        return [{} for _ in range(count)]
    tags: list[dict[str, Any]] = _decoder.decode(raw)
    return tags if None not in tags else [tag or {} for tag in tags]


def decode_one(raw: bytes | None) -> dict[str, Any]:
    """One map of `encode_map`; no bytes are an empty one."""
    tag: dict[str, Any] = _decoder.decode(raw) if raw else {}
    return tag
