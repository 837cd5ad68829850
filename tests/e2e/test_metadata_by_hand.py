"""A `BatchMeta` that a program has made from indexes means the samples that have them now, as in the peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from transfer_queue import BatchMeta, errors


def _rows(values: torch.Tensor, field: str = "x") -> TensorDict:
    return TensorDict({field: values}, batch_size=[len(values)])


def _by_hand(meta: BatchMeta, *fields: str) -> BatchMeta:
    return BatchMeta(meta.global_indexes, meta.partition_ids, dict.fromkeys(fields, meta.field_schema["x"]))


def test_it_reads_and_writes(tq: Any) -> None:
    client = tq.get_client()
    put = client.put(_rows(torch.arange(6).reshape(3, 2)), partition_id="p")
    assert torch.stack(client.get_data(_by_hand(put, "x")).get("x").unbind()).tolist() == [[0, 1], [2, 3], [4, 5]]

    mine = _by_hand(put.select_samples([2, 0]))
    assert client.put(_rows(torch.tensor([7, 8]), "y"), metadata=mine) is mine
    assert client.get_data(_by_hand(put.select_samples([0, 2]), "y"))["y"].tolist() == [8, 7]
    client.update(_by_hand(put, "x"), _rows(torch.ones(3, 2, dtype=torch.int64)), "add")
    assert torch.stack(client.get_data(put).get("x").unbind()).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_it_sets_tags_and_clears(tq: Any) -> None:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], "p", _rows(torch.arange(2)), [{"n": 1}, {"n": 2}])
    indexes = client.kv_retrieve_meta(["a", "b"], "p").global_indexes
    client.set_custom_meta(BatchMeta(indexes, ["p", "p"], custom_meta=[{"m": 3}, {}]))
    assert tq.kv_list("p") == {"p": {"a": {"m": 3}, "b": {}}}
    client.clear_samples(BatchMeta(indexes[:1], ["p"]))
    assert tq.kv_list("p") == {"p": {"b": {}}}


def test_it_reaches_no_sample_of_another_partition_and_no_free_index(tq: Any) -> None:
    client = tq.get_client()
    put = client.put(_rows(torch.arange(2)), partition_id="p")
    client.put(_rows(torch.arange(1)), partition_id="q")
    for indexes in (put.global_indexes, [999], [-1]):
        wrong = BatchMeta(indexes, ["q"] * len(indexes), put.field_schema)
        with pytest.raises(errors.StorageKeyNotFoundError, match=r"partition \"q\""):
            client.get_data(wrong)
        client.set_custom_meta(BatchMeta(indexes, wrong.partition_ids, custom_meta=[{"n": 1}] * len(indexes)))
        client.clear_samples(wrong)
    assert client.get_data(put)["x"].tolist() == [0, 1]
    assert client.get_meta(["x"], 2, "p", task_name="t").custom_meta == [{}, {}]


def test_only_metadata_by_hand_follows_an_index_to_its_next_sample(tq: Any) -> None:
    client = tq.get_client()
    old = client.put(_rows(torch.arange(2)), partition_id="p")
    client.clear_samples(old)
    new = client.put(_rows(torch.arange(5, 7)), partition_id="p")
    assert new.global_indexes == old.global_indexes
    with pytest.raises(errors.StorageKeyNotFoundError):
        client.get_data(old)
    client.clear_samples(old)
    assert client.get_data(_by_hand(old, "x"))["x"].tolist() == [5, 6]
