"""Inputs with values known by construction, and exact comparison of what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import loopback
import torch
from loopback import Core
from tensordict import NonTensorStack, TensorDict

from transfer_queue import _columns, _results

DTYPES = [dtype for dtype in _columns.DTYPES if dtype is not None]


def ramp(*shape: int, dtype: torch.dtype = torch.int64, start: int = 1) -> torch.Tensor:
    """Tensor counting up from ``start``, row by row; bool is true at multiples of three, complex is n - n/4 i."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(start, start + count).reshape(shape)
    if dtype is torch.bool:
        return numbers % 3 == 0
    if dtype is torch.complex32:
        # Few operations exist for it; its bits are two halves.
        halves = torch.stack([numbers.to(torch.float16), -numbers.to(torch.float16)], dim=-1)
        return torch.view_as_complex(halves)
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() / 4).to(dtype)
    return numbers.to(dtype)


def table(count: int, **columns: Any) -> TensorDict:
    """TensorDict of ``count`` rows. A list becomes a column of opaque Python objects."""
    packed = {name: NonTensorStack(*column) if isinstance(column, list) else column for name, column in columns.items()}
    return TensorDict(packed, batch_size=[count])


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def strided(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def ragged_on_2(lengths: Sequence[int], height: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Jagged tensor of rows ``(height, length)`` and the rows; ``values()`` is ``(height, sum of lengths)``."""
    values = ramp(height, sum(lengths), dtype=torch.float32)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    return nested, list(values.split(list(lengths), dim=1))


def read(core: Core, columns: dict[str, loopback.Column], **options: Any) -> TensorDict:
    """The columns as the result of a get."""
    reply = core.reply(list(columns.values()), **options)
    return _results.build(list(columns), reply.address, reply.rows, core.release)


def round_trip(fields: Any, core: Core | None = None, **options: Any) -> TensorDict:
    """What a get returns of a put: of a TensorDict, or of the one row of a dict."""
    packed = _columns.pack_row(fields) if type(fields) is dict else _columns.pack_table(fields)
    return read(core or Core(), loopback.take(packed), **options)


def column(data: TensorDict, field: str) -> Any:
    """The column as stored in the TensorDict, without the unwrapping that ``data[field]`` does."""
    return dict(data.items())[field]


def container(data: TensorDict, field: str) -> str:
    """``"jagged"``, ``"strided"``, ``"dense"`` or ``"objects"``."""
    value = column(data, field)
    if isinstance(value, NonTensorStack):
        return "objects"
    assert isinstance(value, torch.Tensor), f"{field} is a {type(value).__name__}"
    if not value.is_nested:
        return "dense"
    return "jagged" if value.layout is torch.jagged else "strided"


def rows(data: TensorDict, field: str) -> list[Any]:
    """The column's values, one per row."""
    value = column(data, field)
    return list(value.unbind()) if isinstance(value, torch.Tensor) else value.tolist()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same_tensor(got: Any, want: torch.Tensor, what: str = "tensor") -> None:
    assert isinstance(got, torch.Tensor), f"{what}: {type(got).__name__} instead of a tensor"
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape)), what
    assert raw_bytes(got) == raw_bytes(want), what


def assert_rows(data: TensorDict, field: str, want: Iterable[torch.Tensor]) -> None:
    """Every row of the column equals the wanted tensor in dtype, shape and bits."""
    got, want = rows(data, field), list(want)
    assert len(got) == len(want), field
    for i, (got_row, want_row) in enumerate(zip(got, want, strict=True)):
        assert_same_tensor(got_row, want_row, f"row {i} of {field}")


def assert_objects(got: list[Any], want: list[Any]) -> None:
    """Equal values of equal types."""
    assert [(value, type(value)) for value in got] == [(value, type(value)) for value in want]
