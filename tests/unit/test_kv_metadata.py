"""KVBatchMeta: keys, tags and fields that KV calls return and programs pass between processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pickletools
from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict

import transfer_queue
from transfer_queue import metadata
from transfer_queue.metadata import BatchMeta, KVBatchMeta


def meta(*keys: str, **more: Any) -> KVBatchMeta:
    given = {"tags": [{"of": key} for key in keys], "partition_id": "p", "fields": ["x", "y"], **more}
    return KVBatchMeta(keys=list(keys), **given)


def test_defaults_are_an_empty_batch():
    empty = KVBatchMeta()
    assert (empty.keys, empty.tags, empty.partition_id, empty.fields, empty.extra_info) == ([], [], None, None, {})
    assert (len(empty), empty.size, bool(empty)) == (0, 0, False)


def test_construction_refuses_what_does_not_fit():
    for wrong, message in [
        ({"keys": ["a", "b"], "tags": [{}]}, "keys and tags must have same length, got 2 and 1"),
        ({"keys": ["a", "a"], "tags": [{}, {}]}, r"Got duplicated keys: \['a'\]"),
        ({"keys": ["a"], "tags": [{}], "fields": ["x", "x"]}, r"Got duplicated fields: \['x'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            KVBatchMeta(**wrong)


def test_tags_and_extra_info_are_deep_copies_and_keys_are_not():
    keys, tags, extra = ["k"], [{"a": [1]}], {"b": [2]}
    batch = KVBatchMeta(keys=keys, tags=tags, extra_info=extra)
    tags[0]["a"].append(9)
    extra["b"].append(9)
    assert (batch.tags, batch.extra_info) == ([{"a": [1]}], {"b": [2]})
    assert batch.keys is keys


def test_size_is_frozen_and_length_is_live():
    batch = meta("a")
    batch.keys.append("b")
    assert (batch.size, len(batch)) == (1, 2)


def test_parts_are_taken_as_they_are():
    keys, tags, fields, extra = ["a"], [{"t": 1}], ["x"], {"s": 1}
    batch = KVBatchMeta._from_parts(keys, tags, "p", fields, extra)
    assert batch == KVBatchMeta(["a"], [{"t": 1}], "p", ["x"], {"s": 1})
    assert (batch.size, batch.keys is keys, batch.tags is tags, batch.fields is fields) == (1, True, True, True)
    assert batch.extra_info is extra


def test_select_keys_keeps_the_given_order_partition_fields_and_extra_info():
    picked = meta("a", "b", "c", extra_info={"step": 1}).select_keys(["c", "a"])
    assert picked == KVBatchMeta(["c", "a"], [{"of": "c"}, {"of": "a"}], "p", ["x", "y"], {"step": 1})
    assert picked.size == 2


def test_select_keys_refuses_repeats_and_unknown_keys():
    with pytest.raises(ValueError, match="Contain duplicate keys"):
        meta("a", "b").select_keys(["a", "a"])
    with pytest.raises(RuntimeError, match=r"keys \['z'\] not found in current batch"):
        meta("a", "b").select_keys(["a", "z"])


def test_parts_share_nothing_that_can_be_changed():
    batch = meta("a", "b", tags=[{"n": [1]}, {"n": 2}], extra_info={"e": [1]})
    for part in (batch.select_keys(["a"]), batch.chunk(2)[0], KVBatchMeta.concat([batch]), copy.deepcopy(batch)):
        part.tags[0]["n"].append(2)
        part.extra_info["e"].append(2)
        part.fields.append("z")
    assert (batch.tags, batch.extra_info, batch.fields) == ([{"n": [1]}, {"n": 2}], {"e": [1]}, ["x", "y"])


def test_reorder_is_in_place_on_keys_and_tags():
    batch = meta("a", "b", "c")
    batch.reorder([1, 2, 0])
    assert (batch.keys, batch.tags) == (["b", "c", "a"], [{"of": "b"}, {"of": "c"}, {"of": "a"}])


def test_reorder_refuses_what_is_no_permutation():
    with pytest.raises(ValueError, match="1 does not match number of keys 2"):
        meta("a", "b").reorder([0])
    with pytest.raises(ValueError, match="Contain duplicate indexes"):
        meta("a", "b").reorder([0, 0])
    with pytest.raises(IndexError):
        meta("a", "b").reorder([0, 2])


def test_chunk_gives_the_first_parts_one_key_more():
    def chunks(parts: int) -> list[tuple[list[str], list[dict[str, Any]]]]:
        return [(chunk.keys, chunk.tags) for chunk in meta("a", "b", "c", "d").chunk(parts)]

    a, b, c, d = ({"of": key} for key in "abcd")
    assert chunks(1) == [(["a", "b", "c", "d"], [a, b, c, d])]
    assert chunks(3) == [(["a", "b"], [a, b]), (["c"], [c]), (["d"], [d])]
    assert chunks(5) == [(["a"], [a]), (["b"], [b]), (["c"], [c]), (["d"], [d]), ([], [])]
    with pytest.raises(ZeroDivisionError):
        chunks(0)


def test_concat_joins_batches_and_skips_empty_ones():
    joined = KVBatchMeta.concat([meta("a", extra_info={"s": 1}), KVBatchMeta(), meta("b", extra_info={"t": 2})])
    assert joined == KVBatchMeta(["a", "b"], [{"of": "a"}, {"of": "b"}], "p", ["x", "y"], {"s": 1, "t": 2})
    assert KVBatchMeta.concat([KVBatchMeta()]) == KVBatchMeta()
    assert KVBatchMeta.concat([meta("a"), meta("b")]).extra_info is None
    assert KVBatchMeta.concat([meta("a"), meta("b", fields=None)]).fields == ["x", "y"]
    assert KVBatchMeta.concat([meta("a"), meta("b", fields=["y", "x"])]).fields == ["x", "y"]


def test_concat_refuses_batches_that_disagree_and_repeated_keys():
    for other, message in [
        ({"fields": ["x"]}, "Field names do not match"),
        ({"partition_id": "q"}, "Partition do not match: 'q' and 'p'"),
        ({"extra_info": {"s": 2}}, "'s' has conflicting values: 1 and 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            KVBatchMeta.concat([meta("a", extra_info={"s": 1}), meta("b", **other)])
    with pytest.raises(ValueError, match="Got duplicated keys"):
        KVBatchMeta.concat([meta("a"), meta("a")])


def test_it_is_a_dataclass_that_pickles_compares_and_shows_its_five_fields():
    batch = meta("a", "b", extra_info={"step": [1, 2]})
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert pickle.loads(pickle.dumps(batch)).size == 2
    assert dataclasses.is_dataclass(batch)
    assert "size" not in repr(batch)
    batch.tags, batch.extra_info = [{}, {}], {"assigned": True}
    assert batch != meta("a", "b")


def test_pickles_name_only_where_programs_may_look():
    rows = TensorDict({"x": torch.arange(2), "y": torch.zeros(2, 3)}, batch_size=[2])
    meta = BatchMeta([3, 4], ["p", "p"], custom_meta=[{"a": 1}, {}]).add_fields(rows)
    for value in (meta, meta.chunk(2)[0], KVBatchMeta(["a"], [{"n": 1}], "p", ["x"])):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            packed = pickle.dumps(value, protocol)
            strings = [text for _, text, _ in pickletools.genops(packed) if isinstance(text, str)]
            named = {word for text in strings for word in text.split() if word.startswith("transfer_queue")}
            assert named == {"transfer_queue.metadata"}
            assert type(pickle.loads(packed)) is type(value)
    assert metadata.KVBatchMeta is KVBatchMeta is transfer_queue.KVBatchMeta


def packed_meta(tags: bytes | None = None) -> KVBatchMeta:
    return KVBatchMeta._with_packed_tags(["a", "b"], tags, "p", ["x"])


TAGS = [{"n": 1}, {"n": [2]}]
READS = {
    "attribute": lambda batch: batch.tags,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)).tags,
    "copy": lambda batch: copy.copy(batch).tags,
    "deepcopy": lambda batch: copy.deepcopy(batch).tags,
    "asdict": lambda batch: dataclasses.asdict(batch)["tags"],
    "replace": lambda batch: dataclasses.replace(batch).tags,
    "select": lambda batch: batch.select_keys(["a", "b"]).tags,
    "chunk": lambda batch: batch.chunk(1)[0].tags,
    "concat": lambda batch: KVBatchMeta.concat([batch]).tags,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_packed_tags_are_read_however_they_are_looked_at(read: Any):
    assert read(packed_meta(msgspec.msgpack.encode(TAGS))) == TAGS
    assert read(packed_meta()) == [{}, {}]


def test_packed_tags_are_one_list_like_any_other():
    batch = packed_meta(msgspec.msgpack.encode(TAGS))
    batch.tags[0]["n"] = 5
    assert batch.tags[0] == {"n": 5}
    assert batch == KVBatchMeta(["a", "b"], [{"n": 5}, {"n": [2]}], "p", ["x"])
    assert "tags=[{'n': 5}" in repr(batch)
    assert set(vars(batch)) == set(vars(KVBatchMeta()))
    assert set(batch.__getstate__()) == set(packed_meta().__getstate__()) == set(vars(KVBatchMeta()))

    replaced = packed_meta(msgspec.msgpack.encode(TAGS))
    replaced.tags = [{}, {"m": 1}]
    assert replaced.tags == pickle.loads(pickle.dumps(replaced)).tags == [{}, {"m": 1}]
    reordered = packed_meta(msgspec.msgpack.encode(TAGS))
    reordered.reorder([1, 0])
    assert reordered.tags == TAGS[::-1]


def test_what_asdict_returns_makes_the_same_batch():
    for batch in (KVBatchMeta(["a", "b"], TAGS, "p", ["x"], {"s": 1}), packed_meta(msgspec.msgpack.encode(TAGS))):
        again = KVBatchMeta(**dataclasses.asdict(batch))
        assert again == batch
        assert again.size == batch.size == 2
        assert dataclasses.replace(batch, keys=["a"], tags=[{}]).size == 1


def test_an_attribute_that_is_not_there_says_so():
    for batch in (packed_meta(), KVBatchMeta()):
        with pytest.raises(AttributeError, match="'KVBatchMeta' object has no attribute 'tag'"):
            batch.tag  # noqa: B018
