"""Numbers that callers give: those of numpy and torch count, and those that cannot be are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue
from transfer_queue import BatchMeta, errors
from transfer_queue.dataloader import chunk_batch_fn

_HUGE = 2**63
_SCHEMA = {"x": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}}


def _rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, batch_size=[count])


def _stream(tq: Any, **changed: Any) -> Any:
    arguments = {"batch_size": 2, "micro_batch_size": 1, "dp_rank": 0, **changed}
    config = tq.get_client().controller_info
    conf = {"controller": {"zmq_info": config}}
    return tq.StreamingDataset(conf, data_fields=["x"], partition_id="p", task_name="t", **arguments)


_CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "fetch": (lambda tq, n: tq.get_client().get_meta(["x"], n, "p", "fetch", "t", timeout=0), "batch_size"),
    "insert": (lambda tq, n: tq.get_client().get_meta(["x"], n, "p", "insert"), "batch_size"),
    "wait": (lambda tq, n: tq.kv_wait("p", count=n, timeout=0), "count"),
    "stream batch": (lambda tq, n: _stream(tq, batch_size=n), "batch_size"),
    "stream micro batch": (lambda tq, n: _stream(tq, micro_batch_size=n), "micro_batch_size"),
    "stream rank": (lambda tq, n: _stream(tq, dp_rank=n), "dp_rank"),
    "chunks": (lambda tq, n: chunk_batch_fn(_rows(4), BatchMeta(list(range(4)), ["p"] * 4), n), "micro_batch_size"),
    "group": (lambda tq, n: tq.GRPOGroupNSampler(n), "n_samples_per_prompt"),
    "ranks": (lambda tq, n: tq.SeqlenBalancedSampler(1, n), "dp_size"),
    "multiplier": (lambda tq, n: tq.StreamingTokenBudgetSampler(1, n), "balance_unit_multiplier"),
    "index": (lambda tq, n: tq.get_client().get_data(BatchMeta([n], ["p"], _SCHEMA)), "global_indexes"),
}


@pytest.mark.parametrize("name", _CALLS)
def test_a_number_that_does_not_fit_is_refused_by_name(tq: Any, name: str) -> None:
    call, what = _CALLS[name]
    with pytest.raises(errors.InvalidArgumentError, match=what):
        call(tq, _HUGE)
    assert tq.get_client().get_partition_list() == []


@pytest.mark.parametrize("name", [name for name in _CALLS if name != "wait"])
@pytest.mark.parametrize("wrong", [2.5, "2", None], ids=repr)
def test_what_is_no_whole_number_is_refused_by_name(tq: Any, name: str, wrong: Any) -> None:
    call, what = _CALLS[name]
    with pytest.raises(errors.InvalidArgumentError, match=what):
        call(tq, wrong)


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), torch.tensor(2)], ids=["int64", "uint8", "tensor"])
def test_numbers_of_numpy_and_torch_count(tq: Any, two: Any) -> None:
    client = tq.get_client()
    client.put(_rows(4), partition_id="p")
    assert client.get_meta(["x"], two, "p", "fetch", "t").global_indexes == [0, 1]
    assert client.get_meta(["x"], two, "q", "insert").size == 2
    tq.kv_batch_put(["a", "b"], "kv", _rows(2))
    assert tq.kv_wait("kv", count=two, timeout=0).keys == ["a", "b"]
    stream = _stream(tq, batch_size=two, micro_batch_size=two, dp_rank=two)
    assert (stream.batch_size, stream.micro_batch_size, stream.dp_rank) == (2, 2, 2)
    assert [meta.size for _, meta in chunk_batch_fn(_rows(4), BatchMeta(list(range(4)), ["p"] * 4), two)] == [2, 2]
    assert tq.SeqlenBalancedSampler(two, two).dp_size == 2


@pytest.mark.parametrize("key", ["total_storage_size", "memory_limit_bytes", "num_data_storage_units"])
def test_a_size_of_the_configuration_that_does_not_fit_is_refused_by_name(runtime_dir: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"backend.SimpleStorage.{key}.*64 bits"):
        transfer_queue.init({"backend": {"SimpleStorage": {key: 10**30}}})
    assert not list(runtime_dir.glob("*.json"))


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_a_very_long_time_is_for_ever(runtime_dir: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "1e300")
    waits = {"client": {"timeout_s": seconds}, "controller": {"sampler_timeout_s": seconds}}
    transfer_queue.init({**waits, "backend": {"SimpleStorage": {"put_wait_s": seconds}}})
    try:
        transfer_queue.kv_put("a", "p", {"x": torch.ones(2)})
        assert transfer_queue.kv_list("p", timeout=seconds) == {"p": {"a": {}}}
        assert transfer_queue.get_client().get_meta(["x"], 1, "p", "fetch", "t").size == 1
    finally:
        transfer_queue.close()


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "²", str(_HUGE)])
def test_a_reserve_that_makes_no_sense_is_refused_by_name(
    runtime_dir: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", text)
    with pytest.raises(ValueError, match="TQ_PRE_ALLOC_SAMPLE_NUM"):
        transfer_queue.init()
