"""BatchMeta: what it says about samples, and that selections are independent, complete and quick."""

from __future__ import annotations

import copy
import logging
import pickle
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from inputs import jagged, ragged_on_2, ramp, table

from transfer_queue import _values
from transfer_queue.metadata import BatchMeta, FieldSchema


def schema(*fields: str, dtype: torch.dtype = torch.int64, shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "is_nested": False, "is_non_tensor": False} for name in fields}


def ragged(*lengths: int) -> dict[str, Any]:
    shapes = [(n,) for n in lengths]
    return {
        "dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes
    }  # fmt: skip


def meta(indexes: list[int], *fields: str, partition: str = "p", ready: int = 1, **more: Any) -> BatchMeta:
    return BatchMeta(
        global_indexes=indexes,
        partition_ids=[partition] * len(indexes),
        field_schema=schema(*fields),
        production_status=np.full(len(indexes), ready, dtype=np.int8),
        **more,
    )


def full() -> BatchMeta:
    """Four samples with something of everything; what a sample has follows from its index, 10 to 13."""
    batch = BatchMeta(
        [10, 11, 12, 13],
        ["p", "q", "p", "q"],
        {**schema("x"), "r": ragged(0, 1, 2, 3)},
        [1, 0, 1, 0],
        {"step": 1},
        [{"n": 10}, {"n": 11}, {"n": 12}, {"n": 13}],
        [{"x": 10, "_all": 10}, {"x": 11}, {"x": 12}, {"x": 13}],
    )
    batch._generations = np.array([100, 101, 102, 103])
    return batch


def assert_is_part_of_full(batch: BatchMeta, indexes: list[int]) -> None:
    """Every sample has all that the sample of this index has in `full`."""
    assert batch.global_indexes == indexes
    assert batch.partition_ids == [["p", "q"][index % 2] for index in indexes]
    assert batch._generations.tolist() == [index + 90 for index in indexes]
    assert batch.production_status.tolist() == [1 - index % 2 for index in indexes]
    assert batch.get_all_custom_meta() == [{"n": index} for index in indexes]
    assert [one["x"] for one in batch._custom_backend_meta] == indexes
    assert [tuple(shape) for shape in batch.get_shapes("r")] == [(index - 10,) for index in indexes]
    assert [tuple(shape) for shape in batch.get_shapes("x")] == [(2,)] * len(indexes)
    assert batch.extra_info == {"step": 1}


SELECTIONS: dict[str, tuple[Callable[[BatchMeta], BatchMeta], list[int]]] = {
    "select_samples": (lambda batch: batch.select_samples([2, 0, 2]), [12, 10, 12]),
    "no samples": (lambda batch: batch.select_samples([]), []),
    "one sample": (lambda batch: batch.select_samples(torch.tensor([3])), [13]),
    "index": (lambda batch: batch[1], [11]),
    "negative index": (lambda batch: batch[-1], [13]),
    "slice": (lambda batch: batch[1:], [11, 12, 13]),
    "steps": (lambda batch: batch[::-2], [13, 11]),
    "select_fields": (lambda batch: batch.select_fields(["x", "r", "unknown"]), [10, 11, 12, 13]),
    "chunk": (lambda batch: batch.chunk(3)[0], [10, 11]),
    "chunk_by_partition": (lambda batch: batch.chunk_by_partition()[1], [11, 13]),
    "concat": (lambda batch: BatchMeta.concat([batch[2:], BatchMeta(), batch[:1]]), [12, 13, 10]),
    "union": (lambda batch: batch.union(batch), [10, 11, 12, 13]),
    "union with nothing": (lambda batch: BatchMeta().union(batch), [10, 11, 12, 13]),
    "copy": (lambda batch: batch.copy(), [10, 11, 12, 13]),
    "deepcopy": (copy.deepcopy, [10, 11, 12, 13]),
    "pickle": (lambda batch: pickle.loads(pickle.dumps(batch)), [10, 11, 12, 13]),
}


@pytest.mark.parametrize("how", SELECTIONS)
def test_selections_keep_everything_of_their_samples(how):
    select, indexes = SELECTIONS[how]
    batch = full()
    assert_is_part_of_full(select(batch), indexes)
    assert_is_part_of_full(batch, [10, 11, 12, 13])


@pytest.mark.parametrize("seen", ["before", "between", "after"])
@pytest.mark.parametrize("how", SELECTIONS)
def test_selections_do_not_share_what_can_be_changed(how, seen):
    """Tags are copied late; whoever looks at them first must not notice."""
    select, indexes = SELECTIONS[how]
    batch = full()
    tags = batch.custom_meta if seen == "before" else None
    part = select(batch)
    again = select(batch)
    if tags is None and seen == "between":
        tags = batch.custom_meta
    for one in part.custom_meta:
        one["n"] = "part"
    for one in tags if tags is not None else batch.custom_meta:
        one["n"] = "batch"
    part.production_status[:] = 7
    part.extra_info["step"] = "part"
    for one in part._custom_backend_meta:
        one["x"] = "part"
    assert_is_part_of_full(again, indexes)
    assert all(one["n"] == "batch" for one in batch.custom_meta)
    assert batch.production_status.tolist() == [1, 0, 1, 0]
    assert batch.extra_info == {"step": 1}
    assert [one["x"] for one in batch._custom_backend_meta] == [10, 11, 12, 13]


def test_repeated_samples_have_tags_of_their_own():
    batch = full().select_samples([0, 0])
    batch.custom_meta[0]["n"] = "first"
    assert batch.custom_meta == [{"n": "first"}, {"n": 10}]


def test_properties_describe_the_batch():
    batch = meta([7, 3], "zeta", "alpha")
    assert (batch.size, len(batch), batch.field_names, batch.is_ready) == (2, 2, ["alpha", "zeta"], True)
    text = "BatchMeta(size=2, field_names=['alpha', 'zeta'], is_ready=True, global_indexes=[7, 3], extra_info={})"
    assert str(batch) == repr(batch) == text
    assert "global_indexes=[0, 1, 2, 3, 4, 5, 6, 7, ...]" in repr(meta(list(range(9))))


def test_without_arguments_it_is_empty_and_falsy():
    for empty in (BatchMeta(), BatchMeta([], []), BatchMeta.empty()):
        assert not empty
        assert (empty.size, empty.is_ready, empty.extra_info, empty.custom_meta, empty.field_schema) == (
            0,
            False,
            {},
            [],
            {},
        )
    assert BatchMeta.empty(extra_info={"step": 1}).extra_info == {"step": 1}


def test_positions_and_indexes_may_be_any_list_of_whole_numbers():
    for made in (np.array([5, 6]), torch.tensor([5, 6]), (5, 6), range(5, 7), iter([5, 6])):
        batch = BatchMeta(made, ["p", "p"])
        assert (batch.global_indexes, set(map(type, batch.global_indexes))) == ([5, 6], {int})
    for rows in (
        [1, 0],
        (1, 0),
        np.array([1, 0], dtype=np.uint8),
        torch.tensor([1, 0]),
        range(1, -1, -1),
        [True, False],
    ):
        assert meta([5, 6]).select_samples(rows).global_indexes == [6, 5]
    for wrong in ([1.0], ["1"], np.array([0.0]), [[0]], [None]):
        with pytest.raises(TypeError):
            meta([5, 6]).select_samples(wrong)
    with pytest.raises(ValueError, match="range"):
        meta([5, 6]).select_samples(np.array([2**63], dtype=np.uint64))


def test_default_status_is_not_ready():
    batch = BatchMeta([1, 2], ["p", "p"], field_schema=schema("x"))
    assert (batch.production_status.tolist(), batch.production_status.dtype, batch.is_ready) == ([0, 0], np.int8, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": ["p"]},
        {"production_status": np.ones(3, dtype=np.int8)},
        {"custom_meta": [{}]},
        {"_custom_backend_meta": [{}]},
        {"field_schema": {"x": ragged(1)}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_lengths_that_disagree_are_a_value_error(wrong):
    right = {"global_indexes": [1, 2], "partition_ids": ["p", "p"], "field_schema": schema("x")}
    with pytest.raises(
        ValueError,
        match=rf"{'per_sample_shapes' if 'field_schema' in wrong else next(iter(wrong))} length \d != batch_size 2",
    ):
        BatchMeta(**{**right, **wrong})


def test_inputs_are_copied():
    indexes, tags, shapes, status = [1, 2], [{"a": 1}, {}], ragged(1, 2), np.ones(2, dtype=np.int8)
    batch = BatchMeta(indexes, ["p", "p"], {"x": shapes}, status, custom_meta=tags)
    indexes.append(3)
    tags[0]["a"] = 2
    shapes["per_sample_shapes"].append((3,))
    status[0] = 0
    assert (batch.global_indexes, batch.custom_meta) == ([1, 2], [{"a": 1}, {}])
    assert batch.get_shapes("x") == [(1,), (2,)]
    assert batch.production_status.tolist() == [1, 1]


def test_no_attribute_can_be_added_by_mistake():
    with pytest.raises(AttributeError):
        BatchMeta().parition_ids = []


def test_pickles_of_read_only_arrays_stay_writable():
    batch = meta([4, 5], "x")
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    again.production_status[0] = 0
    assert (again.production_status.tolist(), again.is_ready) == ([0, 1], True)


def test_ready_is_what_it_was_until_fields_are_added():
    batch = meta([1, 2], "x")
    batch.production_status[0] = 0
    assert batch.is_ready
    batch.add_fields(table(2, y=ramp(2)), set_all_ready=False)
    assert not batch.is_ready


def ints(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def wire(field: str, kind: int, dtype: torch.dtype | None, form: int, **more: Any) -> list[Any]:
    """A column as core/wire writes it."""
    number = 0 if dtype is None else _values.NUMBERS[dtype]
    rest = [more.get(name) for name in ("lengths", "ndims", "dims", "codecs", "sizes")]
    return [kind, number, 1, 3, form, field, more.get("shape"), more.get("vary", 0), *rest]


def test_a_reply_becomes_a_batch():
    columns = [
        wire("numbers", 1, torch.float32, 1, shape=b""),
        wire("vectors", 1, torch.int64, 1, shape=ints(2, 3)),
        wire("ragged", 1, torch.bfloat16, 2, shape=ints(0, 5), vary=0, lengths=ints(1, 0, 7)),
        wire("ragged on 2", 1, torch.bool, 2, shape=ints(4, 0), vary=1, lengths=ints(1, 0, 7)),
        wire("free", 1, torch.int64, 3, ndims=b"\x00\x02\x01", dims=ints(3, 4, 9)),
        wire("objects", 2, None, 4, codecs=b"\x00\x01\x03", sizes=ints(1, 2, 0)),
        wire("registered", 0, None, 0),
    ]
    batch = BatchMeta._from_reply(
        ints(5, 3, 9), ints(1, 1, 2), "p", map(FieldSchema.from_wire, columns), b"\x01\x00\x01", [{"a": 1}, {}, {}]
    )
    assert (batch.global_indexes, batch.partition_ids) == ([5, 3, 9], ["p"] * 3)
    assert (batch._generations.tolist(), batch.production_status.tolist()) == ([1, 1, 2], [1, 0, 1])
    assert batch.custom_meta == [{"a": 1}, {}, {}]
    shapes = {
        name: [tuple(shape) if shape is not None else None for shape in batch.get_shapes(name)]
        for name in batch._fields
    }
    assert shapes == {
        "numbers": [()] * 3,
        "vectors": [(2, 3)] * 3,
        "ragged": [(1, 5), (0, 5), (7, 5)],
        "ragged on 2": [(4, 1), (4, 0), (4, 7)],
        "free": [(), (3, 4), (9,)],
        "objects": [None] * 3,
        "registered": [None] * 3,
    }
    described = batch.field_schema
    assert [described[name]["dtype"] for name in shapes] == [
        *[torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.int64, None, None]
    ]
    assert [described[name]["is_nested"] for name in shapes] == [False, False, True, True, True, False, False]
    assert [described[name]["is_non_tensor"] for name in shapes] == [False] * 5 + [True, False]
    assert ["per_sample_shapes" in described[name] for name in shapes] == [described[n]["is_nested"] for n in shapes]
    batch.production_status[0] = 0
    batch.global_indexes.append(1)


def test_a_reply_without_status_is_ready():
    batch = BatchMeta._from_reply([1, 2], [0, 0], "p", [("x", FieldSchema.uniform(torch.int64, ()))], None)
    assert (batch.is_ready, batch.custom_meta) == (True, [{}, {}])


def test_unknown_fields_are_a_key_error():
    for call in (meta([1], "x").get_shapes, meta([1], "x").get_dtypes):
        with pytest.raises(KeyError, match="'y' not found in field_schema, which has"):
            call("y")


def test_add_fields_takes_the_schema_from_the_data_and_marks_ready():
    batch = BatchMeta([1, 2], ["p", "p"])
    turned, _ = ragged_on_2([2, 3])
    fields = table(
        2, n=ramp(2), dense=ramp(2, 3, dtype=torch.float32), j=jagged([ramp(4), ramp(1)]), r=turned, t=["a", "b"]
    )
    assert batch.add_fields(fields) is batch
    assert (batch.field_names, batch.is_ready) == (["dense", "j", "n", "r", "t"], True)
    assert batch.get_dtypes("dense") == [torch.float32] * 2
    assert [[tuple(shape) for shape in batch.get_shapes(name)] for name in ("n", "dense", "j", "r")] == [
        *[[(), ()], [(3,), (3,)], [(4,), (1,)], [(4, 2), (4, 3)]]
    ]
    described = batch.field_schema["j"]
    assert (described["is_nested"], tuple(described["shape"])) == (True, (4,))
    assert batch.field_schema["t"] == {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def test_added_fields_do_not_depend_on_the_data_any_more():
    batch = BatchMeta([1, 2], ["p", "p"])
    nested = jagged([ramp(4), ramp(1)])
    batch.add_fields(table(2, j=nested))
    nested.offsets().fill_(0)
    assert [tuple(shape) for shape in batch.get_shapes("j")] == [(4,), (1,)]


def test_add_fields_can_leave_the_status_alone_and_refuses_another_batch_size(caplog):
    batch = BatchMeta([1, 2], ["p", "p"])
    batch.add_fields(table(2, x=ramp(2, 3)), set_all_ready=False)
    assert batch.is_ready is False
    with pytest.raises(ValueError, match="batch size mismatch: 3 rows of data for 2 samples"):
        batch.add_fields(table(3, y=ramp(3, 3)))
    with caplog.at_level(logging.WARNING):
        batch.add_fields(table(0, y=ramp(0, 3)))
    assert (batch.field_names, "no rows" in caplog.text) == (["x"], True)


def test_apply_field_schema_replaces_fields():
    batch = meta([1, 2], "x", "y", ready=0)
    assert batch.apply_field_schema({"x": ragged(3, 4)}) is batch
    assert (batch.get_shapes("x"), batch.get_shapes("y"), batch.is_ready) == ([(3,), (4,)], [(2,), (2,)], True)
    with pytest.raises(ValueError, match="field 'x': per_sample_shapes length 1 != batch_size 2"):
        batch.apply_field_schema({"x": ragged(3)})


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 4), (5, 4), (0, 4)],
        [[2, 7], [2, 1], [2, 7]],
        [(2, 2), (2, 2), (2, 2)],
        [(3, 4), (4, 3), (1, 1)],
        [(3,), (3, 4), ()],
        [(), (), ()],
        [(3,), None, (2,)],
        [(2**40,), (1,), (0,)],
    ],
    ids=str,
)
def test_shapes_of_samples_stay_what_they_were(shapes):
    described = {**ragged(1), "per_sample_shapes": shapes}
    batch = BatchMeta([1, 2, 3], ["p"] * 3, {"x": described})
    want = [None if shape is None else tuple(shape) for shape in shapes]

    def shapes_of(part: BatchMeta) -> list[Any]:
        got = [None if shape is None else tuple(shape) for shape in part.get_shapes("x")]
        assert [one.fields["x"]["shape"] for one in part.samples] == part.get_shapes("x")
        return got

    assert shapes_of(batch) == shapes_of(pickle.loads(pickle.dumps(batch))) == want
    assert shapes_of(batch.select_samples([2, 0])) == [want[2], want[0]]
    assert shapes_of(BatchMeta.concat([batch, batch[1:]])) == want + want[1:]
    batch.reorder([1, 2, 0])
    assert shapes_of(batch) == [want[1], want[2], want[0]]


def test_field_schema_can_be_assigned():
    batch = meta([1, 2], "x")
    batch.field_schema = schema("y")
    assert batch.field_names == ["y"]


def test_custom_meta_updates_per_sample():
    batch = meta([1, 2], "x", custom_meta=[{"a": 1}, {"a": 2}])
    batch.update_custom_meta([{"b": 3}, {"a": 4}])
    batch.update_custom_meta(None)
    assert batch.get_all_custom_meta() == [{"a": 1, "b": 3}, {"a": 4}]
    with pytest.raises(ValueError, match="1 dicts must match the batch size: 2"):
        batch.update_custom_meta([{}])
    batch.clear_custom_meta()
    assert batch.custom_meta == [{}, {}]
    batch.custom_meta = [{"z": 1}, {}]
    assert batch.get_all_custom_meta() == [{"z": 1}, {}]


def test_all_custom_meta_is_a_deep_copy():
    batch = meta([1], "x", custom_meta=[{"a": [1]}])
    batch.get_all_custom_meta()[0]["a"].append(2)
    assert batch.custom_meta == [{"a": [1]}]


def test_extra_info_is_a_dict_of_the_batch():
    batch = meta([1], "x")
    batch.set_extra_info("a", [1])
    batch.update_extra_info({"b": 2})
    assert (batch.has_extra_info("a"), batch.get_extra_info("c", "none")) == (True, "none")
    batch.get_all_extra_info()["a"].append(2)
    assert batch.get_extra_info("a") == [1]
    assert (batch.remove_extra_info("b"), batch.remove_extra_info("b")) == (2, None)
    batch.extra_info = {"plain": "assignment"}
    batch.clear_extra_info()
    assert batch.extra_info == {}


def test_selections_outside_of_the_batch_are_refused():
    batch = meta([10, 11, 12], "x")
    for index in (3, -1):
        with pytest.raises(ValueError, match=rf"must be in range \[0, 3\), got {index}"):
            batch.select_samples([0, index])
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"out of range: {index} for 3 samples"):
            batch[index]
    for wrong in ("x", 1.0, True, None):
        with pytest.raises(TypeError, match="not supported, want int or slice"):
            batch[wrong]


def test_select_fields_keeps_only_named_fields_and_shared_backend_info():
    batch = full().select_fields(["r", "unknown"])
    assert (batch.field_names, batch.global_indexes) == (["r"], [10, 11, 12, 13])
    assert batch._custom_backend_meta == [{"_all": 10}, {}, {}, {}]
    assert full().select_fields("x").field_names == ["x"]


def test_samples_are_read_only_views():
    batch = full()
    sample = batch.samples[2]
    assert (sample.global_index, sample.partition_id, sample.production_status) == (12, "p", 1)
    assert (sample.custom_meta["n"], tuple(sample.fields["r"]["shape"]), sample.fields["x"]["shape"]) == (
        12,
        (2,),
        (2,),
    )
    assert "per_sample_shapes" not in sample.fields["r"]
    for mapping in (sample.custom_meta, sample.fields, sample.fields["x"]):
        with pytest.raises(TypeError):
            mapping["n"] = 2
    assert [one.global_index for one in batch.samples] == [10, 11, 12, 13]
    assert [one.global_index for one in batch.samples[1:3]] == [11, 12]
    assert (len(batch.samples), batch.samples[-1].global_index) == (4, 13)
    with pytest.raises(IndexError):
        batch.samples[4]
    assert dict(meta([1], "x").samples[0].custom_meta) == {}


def test_chunk_gives_the_first_parts_one_sample_more(caplog):
    def chunks(parts: int) -> list[list[int]]:
        return [chunk.global_indexes for chunk in meta([0, 1, 2, 3, 4], "x").chunk(parts)]

    assert chunks(1) == [[0, 1, 2, 3, 4]]
    assert chunks(2) == [[0, 1, 2], [3, 4]]
    assert chunks(3) == [[0, 1], [2, 3], [4]]
    assert caplog.text == ""
    assert chunks(6) == [[0], [1], [2], [3], [4], []]
    assert "some are empty" in caplog.text
    with pytest.raises(ZeroDivisionError):
        chunks(0)
    with pytest.raises(ValueError, match="-1"):
        chunks(-1)


def test_chunk_by_partition_groups_in_first_seen_order():
    batch = BatchMeta([1, 2, 3, 4], ["b", "a", "b", "c"], field_schema=schema("x"))
    parts = batch.chunk_by_partition()
    assert [(part.partition_ids[0], part.global_indexes) for part in parts] == [("b", [1, 3]), ("a", [2]), ("c", [4])]


def test_union_joins_fields_and_is_ready_where_both_are():
    left, right = (
        meta([5, 6, 8], "x"),
        meta([5, 6, 8], "y", extra_info={"step": 2}, custom_meta=[{"a": 1}, {}, {"c": 1}]),
    )
    left.custom_meta = [{"a": 0, "b": 0}, {}, {}]
    left._generations, right._generations = np.array([1, 2, 3]), np.array([1, 7, 0])
    right.production_status[1] = 0
    both = left.union(right)
    assert both.field_names == ["x", "y"]
    assert (both.production_status.tolist(), both.is_ready) == ([1, 0, 1], False)
    assert both.extra_info == {"step": 2}
    assert both.custom_meta == [{"a": 1, "b": 0}, {}, {"c": 1}]
    assert both._generations.tolist() == [1, 7, 3]
    assert left.field_names == ["x"]


def test_union_of_other_samples_or_partitions_is_a_value_error():
    with pytest.raises(ValueError, match="global_indexes do not match: 6 and 7 at row 1"):
        meta([5, 6], "x").union(meta([5, 7], "y"))
    with pytest.raises(ValueError, match="global_indexes do not match: 2 and 1 samples"):
        meta([5, 6], "x").union(meta([5], "y"))
    with pytest.raises(ValueError, match="partition_ids do not match: 'p' and 'q' at row 0"):
        meta([5, 6], "x").union(meta([5, 6], "y", partition="q"))


def test_concat_joins_schemas():
    parts = [
        BatchMeta([1], ["p"], {"x": schema("x", shape=(2,))["x"], "r": ragged(4), "s": schema("s")["s"]}),
        BatchMeta([2, 3], ["p", "p"], {"x": schema("x", shape=(3,))["x"], "r": ragged(5, 6), "s": schema("s")["s"]}),
    ]
    joined = BatchMeta.concat(parts)
    assert [tuple(shape) for shape in joined.get_shapes("x")] == [(2,), (3,), (3,)]
    assert [tuple(shape) for shape in joined.get_shapes("r")] == [(4,), (5,), (6,)]
    described = joined.field_schema
    assert [(described[name]["is_nested"], described[name]["shape"]) for name in ("x", "r", "s")] == [
        *[(True, None), (True, None), (False, (2,))]
    ]


def test_concat_refuses_other_fields_dtypes_or_conflicting_extra_info():
    other = BatchMeta([2], ["p"], field_schema=schema("x", dtype=torch.float32))
    for parts, message in [
        ([meta([1], "x"), meta([2], "y")], r"field_names mismatch: \['y'\] and \['x'\]"),
        ([meta([1], "x"), other], "field 'x': dtype mismatch: torch.float32 and torch.int64"),
        ([meta([1], extra_info={"s": 1}), meta([2], extra_info={"s": 2})], "'s' has conflicting values"),
        ([meta([1], extra_info={"s": ramp(2)}), meta([2], extra_info={"s": ramp(3)})], "conflicting values"),
    ]:
        with pytest.raises(ValueError, match=message):
            BatchMeta.concat(parts)
    same = BatchMeta.concat([meta([1], extra_info={"s": ramp(2)}), meta([2], extra_info={"s": ramp(2), "t": 1})])
    assert list(same.extra_info) == ["s", "t"]


def test_concat_without_validation_has_the_fields_of_the_first_batch():
    joined = BatchMeta.concat([meta([1], "x", "y"), meta([2], "y", "z")], validate=False)
    assert joined.field_names == ["x", "y"]
    assert (joined.get_shapes("x"), joined.get_dtypes("x")) == ([(2,), (2,)], [torch.int64] * 2)
    first = BatchMeta([1], ["p"], {"r": ragged(3)})
    assert BatchMeta.concat([first, meta([2], "x")], validate=False).get_shapes("r") == [(3,), None]


def test_reorder_is_in_place_and_wants_a_permutation():
    batch = full()
    batch.reorder([2, 0, 3, 1])
    assert_is_part_of_full(batch, [12, 10, 13, 11])
    for wrong, message in [
        ([0, 1], "length 2 mismatch batch size 4"),
        ([0, 0, 1, 2], "duplicates"),
        ([0, 1, 2, 4], r"must be in range \[0, 4\), got 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            batch.reorder(wrong)


def test_copy_is_deep():
    batch = meta([1], "x", custom_meta=[{"a": [1]}], extra_info={"e": [1]})
    twin = batch.copy()
    twin.custom_meta[0]["a"].append(2)
    twin.extra_info["e"].append(2)
    twin.global_indexes.append(2)
    assert (batch.custom_meta, batch.extra_info, batch.global_indexes) == ([{"a": [1]}], {"e": [1]}, [1])


def large(size: int = 100_000) -> BatchMeta:
    """A reply of this many samples with two ragged fields and tags."""
    lengths = np.arange(size)
    columns = [
        ("ids", FieldSchema.varying(torch.int64, (0,), 0, lengths)),
        ("mask", FieldSchema.varying(torch.bool, (0,), 0, lengths)),
        ("reward", FieldSchema.uniform(torch.float32, ())),
        ("text", FieldSchema.objects()),
    ]
    tags = [{"step": i, "source": "a"} for i in range(size)]
    return BatchMeta._from_reply(lengths.tolist(), [0] * size, "p", columns, None, tags)


LARGE: dict[str, Callable[[BatchMeta], Any]] = {
    "chunk": lambda batch: batch.chunk(8),
    "concat": lambda batch: BatchMeta.concat([batch] * 2),
    "union": lambda batch: batch.union(batch.select_fields("ids")),
    "select": lambda batch: batch.select_samples(range(len(batch) - 1, -1, -1)),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_hundred_thousand_samples_are_no_burden(what):
    """They take 1 to 20 ms, 60 for a pickle; the limit only has to tell columns from a dict per sample and field."""
    batch = large()
    start = time.process_time()
    LARGE[what](batch)
    assert time.process_time() - start < 0.5
