"""Result columns to a TensorDict: containers, owners of memory, and what programs do with results."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from inputs import (
    DTYPES,
    assert_objects,
    assert_rows,
    assert_same_tensor,
    column,
    container,
    jagged,
    ragged_on_2,
    ramp,
    read,
    round_trip,
    rows,
    strided,
    table,
)
from loopback import Core, dense_form, take
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.utils import LinkedList

from transfer_queue import _columns, _results

OBJECTS = {
    "str": ["north", "east", "süd", "西", "up", "down", "in"],
    "bytes": [b"\x00\x01", b"two", b"\xff" * 9, b"4", b"fi\x00ve", b"six", b"seven"],
    "int": [0, -1, 2**62, 7, 11, 13, -(2**63)],
    "float": [0.5, -0.0, 1e300, 2.25, float("inf"), 3.0, -7.125],
    "bool": [True, False, True, True, False, False, True],
    "list": [[1, "a"], [2, [3.5, None]], [4], [5, 6, 7], [True], [{"k": 1}], [8]],
    "dict": [{"a": i, "nested": {"b": [i, str(i)]}} for i in range(7)],
    "none": [None] * 7,
    "tuple": [(i,) for i in range(7)],
}


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("inline", [False, True], ids=["tokens", "inline"])
def test_a_batch_of_any_size_has_all_its_columns(core, count, inline):
    vectors, numbers, texts = ramp(count, 5, dtype=torch.float32), ramp(count), [f"text{i}" for i in range(count)]
    ragged = [ramp(3 + i % 4, start=10 * i) for i in range(count)]
    data = round_trip(table(count, x=vectors, s=numbers, note=texts, r=jagged(ragged)), core, inline=inline)
    assert data.batch_size == torch.Size([count])
    assert list(data.keys()) == ["note", "r", "s", "x"]
    assert [container(data, field) for field in ("x", "s", "note", "r")] == ["jagged", "dense", "objects", "jagged"]
    assert_rows(data, "x", vectors)
    assert_rows(data, "s", numbers)
    assert_objects(rows(data, "note"), texts)
    assert_rows(data, "r", ragged)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(core, dtype):
    numbers = torch.arange(48 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    ragged = torch.nested.nested_tensor_from_jagged(numbers, torch.tensor([0, 1, 48]))
    data = round_trip(table(2, x=numbers.reshape(2, 4, 6), s=numbers[:2], r=ragged, e=numbers[:0].reshape(2, 0)), core)
    assert_rows(data, "x", numbers.reshape(2, 4, 6))
    assert_same_tensor(column(data, "s"), numbers[:2])
    assert_rows(data, "r", [numbers[:1], numbers[1:]])
    assert_rows(data, "e", numbers[:0].reshape(2, 0))


@pytest.mark.parametrize("shape", [(1,), (2, 3), (3, 1, 2), (2, 2, 2, 2), (2, 0, 3)], ids=str)
def test_rows_of_any_rank_above_zero_come_back_jagged(core, shape):
    data = round_trip(table(3, x=ramp(3, *shape, dtype=torch.float64)), core)
    assert container(data, "x") == "jagged"
    assert_rows(data, "x", ramp(3, *shape, dtype=torch.float64))


def test_dense_layout_gives_plain_tensors_where_rows_have_one_shape(core):
    ragged = [ramp(1), ramp(2), ramp(3)]
    data = round_trip(table(3, x=ramp(3, 2, 2), s=ramp(3), r=jagged(ragged)), core, shape=dense_form)
    assert [container(data, field) for field in ("x", "s", "r")] == ["dense", "dense", "jagged"]
    assert_same_tensor(column(data, "x"), ramp(3, 2, 2))
    assert_rows(data, "r", ragged)


@pytest.mark.parametrize("layout", [jagged, strided, list], ids=["jagged", "strided", "list"])
def test_ragged_rows_come_back_jagged_whatever_was_put(core, layout):
    want = [ramp(length, dtype=torch.float32, start=10 * length) for length in (5, 3, 0, 4)]
    data = round_trip(table(4, x=layout(want)), core)
    assert container(data, "x") == "jagged"
    assert_rows(data, "x", want)


@pytest.mark.parametrize("lengths", [[7, 9], [7, 7], [5], [0, 2]], ids=str)
def test_the_ragged_dimension_survives(core, lengths):
    nested, want = ragged_on_2(lengths)
    data = round_trip(table(len(lengths), x=nested), core)
    assert container(data, "x") == "jagged"
    assert_rows(data, "x", want)
    assert_same_tensor(column(data, "x").values(), torch.cat(want, dim=1), "values")
    assert column(data, "x").offsets().tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()


def test_rows_ragged_in_two_dimensions_come_back_strided(core):
    want = [ramp(3, 2), ramp(1, 5, start=30), ramp(2, 4, start=60)]
    data = round_trip(table(3, x=strided(want)), core)
    assert container(data, "x") == "strided"
    assert_rows(data, "x", want)


def test_the_public_constructor_stands_in_for_the_private_one(core, monkeypatch):
    monkeypatch.delattr(torch, "_nested_view_from_buffer")
    want = [ramp(3, 2), ramp(1, 5)]
    data = round_trip(table(2, x=strided(want)), core)
    assert container(data, "x") == "strided"
    assert_rows(data, "x", want)


def test_rows_of_different_rank_are_a_stack_of_tensors(core):
    want = [torch.tensor(1.0), torch.tensor([2.0]), torch.empty(0, 2)]
    data = round_trip(table(3, x=want), core)
    assert container(data, "x") == "objects"
    assert_rows(data, "x", want)
    assert data["x"][1].tolist() == [2.0]


@pytest.mark.parametrize("kind", OBJECTS)
def test_python_objects_come_back_as_themselves(core, kind):
    data = round_trip(table(7, x=OBJECTS[kind]), core)
    assert container(data, "x") == "objects"
    assert_objects(rows(data, "x"), OBJECTS[kind])
    assert data["x"] == OBJECTS[kind]


def test_a_row_put_alone_comes_back_as_one_row(core):
    fields = {"r": torch.tensor(0.5), "v": ramp(3), "n": 3, "a": np.arange(2), "e": [], "t": ("x",), "none": None}
    data = round_trip(fields, core)
    assert data.batch_size == torch.Size([1])
    assert_same_tensor(column(data, "r"), torch.tensor([0.5]))
    assert_rows(data, "v", [ramp(3)])
    assert [rows(data, field) for field in ("n", "e", "t", "none")] == [[3], [[]], [("x",)], [None]]
    assert rows(data, "a")[0].tolist() == [0, 1]


def test_objects_that_are_tensors_or_tensordicts_inside_something_come_back(core):
    value = {"image": ramp(2, 2), "table": TensorDict({"a": ramp(2)}, [2])}
    (got,) = rows(round_trip({"x": value}, core), "x")
    assert_same_tensor(got["image"], ramp(2, 2))
    assert_same_tensor(got["table"]["a"], ramp(2))


def test_no_columns_are_an_empty_result_without_rows(core):
    data = read(core, {})
    assert (data.batch_size, list(data.keys())) == (torch.Size([0]), [])


@pytest.fixture
def data(core: Core) -> TensorDict:
    fields = table(
        3,
        ids=ramp(3, 2),
        mask=ramp(3, 2, dtype=torch.bool),
        logp=jagged([ramp(2, dtype=torch.float32), ramp(1, dtype=torch.float32), ramp(3, dtype=torch.float32)]),
        adv=jagged([torch.ones(2), torch.ones(1), torch.ones(3)]),
        reward=ramp(3, dtype=torch.float32),
        uid=["a", "b", "c"],
        info=[{"n": 1}, [2], None],
        grid=strided([ramp(1, 2), ramp(2, 1), ramp(1, 1)]),
    )
    return round_trip(fields, core)


def test_columns_of_equal_lengths_share_offsets_and_combine(data):
    assert column(data, "logp").offsets() is column(data, "adv").offsets()
    assert column(data, "logp").offsets() is not column(data, "ids").offsets()
    assert_same_tensor((data["logp"] * data["adv"]).values(), torch.tensor([1.0, 2, 1, 1, 2, 3]))
    assert (data["ids"] * data["mask"]).values().tolist() == [0, 0, 3, 0, 0, 6]


def test_object_columns_are_what_programs_ask_for(data):
    assert type(data["uid"]) is LinkedList
    assert type(data.get("uid")) is NonTensorStack
    assert dict(data.items())["uid"].tolist() == ["a", "b", "c"]
    assert data.pop("uid").tolist() == ["a", "b", "c"]
    assert "uid" not in data


def test_an_integer_gives_plain_values(data):
    row = data[1]
    assert (row["uid"], row["info"], row["reward"].item()) == ("b", [2], 2.0)
    assert_same_tensor(row["ids"], torch.tensor([3, 4]))
    assert_same_tensor(row["logp"], torch.tensor([1.0]))
    assert data[0]["info"] == {"n": 1}
    assert data[2]["info"] is None


def test_results_are_indexed_selected_assigned_padded_and_detached(data):
    data = data.exclude("grid")
    assert data[1:]["uid"] == ["b", "c"]
    assert_rows(data[[2, 0]], "ids", [torch.tensor([5, 6]), torch.tensor([1, 2])])
    assert list(data.select("ids", "uid").keys()) == ["ids", "uid"]
    data["new"] = torch.zeros(3)
    data["uid"][0] = "z"
    assert data["uid"] == ["z", "b", "c"]
    del data["new"]
    padded = column(data, "logp").to_padded_tensor(0)
    assert padded.tolist() == [[1, 2, 0], [1, 0, 0], [1, 2, 3]]
    assert data.detach()["uid"] == ["z", "b", "c"]
    assert [part["uid"] for part in data.split(2)] == [["z", "b"], ["c"]]
    assert torch.cat([data.select("uid", "reward"), data.select("uid", "reward")])["uid"] == ["z", "b", "c"] * 2


def test_private_attributes_that_a_program_reads_are_there(data):
    nested = column(data, "logp")
    assert nested._values.data_ptr() == nested.values().data_ptr()
    assert nested._offsets is nested.offsets()
    assert nested.is_contiguous()
    assert (nested._get_min_seqlen(), nested._get_max_seqlen()) == (1, 3)


def saved(data: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved,
    "pickle": lambda data: pickle.loads(pickle.dumps(data)),
    "deepcopy": copy.deepcopy,
    "clone": lambda data: data.clone(),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_outlive_the_memory_of_the_result(core, how):
    grid = strided([ramp(1, 2), ramp(2, 1)])
    fields = table(2, x=ramp(2, 3), r=jagged([ramp(1), ramp(2)]), s=ramp(2), u=["a", {"b": 1}], g=grid)
    data = round_trip(fields, core)
    other = COPIES[how](data)
    del data
    gc.collect()
    assert core.held == {}
    assert_rows(other, "x", ramp(2, 3))
    assert_rows(other, "r", [ramp(1), ramp(2)])
    assert_rows(other, "g", [ramp(1, 2), ramp(2, 1)])
    assert (other["s"].tolist(), other["u"]) == ([1, 2], ["a", {"b": 1}])


def test_a_pickle_holds_one_column_of_a_shared_block_only(core):
    data = round_trip(table(2, x=ramp(2, 3), big=torch.zeros(2, 1 << 16)), core)
    assert len(pickle.dumps(data.select("x"))) < 10_000


def test_results_are_writable_and_independent(core):
    columns = take(_columns.pack_table(table(2, x=ramp(2, 4), s=ramp(2), g=strided([ramp(1, 2), ramp(2, 1)]))))
    first, second = read(core, columns), read(core, columns)
    column(first, "x").unbind()[1][0] = -1
    column(first, "x").values().fill_(-1)
    column(first, "s")[0] = -1
    column(first, "g").unbind()[0].fill_(-1)
    assert_rows(second, "x", ramp(2, 4))
    assert_rows(second, "s", ramp(2))
    assert_rows(second, "g", [ramp(1, 2), ramp(2, 1)])


def test_memory_is_given_back_once_when_the_last_view_dies(core):
    grid = strided([ramp(1, 2), ramp(2, 1)])
    data = round_trip(table(2, x=ramp(2, 4), r=jagged([ramp(2), ramp(1)]), s=ramp(2), u=["a", "b"], g=grid), core)
    # The bytes of objects and two offsets were given back already; four columns are alive.
    assert (len(core.held), len(core.released)) == (4, 3)
    part = column(data, "x").values().view(torch.int32)[:1]
    del data["x"]
    assert len(core.held) == 4
    row = column(data, "r").unbind()[1]
    del data
    assert len(core.held) == 2
    assert part[0] == 1
    assert row.tolist() == [1]
    del part
    assert len(core.held) == 1
    del row
    assert core.held == {}
    assert sorted(core.released) == list(range(1, 8))


def test_columns_without_bytes_need_no_memory(core):
    data = round_trip(table(2, x=torch.empty(2, 0), u=[None, None]), core)
    assert core.held == {}
    assert_rows(data, "x", torch.empty(2, 0))
    assert rows(data, "u") == [None, None]


def test_memory_in_a_cycle_waits_for_the_garbage_collector(core):
    data = round_trip(table(2, s=ramp(2)), core)
    loop: list[Any] = [column(data, "s")]
    loop.append(loop)
    del data, loop
    assert len(core.held) == 1
    gc.collect()
    assert core.held == {}


def test_views_may_die_on_another_thread(core):
    box = [column(round_trip(table(2, s=ramp(2)), core), "s")]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert core.held == {}


def test_autograd_keeps_memory_as_long_as_it_needs_it(core):
    data = round_trip(table(2, s=ramp(2, dtype=torch.float32)), core)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * column(data, "s")).sum()
    del data
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2]
    del loss
    assert core.held == {}


def test_a_forked_child_gives_nothing_back(core):
    data = round_trip(table(2, s=ramp(2)), core)

    def child(pipe: Any) -> None:
        nonlocal data
        value = column(data, "s").tolist()
        del data
        gc.collect()
        pipe.send((value, core.released))
        pipe.close()
        os._exit(0)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(30)
    assert ours.recv() == ([1, 2], [])
    process.join(30)
    assert len(core.held) == 1


def test_a_failed_result_gives_all_memory_back(core):
    columns = take(_columns.pack_table(table(2, a=ramp(2), b=["x", "y"], c=ramp(2, 3))))
    broken = columns["b"]._replace(cells=[cell._replace(codec=77) for cell in columns["b"].cells])
    with pytest.raises(ValueError, match="field 'b': row 0"):
        read(core, {**columns, "b": broken})
    gc.collect()
    assert core.held == {}


def test_unknown_dtypes_and_forms_are_refused_and_give_memory_back(core):
    columns = take(_columns.pack_table(table(2, a=ramp(2))))
    reply = core.reply([columns["a"]])
    _patch(reply.address + 1, 200)
    with pytest.raises(ValueError, match="dtype number 200"):
        _results.build(["a"], reply.address, 2, core.release)
    reply = core.reply([columns["a"]])
    _patch(reply.address + 3, 9)
    with pytest.raises(ValueError, match="field 'a': result form 9"):
        _results.build(["a"], reply.address, 2, core.release)
    gc.collect()
    assert core.held == {}


def _patch(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


def test_members_are_built_as_the_constructor_builds_them():
    assert _results._fast_member, "tensordict changed: stacks are built by its constructor, four times slower"
    for value in ("a", 1, None, [1], {"a": 1}, (1,), np.ones(2), torch.ones(2)):
        fast, slow = _results._member(value), NonTensorData(data=value)
        assert fast.__dict__.keys() == slow.__dict__.keys()
        assert fast._non_tensordict.keys() == slow._non_tensordict.keys()
        assert type(fast.data) is type(slow.data)
        assert (fast.batch_size, fast.device) == (slow.batch_size, slow.device)


@pytest.mark.parametrize("fast", [True, False])
def test_stacks_of_anything_are_right_either_way(monkeypatch, fast):
    monkeypatch.setattr(_results, "_fast_member", fast)
    values = ["a", [1, 2], {"k": [3]}, None, (4,), 5, np.ones(2), torch.ones(2)]
    stack = _results.stack_of(values)
    assert type(stack) is NonTensorStack
    for got, want in zip(stack.tolist(), values, strict=True):
        assert type(got) is type(want)
    data = TensorDict({"x": stack}, [8])
    assert data["x"][:6] == values[:6]
    assert data[1]["x"] == [1, 2]
    copied = pickle.loads(pickle.dumps(data))
    assert copied["x"][:6] == values[:6]
    assert torch.stack([data[0], data[3]]).get("x").tolist() == ["a", None]
