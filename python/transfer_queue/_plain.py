"""Plain Python values as msgpack and back, exactly, without anything that could run code when it is read.

Plain are None, bool, int, float, str, bytes, and list, tuple, set, frozenset and dict of plain values. msgpack has no
tuples, sets and large integers; these are extensions.

======  ===========================================
code    content
======  ===========================================
1       tuple: msgpack array of its values
2       set: the same
3       frozenset: the same
4       int beyond 64 bit: its decimal digits
5       dict with keys that are no str: msgpack array of key, value, key, value ...
======  ===========================================
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["pack", "unpack"]

_TUPLE, _SET, _FROZENSET, _INT, _DICT = 1, 2, 3, 4, 5
_encoder = msgspec.msgpack.Encoder()
_ATOMS = (type(None), bool, float, str, bytes)


def pack(value: Any, what: str) -> bytes:
    """The value as bytes.

    Args:
        value: a plain value.
        what: how errors name it.

    Raises:
        TypeError: something in it is not plain; the text says where, and its type.

    Example:
        >>> unpack(pack({("a", 1): {2**70}}, "it"))
        {('a', 1): {1180591620717411303424}}
    """
    return _encoder.encode(_plain(value, what))


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(_INT, str(value).encode())
    if kind is list:
        return [_plain(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if kind is dict:
        flat = []
        for key, inner in value.items():
            flat += [_plain(key, f"a key of {where}"), _plain(inner, f"{where}[{key!r}]")]
        return msgspec.msgpack.Ext(_DICT, _encoder.encode(flat))
    for cls, code in ((tuple, _TUPLE), (set, _SET), (frozenset, _FROZENSET)):
        if kind is cls:
            listed = [_plain(inner, f"an element of {where}") for inner in value]
            return msgspec.msgpack.Ext(code, _encoder.encode(listed))
    raise TypeError(f"{where} is a value of type {kind.__module__}.{kind.__qualname__}, which cannot be saved")


def unpack(data: bytes) -> Any:
    """The value of `pack`.

    Raises:
        ValueError: the bytes are not from `pack`.
    """
    return _decoder.decode(data)


def _extension(code: int, data: memoryview) -> Any:
    if code == _INT:
        return int(bytes(data))
    values = _decoder.decode(data)
    if code == _DICT:
        return dict(zip(values[::2], values[1::2], strict=True))
    try:
        return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}[code](values)
    except KeyError:
        raise ValueError(f"unknown extension {code}") from None


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
