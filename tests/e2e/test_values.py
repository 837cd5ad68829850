"""Values of every kind through the real core: what goes in comes out, bit for bit (contract F1 to F5)."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

_DTYPES = [
    torch.bool,
    *[torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
    *[torch.float8_e4m3fn, torch.float8_e5m2],
]


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
    assert _bits(got) == _bits(want)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_dtypes_and_shapes(tq: Any, dtype: torch.dtype) -> None:
    """Small and large, dense and ragged, one by one and in a batch."""
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (5000,), (300, 200)]
    row = {f"f{number}": _random(shape, dtype) for number, shape in enumerate(shapes)}
    tq.kv_put("one", "p", row)
    got = tq.kv_batch_get("one", "p")
    for name, want in row.items():
        column = got[name]
        _same(column.unbind()[0] if column.is_nested else column[0], want)
    batch = {f"b{number}": _random((6, *shape), dtype) for number, shape in enumerate(shapes)}
    keys = [str(n) for n in range(6)]
    tq.kv_batch_put(keys, "p", TensorDict(batch, batch_size=[6]))
    got = tq.kv_batch_get(keys[::-1], "p")
    for name, want in batch.items():
        for value, wanted in zip(got[name].unbind(), want.unbind()[::-1], strict=True):
            _same(value, wanted)
        shape = tuple(want.shape[1:])
        schema = tq.get_client().kv_retrieve_meta(keys, "p").field_schema[name]
        assert tuple(schema["shape"]) == shape
        assert schema["dtype"] == dtype


def test_scalars(tq: Any) -> None:
    tq.kv_batch_put([*"abc"], "p", TensorDict({"x": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3]))
    assert tq.kv_batch_get([*"abc"], "p")["x"].tolist() == [1.0, 2.0, 3.0]
    assert tq.kv_batch_get("b", "p")["x"].shape == (1,)
    assert tuple(tq.get_client().kv_retrieve_meta([*"abc"], "p").field_schema["x"]["shape"]) == ()
    tq.kv_put("d", "p", {"x": torch.tensor([4.0])})
    got = tq.kv_batch_get(["a", "d"], "p")["x"]
    assert [value.tolist() for value in got] == [1.0, [4.0]]


@pytest.mark.parametrize("width", [7, 20_000])
def test_the_ragged_dimension_survives(tq: Any, width: int) -> None:
    rows = [torch.randn(4, width), torch.randn(4, width + 2), torch.randn(4, 1)]
    offsets = torch.tensor([0, *[row.shape[1] for row in rows]]).cumsum(0)
    nested = torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), offsets, jagged_dim=2)
    tq.kv_batch_put([*"abc"], "p", TensorDict({"x": nested}, batch_size=[3]))
    got = tq.kv_batch_get([*"abc"], "p")["x"]
    assert got.layout is torch.jagged
    assert got._ragged_idx == 2
    for value, want in zip(got.unbind(), rows, strict=True):
        _same(value, want)
    for copied in (True, False):
        again = tq.kv_batch_get([*"ca"], "p", copy=copied)["x"]
        assert [value.shape for value in again.unbind()] == [rows[2].shape, rows[0].shape]
    tq.kv_batch_put([*"xyz"], "p", TensorDict({"x": got}, batch_size=[3]))
    _same(tq.kv_batch_get("y", "p")["x"].unbind()[0], rows[1])


def test_kinds_of_emptiness_are_different(tq: Any) -> None:
    values = {
        "empty": torch.empty(0),
        "deep": torch.empty(2, 0, 3),
        "bytes": b"",
        "text": "",
        "list": [],
        "none": None,
        "dict": {},
    }
    tq.kv_put("a", "p", values)
    got = tq.kv_batch_get("a", "p")
    assert got["empty"].unbind()[0].shape == (0,)
    assert got["deep"].unbind()[0].shape == (2, 0, 3)
    for name in ("bytes", "text", "list", "none", "dict"):
        value = got.get(name).tolist()[0]
        assert (type(value), value) == (type(values[name]), values[name])
    tq.kv_put("b", "p", {"text": ""})
    assert list(tq.kv_batch_get(["a", "b"], "p").keys()) == ["text"], "never written is not None"


class _Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class _Point:
    x: int
    tensor: Any = None


_OBJECTS: list[Any] = [
    (1, "a", (2.5,)),
    {1, 2},
    frozenset({3}),
    {"nested": [{"a": (1, 2)}], 5: None},
    1 << 80,
    -(1 << 63) - 1,
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.timezone.utc),
    _Color.RED,
    _Point(3),
    complex(1, -2),
    range(3),
    bytearray(b"abc"),
    True,
    5,
    float("inf"),
    "text with \ud800 a lone surrogate",
    b"\x00\xff" * 50_000,
    "x" * 200_000,
]


def test_python_values_keep_their_type(tq: Any) -> None:
    keys = [str(n) for n in range(len(_OBJECTS))]
    tq.kv_batch_put(keys, "p", TensorDict({"o": NonTensorStack(*_OBJECTS)}, batch_size=[len(keys)]))
    got = tq.kv_batch_get(keys, "p").get("o").tolist()
    assert [(type(value), value) for value in got] == [(type(value), value) for value in _OBJECTS]
    for key, value in zip(keys, _OBJECTS, strict=True):
        tq.kv_put("single" + key, "q", {"o": value})
        again = tq.kv_batch_get("single" + key, "q").get("o").tolist()[0]
        assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(5),
        np.float32(1.5),
        np.array([1, 2], dtype=">i4"),
        np.array([(1, "a")], dtype=[("n", "i4"), ("s", "U3")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([1, None, "x"], dtype=object),
        np.zeros((0, 4)),
        np.arange(40_000)[::2],
    ],
    ids=["c", "fortran", "0-d", "scalar", "big-endian", "structured", "datetime", "objects", "empty", "strided"],
)
def test_arrays(tq: Any, array: Any) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"o": NonTensorStack([array], {"in": array})}, batch_size=[2]))
    first, second = tq.kv_batch_get(["a", "b"], "p").get("o").tolist()
    for got in (first[0], second["in"]):
        assert (type(got), got.dtype, got.shape) == (type(array), array.dtype, array.shape)
        assert np.array_equal(got, array)
        if isinstance(array, np.ndarray) and array.ndim == 2:
            assert got.flags.f_contiguous == array.flags.f_contiguous


def test_dicts_of_tensors(tq: Any) -> None:
    value: dict[str, Any] = {"pixels": torch.randn(3, 5), "n": [torch.tensor(2)], "slice": torch.arange(1_000_000)[5:8]}
    tq.kv_put("a", "p", {"mm": value})
    got = tq.kv_batch_get("a", "p").get("mm").tolist()[0]
    _same(got["pixels"], value["pixels"])
    _same(got["n"][0], value["n"][0])
    _same(got["slice"], value["slice"])
    assert sum(unit.memory_used_bytes for unit in tq.list_units()) < 10_000, "a slice costs what it shows"


def test_views_travel_as_they_look(tq: Any) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    wide = torch.arange(4_000_000).reshape(2, -1)
    imaginary = torch.complex(base, -base)
    columns = {
        "transposed": base.t()[:4],
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(4, 5),
        "sliced": base[:, 2:4],
        "conjugate": imaginary.conj(),
        "negative": imaginary.imag._neg_view() if hasattr(torch.Tensor, "_neg_view") else imaginary.imag,
        "parameter": torch.nn.Parameter(base.clone()),
        "grad": base.clone().requires_grad_(),
    }
    tq.kv_batch_put([*"abcd"], "p", TensorDict(columns, batch_size=[4]))
    got = tq.kv_batch_get([*"abcd"], "p")
    for name, want in columns.items():
        assert not got[name].requires_grad
        for value, wanted in zip(got[name].unbind(), want.detach().unbind(), strict=True):
            _same(value, wanted.contiguous().resolve_conj())
    before = sum(unit.memory_used_bytes for unit in tq.list_units())
    tq.kv_batch_put(["wide"], "p", TensorDict({"w": wide[:1, 10:20]}, batch_size=[1]))
    assert sum(unit.memory_used_bytes for unit in tq.list_units()) - before <= 512, "one row of a huge tensor"


def test_rows_of_other_ranks_and_shapes(tq: Any) -> None:
    rows = [torch.randn(2, 3), torch.randn(5, 4), torch.randn(1, 1)]
    for key, row in zip("abc", rows, strict=True):
        tq.kv_put(key, "p", {"x": row})
    got = tq.kv_batch_get([*"abc"], "p")["x"]
    assert got.is_nested
    assert got.layout is torch.strided
    for value, want in zip(got.unbind(), rows, strict=True):
        _same(value, want)
    tq.kv_put("d", "p", {"x": torch.randn(4)})
    mixed = tq.kv_batch_get([*"abcd"], "p").get("x")
    assert isinstance(mixed, NonTensorStack)
    _same(mixed.tolist()[1], rows[1])


def test_names_may_be_anything(tq: Any) -> None:
    """Slashes, dots, other scripts, hundreds of characters (clients.md 29)."""
    for partition in ("a/b.c", "é中" * 100, "x" * 900, " "):
        for key in ("", "k/1", "中", "y" * 500):
            tq.kv_put(key, partition, {"fiéld.1/x": torch.tensor(1)})
            assert tq.kv_batch_get(key, partition)["fiéld.1/x"].tolist() == [1]
        assert len(tq.kv_list(partition)[partition]) == 4


def test_tags_keep_their_values(tq: Any) -> None:
    tag = {"n": 1 << 70, "t": (1, 2), "d": {"x": [None, True]}, "f": 1.5, "b": b"\x00", "color": "é", 5: "int key"}
    meta = tq.kv_put("a", "p", tag=tag)
    listed = tq.kv_list("p")["p"]["a"]
    assert meta.tags == [listed]
    for name in ("n", "d", "f", "b", "color", 5):
        assert listed[name] == tag[name], name
    tq.kv_put("a", "p", tag={"n": 2, "new": "x"})
    merged = tq.kv_list("p")["p"]["a"]
    assert (merged["n"], merged["new"], merged["f"]) == (2, "x", 1.5)
