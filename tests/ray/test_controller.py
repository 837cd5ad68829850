"""The methods that programs call on the controller actor."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from clusters import opened
from transfer_queue.utils.zmq_utils import ZMQServerInfo


@pytest.fixture(scope="module")
def session(ray: Any) -> Iterator[Any]:
    """One for all tests: a session on Ray takes seconds."""
    with opened(ray, {}) as package:
        yield package


@pytest.fixture
def tq(session: Any) -> Iterator[Any]:
    """The package with the session, in which the test leaves nothing."""
    yield session
    for partition in session.get_client().get_partition_list():
        session.get_client().clear_partition(partition)
    assert sum(unit.cells for unit in session.list_units()) == 0


@pytest.fixture
def ask(ray: Any, tq: Any) -> Callable[..., Any]:
    """Function: call a method of the controller of the session and wait for the answer."""
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    return lambda method, *args, **kwargs: ray.get(getattr(controller, method).remote(*args, **kwargs))


def _fill(tq: Any) -> None:
    """key0 and key1 with x, key1 with ragged y too."""
    tq.kv_batch_put(
        ["key0", "key1"], "p", TensorDict({"x": torch.arange(2)}, batch_size=[2]), tags=[{"n": 0}, {"n": 1}]
    )
    tq.kv_put("key1", "p", {"y": torch.ones(3)})


def test_partitions(tq: Any, ask: Callable[..., Any]) -> None:
    assert ask("create_partition", "p") is True
    assert ask("create_partition", "p") is False
    assert ask("list_partitions") == ["p"]
    _fill(tq)
    assert ask("get_partition_index_range", "p") == [0, 1]
    assert ask("get_partition_index_range", "q") == []
    ask("clear_partition", "p")
    assert ask("list_partitions") == []
    assert sum(unit.memory_used_bytes for unit in tq.list_units()) == 0


def test_a_snapshot_describes_fields_and_who_has_them(tq: Any, ask: Callable[..., Any]) -> None:
    _fill(tq)
    tq.kv_put("key0", "p", {"y": torch.ones(5), "note": "hello"})
    p = ask("get_partition_snapshot", "p")
    x, y, note = (p.field_metadata[name] for name in ("x", "y", "note"))
    assert (x.dtype, tuple(x.shape), x.is_nested, x.is_non_tensor) == (torch.int64, (), False, False)
    assert (y.dtype, y.shape, y.is_nested, y.is_non_tensor) == (torch.float32, None, True, False)
    assert {i: tuple(shape) for i, shape in y.per_sample_shapes.items()} == {0: (5,), 1: (3,)}
    assert (note.is_non_tensor, note.global_indexes) == (True, {0})
    assert p.production_status.dtype == torch.int8
    assert p.production_status[[0, 1]].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert [p.field_name_mapping[name] for name in ("x", "y", "note")] == [0, 1, 2]
    assert (p.allocated_fields_num, p.partition_id) == (3, "p")


def test_configuration_and_address(tq: Any, ask: Callable[..., Any]) -> None:
    conf = ask("get_config")
    assert conf.controller.zmq_info == ask("get_zmq_server_info") == tq.init().controller.zmq_info
    assert all(isinstance(info, ZMQServerInfo) for info in conf.backend.SimpleStorage.zmq_info.values())
    conf.mine = 7
    ask("store_config", conf)
    assert ask("get_config").mine == 7


def test_consumption_and_production(tq: Any, ask: Callable[..., Any]) -> None:
    _fill(tq)
    assert ask("scan_data_status", "p", ["x"], "train") == [0, 1]
    meta = ask("get_metadata", ["y"], "p", "fetch", "train", 1)
    assert meta.global_indexes == [1]
    assert ask("scan_data_status", "p", ["x"], "train") == [0]
    assert ask("scan_data_status", "p", ["x", "absent"], "train") == []
    assert [column.tolist() for column in ask("get_consumption_status", "p", "train")] == [[0, 1], [0, 1]]
    assert [column.tolist() for column in ask("get_production_status", "p", ["x", "y"])] == [[0, 1], [[1, 0], [1, 1]]]
    assert ask("reset_consumption", "p", "train") is True
    assert ask("get_consumption_status", "p", "train")[1].tolist() == [0, 0]
    assert ask("get_consumption_status", "q", "train") == (None, None)


def test_samples_by_index(tq: Any, ask: Callable[..., Any]) -> None:
    _fill(tq)
    meta = ask("generate_batch_meta", "p", [1, 0], ["x", "y"])
    assert (meta.global_indexes, meta.production_status.tolist()) == ([1, 0], [1, 0])
    with pytest.raises(ValueError, match=r"partition 'p' has no samples \[9\]"):
        ask("generate_batch_meta", "p", [1, 9], ["x"])
    ask("set_custom_meta", {"p": {0: {"new": 1}, 9: {}}, "q": {0: {}}})
    assert tq.kv_list("p") == {"p": {"key0": {"new": 1}, "key1": {"n": 1}}}
    ask("mark_clearing", [1, 9], ["p", "p"])
    assert ask("scan_data_status", "p", ["x"], "train") == [0]
    ask("clear_meta", [1, 9, 0], ["p", "p", "q"])
    assert tq.kv_list("p") == {"p": {"key0": {"new": 1}}}
    for method in ("mark_clearing", "clear_meta"):
        with pytest.raises(ValueError, match="got 1 global_indexes and 2 partition_ids"):
            ask(method, [0], ["p", "p"])


def test_keys(tq: Any, ask: Callable[..., Any]) -> None:
    _fill(tq)
    assert ask("kv_retrieve_meta", ["key1"], "p").global_indexes == [1]
    assert ask("kv_retrieve_meta", "new", "p", create=True).global_indexes == [2]
    assert ask("kv_retrieve_keys", [1, 9], "p") == ["key1", None]
    ask("kv_clear_fields", ["key0", "key1"], "p", ["y"])
    assert tq.kv_batch_get("key1", "p").keys() == {"x"}
    assert list(ask("kv_list")["p"]) == ["key0", "key1", "new"]


def test_errors_are_those_of_the_queue(ask: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="partition_id: got int, want a str"):
        ask("create_partition", 3)
    with pytest.raises(ValueError, match="batch_size"):
        ask("get_metadata", ["x"], "p", "fetch", "train", -1)


def test_metrics_and_samplers(tq: Any, ask: Callable[..., Any]) -> None:
    assert tq.get_metrics_endpoint() is None
    endpoint = ask("start_metrics", 0)
    assert ask("start_metrics", 0) == endpoint
    ask("register_storage_units_for_metrics", tq.init().backend.SimpleStorage.zmq_info)
    _fill(tq)
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert 'tq_partition_samples_total{partition_id="p"} 2' in text
    assert 'storage_unit_id="unit-1"' in text

    tq.kv_batch_put(["key2", "key3"], "p", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
    ask("register_sampler", tq.GRPOGroupNSampler(n_samples_per_prompt=2))
    with pytest.raises(ValueError, match="multiple of n_samples_per_prompt"):
        ask("get_metadata", ["x"], "p", "fetch", "train", 3)
    assert ask("get_metadata", ["x"], "p", "fetch", "train", 2).global_indexes == [0, 1]
    with pytest.raises(ValueError, match="could not find sampler"):
        ask("register_sampler", "NoSuchSampler")
    ask("register_sampler", tq.SequentialSampler())


def test_what_the_controller_knows_is_saved_and_loaded(tq: Any, ask: Callable[..., Any], tmp_path: Any) -> None:
    tq.kv_put("k", "p", tag={"n": 1})
    ask("save_checkpoint", str(tmp_path / "state"))
    tq.kv_put("k", "p", tag={"n": 2})
    ask("load_checkpoint", str(tmp_path / "state"))
    assert tq.kv_list("p") == {"p": {"k": {"n": 1}}}
    with pytest.raises(FileNotFoundError, match="nothing"):
        ask("load_checkpoint", str(tmp_path / "nothing"))
    with pytest.raises(NotImplementedError, match="update_production_status"):
        ask("update_production_status", "p", [0], {})
