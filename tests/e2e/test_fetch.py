"""The low-level client: fetches that wait, consumption, production, deadlines (contract F12, F13; clients.md 4, 26)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from transfer_queue import errors


def _td(count: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[count])


def test_a_fetch_waits_for_data_without_holding_up_others(tq: Any) -> None:
    client = tq.get_client()
    got: list[Any] = []

    def fetch() -> None:
        got.append(client.get_meta(["x"], 4, "p", task_name="t", timeout=30))

    workers = [threading.Thread(target=fetch) for _ in range(3)]
    for worker in workers:
        worker.start()
    for number in range(12):
        began = time.monotonic()
        client.put(_td(1, x=torch.tensor([number])), partition_id="p")
        assert tq.kv_list() == {"p": {}}
        assert time.monotonic() - began < 10
    for worker in workers:
        worker.join(20)
    rows = sorted(index for meta in got for index in meta.global_indexes)
    assert len(rows) == len(set(rows)) == 12, "every row once"
    assert sorted(value for meta in got for value in client.get_data(meta)["x"].tolist()) == list(range(12))


def test_a_fetch_without_data_ends_at_its_deadline(tq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tq.get_client()
    client.put(_td(2, x=torch.arange(2)), partition_id="p")
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0.2")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        client.get_meta(["x"], 3, "p", task_name="t")
    assert 0.15 < time.monotonic() - began < 3
    with pytest.raises(errors.DeadlineExceededError):
        client.get_meta(["x"], 3, "nowhere", task_name="t", timeout=0.1)
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 2, "nothing was consumed by the failure"


def test_every_call_takes_a_timeout(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(2)}, timeout=5)
    client = tq.get_client()
    meta = client.kv_retrieve_meta("a", "p", timeout=5)
    calls: list[Callable[[], Any]] = [
        lambda: tq.kv_put("a", "p", tag={}, timeout=5),
        lambda: tq.kv_batch_put(["a"], "p", tags=[{}], timeout=5),
        lambda: tq.kv_batch_get("a", "p", timeout=5),
        lambda: tq.kv_batch_get_by_meta(tq.kv_put("a", "p", tag={}), timeout=5),
        lambda: tq.kv_list(timeout=5),
        lambda: tq.kv_update("a", "p", {"x": torch.ones(2)}, "add", timeout=5),
        lambda: tq.kv_batch_update(["a"], "p", _td(1, x=torch.ones(1, 2)), "add", timeout=5),
        lambda: tq.kv_wait("p", ["a"], timeout=5),
        lambda: tq.list_units(timeout=5),
        lambda: client.get_meta(["x"], 1, "p", task_name="t", timeout=5),
        lambda: client.get_data(meta, timeout=5),
        lambda: client.put(_td(1, y=torch.ones(1)), metadata=meta, timeout=5),
        lambda: client.get_partition_list(timeout=5),
        lambda: client.get_consumption_status("t", "p", timeout=5),
        lambda: client.get_production_status(["x"], "p", timeout=5),
        lambda: client.check_consumption_status("t", "p", timeout=5),
        lambda: client.check_production_status(["x"], "p", timeout=5),
        lambda: client.reset_consumption("p", "t", timeout=5),
        lambda: client.set_custom_meta(meta, timeout=5),
        lambda: client.kv_retrieve_keys([0], "p", timeout=5),
        lambda: client.kv_list("p", timeout=5),
        lambda: client.kv_clear_fields("a", "p", "y", timeout=5),
        lambda: client.clear_samples(meta, timeout=5),
        lambda: client.clear_partition("p", timeout=5),
        lambda: tq.kv_clear("a", "p", timeout=5),
    ]
    for call in calls:
        call()
    with pytest.raises(TimeoutError):
        tq.kv_wait("p", ["never"], timeout=0)


def test_put_returns_the_same_metadata(tq: Any) -> None:
    client = tq.get_client()
    meta = client.put(_td(3, x=torch.arange(3)), partition_id="p")
    meta.extra_info["step"] = 7
    again = client.put(_td(3, y=torch.arange(3.0)), metadata=meta)
    assert again is meta
    assert meta.field_names == ["x", "y"]
    assert meta.extra_info == {"step": 7}
    assert meta.is_ready
    assert client.get_data(meta)["y"].tolist() == [0.0, 1.0, 2.0]
    asynchronous = asyncio.run(client.async_put(_td(3, z=torch.arange(3)), metadata=meta))
    assert asynchronous is meta
    assert client.get_data(meta.select_samples([2, 0]))["z"].tolist() == [2, 0]


def test_insert_fill_and_fetch(tq: Any) -> None:
    client = tq.get_client()
    meta = client.get_meta(["x", "y"], 4, "p", mode="insert")
    assert (meta.size, meta.is_ready) == (4, False)
    client.put(_td(2, x=torch.arange(2)), metadata=meta.select_samples([1, 3]))
    assert client.get_production_status(["x"], "p")[1].flatten().tolist() == [0, 1, 0, 1]
    fetched = client.get_meta(["x"], 2, "p", task_name="t", timeout=5)
    assert fetched.global_indexes == [meta.global_indexes[1], meta.global_indexes[3]]
    assert client.get_consumption_status("t", "p")[1].tolist() == [0, 1, 0, 1]
    assert client.get_consumption_status("other", "p")[1].tolist() == [0, 0, 0, 0]
    client.reset_consumption("p", "t")
    assert client.get_consumption_status("t", "p")[1].tolist() == [0, 0, 0, 0]
    forced = client.get_meta(["x", "y"], None, "p", mode="force_fetch")
    assert forced.size == 4
    assert not client.check_production_status(["x"], "p")
    client.put(_td(4, x=torch.arange(4), y=torch.arange(4)), metadata=meta)
    assert client.check_production_status(["x", "y"], "p")


def test_clearing_a_field_does_not_reset_consumption(tq: Any) -> None:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], "p", _td(2, x=torch.arange(2), y=torch.arange(2)), tags=[{"n": 0}, {"n": 1}])
    assert client.get_meta(["x"], 2, "p", task_name="t", timeout=5).size == 2
    tq.kv_clear("a", "p", fields="x")
    assert client.get_consumption_status("t", "p")[1].tolist() == [1, 1]
    assert tq.kv_list("p")["p"] == {"a": {"n": 0}, "b": {"n": 1}}
    assert client.get_production_status(["x", "y"], "p")[1].tolist() == [[0, 1], [1, 1]]
    tq.kv_clear(["a", "b"], "p", fields=["x", "y"])
    assert tq.kv_list("p")["p"] == {"a": {"n": 0}, "b": {"n": 1}}, "the keys stay"
    tq.kv_put("a", "p", {"x": torch.nn.functional.one_hot(torch.arange(3))})
    assert client.get_production_status(["x"], "p")[1].flatten().tolist() == [1, 0]


def test_bystanders_of_failing_requests(tq: Any) -> None:
    """An empty partition list, an early consumer, an unknown mode: none hurts another request."""
    client = tq.get_client()
    assert client.get_partition_list() == []
    assert client.get_production_status(["x"], "nowhere") == (None, None)
    assert not client.check_consumption_status("t", "nowhere")
    with pytest.raises(TimeoutError):
        client.get_meta(["x"], 1, "early", task_name="t", timeout=0.05)
    with pytest.raises(ValueError, match="steal"):
        client.get_meta(["x"], 1, "p", mode="steal", task_name="t")
    client.put(_td(1, x=torch.ones(1)), partition_id="p")
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout=5).size == 1


def test_a_cancelled_fetch_consumes_nothing(tq: Any) -> None:
    client = tq.get_client()

    async def work() -> None:
        task = asyncio.create_task(client.async_get_meta(["x"], 2, "p", task_name="t", timeout=30))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.async_put(_td(2, x=torch.arange(2)), partition_id="p")
        assert (await client.async_get_meta(["x"], 2, "p", task_name="t", timeout=10)).size == 2

    asyncio.run(work())


def test_reading_what_is_cleared_meanwhile(tq: Any) -> None:
    client = tq.get_client()
    meta = client.put(_td(3, x=torch.arange(3)), partition_id="p")
    client.clear_samples(meta.select_samples([1]))
    with pytest.raises(errors.StorageKeyNotFoundError) as raised:
        client.get_data(meta)
    assert isinstance(raised.value, KeyError)
    assert str(meta.global_indexes[1]) in str(raised.value)
    assert "p" in str(raised.value)
    client.clear_samples(meta)
    client.clear_partition("p")
    client.clear_partition("p")
    assert client.get_partition_list() == []


class TestPolling:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"polling_mode": True}}

    def test_too_little_data_gives_an_empty_batch_at_once(self, tq: Any) -> None:
        client = tq.get_client()
        client.put(_td(1, x=torch.ones(1)), partition_id="p")
        began = time.monotonic()
        assert client.get_meta(["x"], 2, "p", task_name="t", timeout=20).size == 0
        assert client.get_meta(["y"], 1, "p", task_name="t", timeout=20).size == 0
        assert time.monotonic() - began < 10
        assert client.get_meta(["x"], 1, "p", task_name="t").size == 1
