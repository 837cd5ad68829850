"""One Python value to bytes and back: exact type, exact value, own memory."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import subprocess
import sys
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from inputs import DTYPES, assert_same_tensor, jagged, ramp

from transfer_queue import _values
from transfer_queue._values import BYTES, NDARRAY, NONE, PICKLE, STR, Encoded, decode_objects, encode_objects


def data_of(column: Encoded) -> bytes:
    """All values one after another, as the core keeps them."""
    if column.pointers is None:
        return bytes(column.data)
    return b"".join(bytes(_values.memory_at(at, n)) for at, n in zip(column.pointers, column.sizes, strict=True))


def decode(column: Encoded, data: bytes | None = None) -> list[Any]:
    """Reads the values from memory that is garbage right afterwards."""
    memory = bytearray(data_of(column) if data is None else data)
    offsets = list(itertools.accumulate(column.sizes, initial=0))
    assert offsets[-1] == len(memory)
    out = decode_objects(_values.address_of(memory), offsets, column.codecs, "x")
    memory[:] = b"\xdd" * len(memory)
    return out


def round_trip(*values: Any) -> list[Any]:
    return decode(encode_objects("x", list(values)))


def codecs(*values: Any) -> list[int]:
    return list(encode_objects("x", list(values)).codecs)


class Text(str):
    __slots__ = ()


def test_only_exact_types_have_codecs_of_their_own():
    assert codecs("a", b"a", None, np.zeros(2)) == [STR, BYTES, NONE, NDARRAY]
    others = [
        Text("a"),
        bytearray(b"a"),
        np.zeros(2, dtype=object),
        np.ma.zeros(2),
        np.float32(1),
        3,
        [],
        torch.ones(1),
    ]
    assert codecs(*others) == [PICKLE] * len(others)


COLUMNS = {
    "ASCII": ["a", "", "north"],
    "text": ["süd", "西", "", "\ud800 alone"],
    "bytes": [b"\x00\x01", b"", b"\xff" * 9],
    "nothing": [None, None],
    "numbers": [0, -1, 2**63, -(2**100), True, 1.5, float("inf"), 2 + 3j],
    "mixed": ["a", b"b", None, 3, ["c", {"d": (1,)}], np.float16(0.5)],
    "one": [{"k": [None]}],
    "none at all": [],
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_come_back(kind):
    got = round_trip(*COLUMNS[kind])
    assert [(value, type(value)) for value in got] == [(value, type(value)) for value in COLUMNS[kind]]


@pytest.mark.parametrize("make", [lambda n: b"\x07" * n, lambda n: "西" * n, lambda n: np.full(n, 7, dtype=np.uint8)])
def test_large_values_come_back_beside_small_ones(make):
    large = make(300_000)
    column = encode_objects("x", [large, None, "small", 3])
    assert column.pointers is not None
    got = decode(column)
    assert got[1:] == [None, "small", 3]
    assert type(got[0]) is type(large)
    assert np.array_equal(got[0], large) if isinstance(large, np.ndarray) else got[0] == large


def test_a_part_of_a_column_can_be_read():
    for values in (["north", "east", "up"], ["süd", "西", "x"], [1, "a", None]):
        column = encode_objects("x", values)
        data = data_of(column)
        offsets = list(itertools.accumulate(column.sizes, initial=0))
        assert decode_objects(_values.address_of(data), offsets[1:], column.codecs[1:]) == values[1:]


@dataclasses.dataclass
class Turn:
    role: str
    tokens: tuple[int, ...]


class Source(enum.Enum):
    HUMAN = "human"


Point = collections.namedtuple("Point", "x y")

VALUES = [
    *[("human", 3), {"span": (4, [5, (6,)])}, {1.5, "x"}, frozenset({7}), range(3, 9, 2), bytearray(b"ab\x00")],
    *[{("a", 1): "tuple key", 7: "int key"}, Turn("user", (3, 4)), Source.HUMAN, uuid.UUID(int=12345), Point(1, 2)],
    datetime.datetime(2026, 2, 3, 4, 5, 6, 789),
    datetime.datetime(2026, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    *[datetime.date(2026, 2, 3), datetime.timedelta(days=1, microseconds=7)],
    *[decimal.Decimal("0.10"), fractions.Fraction(2, 7), np.int8(-3), np.bool_(True), np.datetime64("2026-01-02")],
    *[np.str_("a"), Text("b"), torch.float32, torch.Size([1, 2])],
    collections.OrderedDict(b=1, a=2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_keep_their_type(value):
    (got,) = round_trip(value)
    assert (got, type(got)) == (value, type(value))


def test_values_shared_within_one_row_stay_shared_and_rows_stay_apart():
    part = [1]
    tensor = ramp(2)
    first, second = round_trip({"a": part, "b": part, "t": [tensor, tensor]}, {"a": part})
    assert first["a"] is first["b"]
    assert first["t"][0] is first["t"][1]
    assert first["a"] is not second["a"]


def test_functions_and_local_classes_travel_by_value():
    offset = 3

    class Local:
        value = 7

    add, made = round_trip(lambda n: n + offset, Local())
    assert add(4) == 7
    assert made.value == 7
    assert type(made) is Local  # cloudpickle knows its own classes again


def test_classes_of_main_can_be_read_in_another_process():
    write = """
        import sys, dataclasses
        from transfer_queue import _values
        @dataclasses.dataclass
        class Turn:
            role: str
        sys.stdout.buffer.write(bytes(_values.encode_objects("x", [Turn("user")]).data))
    """
    read = """
        import pickle, sys
        got = pickle.loads(sys.stdin.buffer.read())
        print(type(got).__name__, got.role)
    """
    code = [sys.executable, "-c"]
    written = subprocess.run([*code, _dedent(write)], check=True, capture_output=True).stdout
    out = subprocess.run([*code, _dedent(read)], check=True, capture_output=True, input=written).stdout
    assert out.split() == [b"Turn", b"user"]


def _dedent(code: str) -> str:
    return "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_inside_values_keep_their_bits(dtype):
    want = torch.arange(96, dtype=torch.uint8).view(dtype)
    (got,) = round_trip({"t": want, "zero": want[3], "none": want[:0].reshape(0, 3)})
    assert_same_tensor(got["t"], want)
    assert_same_tensor(got["zero"], want[3])
    assert_same_tensor(got["none"], want[:0].reshape(0, 3))


def test_tensors_inside_values_are_what_they_show():
    numbers = ramp(3, dtype=torch.complex64)
    views = [numbers.conj(), numbers.conj().imag, ramp(3, 4).t(), ramp(3, 1).expand(3, 4)]
    (got,) = round_trip(views)
    for one, want in zip(got, views, strict=True):
        assert_same_tensor(one, want.resolve_conj().resolve_neg().contiguous())
        one.fill_(1)


def test_a_slice_of_a_huge_tensor_costs_its_own_elements():
    huge = torch.zeros(1 << 22)
    column = encode_objects("x", [{"part": huge[5:9]}])
    assert sum(column.sizes) < 1000


def test_gradients_are_left_behind_but_parameters_stay_parameters():
    graph = torch.ones(2, requires_grad=True) * 2
    (got,) = round_trip([graph, torch.nn.Parameter(torch.ones(2))])
    assert_same_tensor(got[0], torch.full((2,), 2.0))
    assert not got[0].requires_grad
    assert type(got[1]) is torch.nn.Parameter


def test_other_layouts_inside_values_are_left_to_torch():
    (got,) = round_trip({"sparse": torch.eye(2).to_sparse(), "ragged": jagged([ramp(1), ramp(2)])})
    assert got["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert [row.tolist() for row in got["ragged"].unbind()] == [[1], [1, 2]]


ARRAYS = {
    "numbers": np.array([[3, 0, 7], [1, 5, 9]], dtype=np.int16),
    "rank 0": np.array(7, dtype=np.int16),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(4, 3)),
    "big-endian": np.array([1.5, -2.5], dtype=">f8"),
    "structured": np.array([(1, (0.5, 2.0))], dtype=[("id", "<i8"), ("score", "<f4", (2,))]),
    "aligned": np.array([(1, 2.0)], dtype=np.dtype([("id", "i1"), ("score", "f8")], align=True)),
    "datetime": np.array(["2026-01-02T03:04", "NaT"], dtype="datetime64[ms]"),
    "empty": np.empty((0, 3), dtype=np.uint32),
    "strings": np.array(["süd", ""]),
    "no bytes": np.zeros(3, dtype="S0"),
    "bytes": np.array([b"a\x00b", b"c"]),
    "void": np.array([b"ab", b"cd"], dtype="V2"),
    "every second": np.arange(10)[::2],
    "reversed": np.arange(6).reshape(2, 3)[::-1],
    "transposed part": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "read-only": np.broadcast_to(np.arange(3), (2, 3)),
    "large": np.arange(40_000.0).reshape(200, 200),
    "large Fortran": np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
    "large structured": np.zeros(20_000, dtype=[("id", "<i8"), ("score", "<f4")]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_keep_dtype_byte_order_shape_and_order(kind):
    want = ARRAYS[kind]
    assert codecs(want) == [NDARRAY]
    (got,) = round_trip(want)
    assert type(got) is np.ndarray
    assert (got.dtype, got.dtype.str, got.shape) == (want.dtype, want.dtype.str, want.shape)
    assert got.dtype.isalignedstruct == want.dtype.isalignedstruct
    assert got.tobytes() == want.tobytes() or kind == "aligned"  # whose gaps hold anything
    assert np.array_equal(got, want) or kind == "datetime"
    assert got.flags.f_contiguous or not want.flags.f_contiguous
    assert got.flags.c_contiguous or want.flags.f_contiguous
    assert got.flags.writeable
    assert got.flags.owndata


def test_a_dtype_keeps_its_metadata():
    plain = np.arange(3, dtype=np.int32)
    noted = plain.astype(np.dtype(np.int32, metadata={"unit": "m"}))
    first, second, third = round_trip(plain, noted, plain)
    assert [got.dtype.metadata and dict(got.dtype.metadata) for got in (first, second, third)] == [
        None,
        {"unit": "m"},
        None,
    ]


def test_a_column_of_arrays_comes_back():
    want = [np.full(n, n, dtype=np.float32) for n in range(20)]
    for got, one in zip(round_trip(*want), want, strict=True):
        assert np.array_equal(got, one)


def test_what_cannot_be_pickled_names_field_row_and_type():
    for value, named in [
        (threading.Lock(), "lock"),
        ({"deep": [threading.Lock()]}, "dict.*lock"),
        (_deep(), "list.*deep"),
    ]:
        for values in ([1, value], ["a", value]):
            with pytest.raises(ValueError, match=f"field 'odd': row 1: .*{named}"):
                encode_objects("odd", values)


def _deep() -> list[Any]:
    out: list[Any] = []
    for _ in range(100_000):
        out = [out]
    return out


def test_bytes_that_cannot_be_read_name_field_and_row():
    good = encode_objects("x", [1, 2])
    sizes, data = list(good.sizes), data_of(good)
    offsets = [0, sizes[0], len(data)]
    broken = data[: sizes[0]] + b"\x00" * sizes[1]
    with pytest.raises(ValueError, match="field 'x': row 1: a stored value cannot be read"):
        decode_objects(_values.address_of(broken), offsets, good.codecs, "x")
    for codec in (9, NONE, NDARRAY):
        with pytest.raises(ValueError, match="field 'x': row 1"):
            decode_objects(_values.address_of(data), offsets, bytes([PICKLE, codec]), "x")


def test_formats_stay_readable():
    """Bytes written by the first version."""
    array = bytes.fromhex("0101 0200 03000000 0200000000000000 0300000000000000".replace(" ", "")) + b"<i2" + bytes(5)
    array += np.array([[1, 2, 3], [4, 5, 6]], dtype="<i2").tobytes("F")
    tensor = (
        b"\x80\x05\x95N\x00\x00\x00\x00\x00\x00\x00\x8c\x16transfer_queue._values\x94\x8c\x11tensor_from_bytes\x94\x93\x94"
        b"\x8c\x05int16\x94K\x02\x85\x94\x96\x04\x00\x00\x00\x00\x00\x00\x00\x01\x00\x02\x00\x94\x87\x94R\x94."
    )
    parts = ["süd".encode(), b"raw", b"", array, tensor]
    data = b"".join(parts)
    offsets = list(itertools.accumulate(map(len, parts), initial=0))
    got = decode_objects(_values.address_of(data), offsets, bytes([STR, BYTES, NONE, NDARRAY, PICKLE]))
    assert got[:3] == ["süd", b"raw", None]
    assert got[3].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert_same_tensor(got[4], torch.tensor([1, 2], dtype=torch.int16))
