"""Streams without a session: cutting batches, packing them for the main process, settings that make no sense."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue import BatchMeta, StreamingDataLoader, StreamingDataset
from transfer_queue.dataloader import _packing, chunk_batch_fn
from transfer_queue.dataloader._turns import Turns
from transfer_queue.utils.zmq_utils import Role, ZMQServerInfo


def jagged(*lengths: int) -> torch.Tensor:
    rows = [torch.arange(length) + 100 * number for number, length in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def metadata(rows: int) -> BatchMeta:
    return BatchMeta(
        global_indexes=list(range(10, 10 + rows)),
        partition_ids=["p"] * rows,
        custom_meta=[{"row": row} for row in range(rows)],
    )


LENGTHS = (3, 0, 2, 5, 1, 4, 2)


def batch() -> TensorDict:
    """Seven rows of every form that a column can have."""
    first = jagged(*LENGTHS)
    second = torch.nested.nested_tensor_from_jagged(first.values() * 2.0, first.offsets())
    wide = [torch.arange(2 * length).reshape(2, length) for length in LENGTHS]
    return TensorDict(
        {
            "dense": torch.arange(14).reshape(7, 2),
            "number": torch.arange(7.0),
            "jagged": first,
            "jagged as well": second,
            "ragged in dim 2": torch.nested.nested_tensor_from_jagged(
                torch.cat(wide, dim=1), torch.tensor([0, *LENGTHS]).cumsum(0), jagged_dim=2
            ),
            "strided": torch.nested.as_nested_tensor([torch.ones(1 + row % 3, 2 + row % 2) for row in range(7)]),
            "text": NonTensorStack(*[f"row {row}" for row in range(7)]),
            "inner": TensorDict({"deep": jagged(*LENGTHS), "x": torch.arange(7)}, batch_size=[7]),
        },
        batch_size=[7],
    )


def rows_of(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return [row.tolist() for row in column.unbind()]
    if isinstance(column, TensorDict):
        return [[column[name].unbind()[row].tolist() for name in ("deep", "x")] for row in range(column.batch_size[0])]
    return list(column.tolist() if isinstance(column, NonTensorStack) else column)


@pytest.mark.parametrize(("size", "want"), [(1, [1] * 7), (3, [3, 3, 1]), (4, [4, 3]), (7, [7])])
def test_data_and_metadata_are_cut_at_the_same_rows(size: int, want: list[int]) -> None:
    data, meta = batch(), metadata(7)
    pieces = chunk_batch_fn(data, meta, size)
    assert [piece.batch_size[0] for piece, _ in pieces] == [part.size for _, part in pieces] == want
    assert [index for _, part in pieces for index in part.global_indexes] == meta.global_indexes
    assert [tags for _, part in pieces for tags in part.custom_meta] == meta.custom_meta
    for name, column in data.items():
        assert [row for piece, _ in pieces for row in rows_of(piece[name])] == rows_of(column), name
        for piece, _ in pieces:
            if isinstance(column, torch.Tensor):
                assert (piece[name].layout, piece[name].is_nested) == (column.layout, column.is_nested), name
                assert piece[name].dtype == column.dtype
    assert all(list(piece.keys()) == list(data.keys()) for piece, _ in pieces)


def test_pieces_of_columns_that_can_be_combined_can_be_combined() -> None:
    for piece, _ in chunk_batch_fn(batch(), metadata(7), 3):
        total = piece["jagged"] + piece["jagged as well"]
        assert [row.tolist() for row in total.unbind()] == [(3 * row).tolist() for row in piece["jagged"].unbind()]
        assert piece["jagged"].is_contiguous()
        assert piece["jagged"].to_padded_tensor(-1).shape[0] == piece.batch_size[0]


def test_jagged_rows_with_holes() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([0, 4, 6, 10]), lengths=torch.tensor([2, 1, 4])
    )
    pieces = chunk_batch_fn(TensorDict({"x": holes}, batch_size=[3]), metadata(3), 2)
    assert [rows_of(piece["x"]) for piece, _ in pieces] == [[[0, 1], [4]], [[6, 7, 8, 9]]]


def test_what_cannot_be_cut() -> None:
    data, meta = batch(), metadata(7)
    with pytest.raises(TypeError, match="dict"):
        chunk_batch_fn({"x": 1}, meta, 1)  # type: ignore[arg-type]
    for size in (0, -1, 8, 1.0, True):
        with pytest.raises(ValueError, match="micro_batch_size"):
            chunk_batch_fn(data, meta, size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch dimension"):
        chunk_batch_fn(TensorDict({"x": torch.ones(3)}, batch_size=[]), meta, 1)
    with pytest.raises(ValueError, match="6 samples for 7 rows"):
        chunk_batch_fn(data, metadata(6), 1)


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(_packing.pack(value)))


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_a_packed_batch_comes_back(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "_INLINE_BYTES", limit)
    data, meta = batch(), metadata(7)
    pieces, number = sent((chunk_batch_fn(data, meta, 3), 5))
    assert number == 5
    assert [part.global_indexes for _, part in pieces] == [[10, 11, 12], [13, 14, 15], [16]]
    for name, column in data.items():
        assert [row for piece, _ in pieces for row in rows_of(piece[name])] == rows_of(column), name
    for piece, _ in pieces:
        assert piece["jagged"].offsets() is piece["jagged as well"].offsets()
        piece["dense"].zero_()
        piece["jagged"].values().zero_()
    assert data["dense"][0].tolist() == [0, 1]


VALUES = {
    "nothing": lambda: torch.empty(0),
    "no columns": lambda: torch.empty(3, 0, 2, dtype=torch.int16),
    "a number": lambda: torch.tensor(3.5, dtype=torch.bfloat16),
    "complex": lambda: torch.tensor([1 + 2j, 3j]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "bool": lambda: torch.tensor([True, False]),
    "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "with a step": lambda: torch.arange(20)[3::4],
    "sliced": lambda: torch.arange(1000, dtype=torch.float64)[501:507],
}


@pytest.mark.parametrize("limit", [1 << 20, 0])
@pytest.mark.parametrize("name", VALUES)
def test_packed_tensors(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "_INLINE_BYTES", limit)
    value = VALUES[name]()
    got, again, other = sent((value, value, torch.ones(2)))
    assert torch.equal(got, value)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert again is got
    assert other.tolist() == [1.0, 1.0]


def test_a_packed_slice_does_not_bring_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.arange(1 << 16)
    assert len(pickle.dumps(_packing.pack([large[100:104], large[104:110]]))) < 1000


def test_other_values_are_pickled() -> None:
    weights = torch.nn.Parameter(torch.ones(2))
    got, text, parameter = sent((torch.ones(2, requires_grad=True), "text", weights))
    assert (got.tolist(), text, type(parameter)) == ([1.0, 1.0], "text", torch.nn.Parameter)
    with pytest.raises(TypeError):
        _packing.pack(threading.Lock())


def test_large_blocks_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "_INLINE_BYTES", 0)
    sent(torch.ones(4))  # starts what hands over descriptors
    before = len(os.listdir("/proc/self/fd"))
    kept = [sent(torch.full((1000,), number)) for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [int(one[-1]) for one in kept] == list(range(50))


def test_a_new_run_ends_the_ones_before() -> None:
    turns = Turns()
    first = turns.begin("p", 3, consumed=False)
    assert turns.current()[0] == "p"
    assert (first.first, first.next, first.alive) == (3, 3, True)
    assert first.wait_for(3)
    first.fetched(3)
    first.fetched(2)
    assert first.next == 4
    second = turns.begin("q" * 3000, 0, consumed=True)
    assert (first.alive, second.alive, second.consumed) == (False, True, True)
    assert not first.wait_for(9)
    assert turns.current()[0] == "q" * 3000
    first.fetched(7)
    assert second.next == 0
    second.end()
    assert not second.wait_for(0)
    third = turns.begin("r", 1, consumed=False)
    turns.end()
    assert not third.alive
    with pytest.raises(ValueError, match="partition_id"):
        turns.begin("x" * (1 << 16), 0, consumed=False)


def settings(**changed: Any) -> dict[str, Any]:
    address = ZMQServerInfo(Role.CONTROLLER, "c", socket="/nowhere", session="s")
    return {
        "config": {"controller": {"zmq_info": address}},
        "batch_size": 2,
        "micro_batch_size": 1,
        "data_fields": ["x"],
        "partition_id": "p",
        "task_name": "t",
        "dp_rank": 0,
        **changed,
    }


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"micro_batch_size": 0}, ValueError),
        ({"micro_batch_size": "2"}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"dp_rank": -1}, ValueError),
        ({"data_fields": []}, ValueError),
        ({"data_fields": "x"}, TypeError),
        ({"data_fields": [1]}, TypeError),
        ({"partition_id": 3}, TypeError),
        ({"task_name": None}, TypeError),
        ({"fetch_batch_fn": 3}, TypeError),
        ({"process_batch_fn": "f"}, TypeError),
        ({"config": {}}, ValueError),
        ({"config": None}, ValueError),
        ({"config": {"controller": {"zmq_info": None}}}, ValueError),
        ({"config": {"controller": {"zmq_info": "tcp://x"}}}, TypeError),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        StreamingDataset(**settings(**wrong))
    assert next(iter(wrong)) in str(raised.value)


def test_a_dataset_pickles() -> None:
    made = pickle.loads(pickle.dumps(StreamingDataset(**settings(partition_id="p/1"))))
    assert (made.partition_id, made.data_fields, made.dp_rank, made.buffer) == ("p/1", ["x"], 0, [])
    with pytest.raises(TypeError, match="partition_id"):
        made.step(7)
    with pytest.raises(TypeError, match="dataset"):
        StreamingDataLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch"):
        StreamingDataLoader(made, prefetch_factor=2)
