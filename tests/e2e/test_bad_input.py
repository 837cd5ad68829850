"""Bad input: an error that names the thing, and a session as it was before."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue import errors
from transfer_queue.metadata import KVBatchMeta


def _td(count: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[count])


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


_TENSOR = {"x": torch.ones(2)}

# name -> (call, classes that the error has, words that its text has)
_BAD: dict[str, tuple[Callable[[Any], Any], tuple[type[BaseException], ...], tuple[str, ...]]] = {
    "batch size": (
        lambda tq: tq.kv_batch_put(["a", "b"], "p", _td(3, x=torch.ones(3))),
        (ValueError,),
        ("batch_size", "3", "2"),
    ),
    "batch size of update": (
        lambda tq: tq.kv_batch_update(["old"], "p", _td(2, x=torch.ones(2)), "add"),
        (ValueError,),
        ("batch_size", "2", "1"),
    ),
    "table of several rows for one key": (
        lambda tq: tq.kv_put("a", "p", _td(2, x=torch.ones(2))),
        (ValueError,),
        ("2 rows", "1"),
    ),
    "duplicate keys in put": (
        lambda tq: tq.kv_batch_put(["a", "b", "a"], "p", _td(3, x=torch.ones(3))),
        (ValueError,),
        ("duplicated",),
    ),
    "duplicate keys in tags": (
        lambda tq: tq.kv_batch_put(["a", "a"], "p", tags=[{}, {}]),
        (ValueError,),
        ("duplicated",),
    ),
    "duplicate keys in update": (
        lambda tq: tq.kv_batch_update(["old", "old"], "p", _td(2, x=torch.ones(2)), "add"),
        (ValueError,),
        ("duplicated",),
    ),
    "nested tensor in a dict": (
        lambda tq: tq.kv_put("a", "p", {"nest": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}),
        (ValueError,),
        ("nest",),
    ),
    "mixed dtypes in a column": (
        lambda tq: tq.kv_batch_put(
            ["a", "b"], "p", _td(2, mix=NonTensorStack(torch.ones(2), torch.ones(2, dtype=torch.int64)))
        ),
        (ValueError,),
        ("mix", "int64", "float32"),
    ),
    "sparse": (lambda tq: tq.kv_put("a", "p", {"sp": _sparse()}), (ValueError,), ("sp", "sparse")),
    "meta": (lambda tq: tq.kv_put("a", "p", {"mt": torch.ones(3, device="meta")}), (ValueError,), ("mt", "meta")),
    "meta in a table": (
        lambda tq: tq.kv_batch_put(["a", "b"], "p", _td(2, mt=torch.ones(2, 3, device="meta"))),
        (ValueError,),
        ("mt", "meta"),
    ),
    "good and bad column": (
        lambda tq: tq.kv_put("a", "p", {"good": torch.ones(1 << 18), "sp": _sparse()}, tag={"t": 1}),
        (ValueError,),
        ("sp",),
    ),
    "value that cannot be pickled": (
        lambda tq: tq.kv_put("a", "p", {"gen": (i for i in range(3))}),
        (ValueError,),
        ("gen", "generator"),
    ),
    "key of another type": (lambda tq: tq.kv_put(5, "p", _TENSOR), (TypeError,), ("key", "int")),
    "keys of another type": (
        lambda tq: tq.kv_batch_put(["a", 5], "p", _td(2, x=torch.ones(2))),
        (TypeError,),
        ("keys[1]", "int"),
    ),
    "keys as a dict": (lambda tq: tq.kv_batch_get({"old": 1}, "p"), (TypeError,), ("keys", "dict")),
    "partition of another type": (lambda tq: tq.kv_put("a", 7, _TENSOR), (TypeError,), ("partition_id", "int")),
    "field name of another type": (
        lambda tq: tq.kv_batch_get("old", "p", select_fields=[1]),
        (TypeError,),
        ("select_fields", "int"),
    ),
    "no keys in put": (lambda tq: tq.kv_batch_put([], "p", _td(0)), (ValueError,), ("keys", "empty")),
    "no keys in get": (lambda tq: tq.kv_batch_get([], "p"), (ValueError,), ("keys", "empty")),
    "no keys in clear": (lambda tq: tq.kv_clear([], "p"), (ValueError,), ("keys", "empty")),
    "no keys in update": (lambda tq: tq.kv_batch_update([], "p", _td(0), "add"), (TypeError,), ("keys", "empty")),
    "nothing to put": (lambda tq: tq.kv_put("a", "p"), (ValueError,), ("fields", "tag")),
    "nothing to put in a batch": (lambda tq: tq.kv_batch_put(["a"], "p"), (ValueError,), ("fields", "tags")),
    "fields as a list": (lambda tq: tq.kv_put("a", "p", [1]), (ValueError,), ("fields", "list")),
    "fields of a batch as a dict": (
        lambda tq: tq.kv_batch_put(["a"], "p", {"x": torch.ones(1)}),
        (ValueError,),
        ("TensorDict", "dict"),
    ),
    "too few tags": (lambda tq: tq.kv_batch_put(["a", "b"], "p", tags=[{}]), (ValueError,), ("tags", "1", "2")),
    "tag of another type": (lambda tq: tq.kv_put("a", "p", tag=[1]), (TypeError,), ("tag", "list")),
    "unknown partition in get": (
        lambda tq: tq.kv_batch_get("old", "nowhere"),
        (ValueError, KeyError),
        ("not found", "nowhere"),
    ),
    "unknown key in get": (lambda tq: tq.kv_batch_get("gone", "p"), (ValueError, KeyError), ("not found", "gone")),
    "unknown partition in update": (
        lambda tq: tq.kv_update("old", "nowhere", _TENSOR, "add"),
        (ValueError, KeyError),
        ("nowhere",),
    ),
    "unknown key in update": (
        lambda tq: tq.kv_batch_update(["old", "gone"], "p", _td(2, x=torch.ones(2, 2)), "add"),
        (ValueError, KeyError),
        ("gone",),
    ),
    "unknown field in update": (
        lambda tq: tq.kv_update("old", "p", {"x": torch.ones(2), "nofield": torch.ones(2)}, "add"),
        (ValueError,),
        ("nofield",),
    ),
    "merge of another dtype": (
        lambda tq: tq.kv_update("old", "p", {"x": torch.ones(2, dtype=torch.int64)}, "add"),
        (RuntimeError,),
        ("x", "int64", "float32"),
    ),
    "merge of another shape": (
        lambda tq: tq.kv_update("old", "p", {"x": torch.ones(3)}, "add"),
        (RuntimeError,),
        ("x",),
    ),
    "merge of objects": (lambda tq: tq.kv_update("old", "p", {"o": "b"}, "add"), (RuntimeError,), ("o",)),
    "merge that is no callable": (
        lambda tq: tq.kv_update("old", "p", _TENSOR, 5),
        (TypeError,),
        ("merge_fn", "int"),
    ),
    "update by several rows of one key": (
        lambda tq: tq.kv_update("old", "p", {"x": torch.nested.nested_tensor([torch.ones(2)])}, "add"),
        (ValueError,),
        ("kv_update: ", "field 'x'", "kv_batch_update"),
    ),
    "merge of an unknown name": (
        lambda tq: tq.kv_update("old", "p", _TENSOR, "median"),
        (ValueError,),
        ("median",),
    ),
    "parser that is no callable": (
        lambda tq: tq.kv_put("a", "p", _TENSOR, data_parser=5),
        (RuntimeError,),
        ("data_parser must be callable",),
    ),
    "dtype of a column": (
        lambda tq: tq.kv_batch_put(["a", "b"], "p", _td(2, x=torch.ones(2, 2, dtype=torch.int32))),
        (ValueError,),
        ("x", "int32", "float32"),
    ),
    "objects in a column of tensors": (
        lambda tq: tq.kv_put("a", "p", {"x": "text"}),
        (ValueError,),
        ("x", "float32"),
    ),
    "tensors in a column of objects": (
        lambda tq: tq.kv_put("a", "p", {"o": torch.ones(2)}),
        (ValueError,),
        ("o", "float32"),
    ),
    "negative timeout": (lambda tq: tq.kv_list(timeout=-1), (ValueError,), ("timeout", "-1")),
    "timeout that is no number": (lambda tq: tq.kv_list(timeout="1"), (TypeError,), ("timeout", "str")),
    "timeout of nan": (
        lambda tq: tq.kv_put("a", "p", _TENSOR, timeout=float("nan")),
        (ValueError,),
        ("timeout", "nan"),
    ),
    "missing key with strict": (
        lambda tq: tq.kv_batch_get(["old", "gone", "lost"], "p", strict=True),
        (ValueError, KeyError),
        ("gone", "lost"),
    ),
    "missing field with strict": (
        lambda tq: tq.kv_batch_get("old", "p", ["x", "nofield", "other"], strict=True),
        (ValueError, KeyError),
        ("nofield", "other"),
    ),
    "keys without a common field": (
        lambda tq: tq.kv_batch_get(["old", "bare"], "p"),
        (ValueError,),
        ("not ready", "bare"),
    ),
    "meta without partition": (
        lambda tq: tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["old"], tags=[{}])),
        (ValueError,),
        ("partition_id",),
    ),
    "field that a meta lacks": (
        lambda tq: tq.kv_batch_get_by_meta(
            tq.KVBatchMeta(keys=["old"], tags=[{}], partition_id="p", fields=["x"]), select_fields=["y"]
        ),
        (ValueError,),
        ("select_fields", "not found", "y"),
    ),
    "wait for nothing": (lambda tq: tq.kv_wait("p"), (ValueError,), ("count", "keys")),
    "count of another type": (lambda tq: tq.kv_wait("p", count="3"), (TypeError,), ("count", "str")),
    "unknown mode": (
        lambda tq: tq.get_client().get_meta(["x"], 1, "p", mode="steal", task_name="t"),
        (ValueError,),
        ("steal", "fetch"),
    ),
    "fetch without task": (lambda tq: tq.get_client().get_meta(["x"], 1, "p"), (ValueError,), ("task_name",)),
    "fetch of no rows": (
        lambda tq: tq.get_client().get_meta(["x"], 0, "p", task_name="t"),
        (ValueError,),
        ("batch_size", "0"),
    ),
    "put without a place": (lambda tq: tq.get_client().put(_td(1, x=torch.ones(1))), (ValueError,), ("partition_id",)),
    "put of more rows than samples": (
        lambda tq: tq.get_client().put(_td(2, x=torch.ones(2, 2)), tq.get_client().kv_retrieve_meta("old", "p")),
        (RuntimeError, ValueError),
        ("length mismatch", "2 rows", "want 1"),
    ),
    "put of a list": (
        lambda tq: tq.get_client().put([1], partition_id="p"),
        (ValueError,),
        ("list", "TensorDict"),
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_named_and_changes_nothing(tq: Any, name: str) -> None:
    call, classes, words = _BAD[name]
    tq.kv_batch_put(["old", "bare"], "p", tags=[{"n": 1}, {}])
    tq.kv_put("old", "p", {"x": torch.ones(2), "o": "a"})

    def state() -> Any:
        units = [(u.memory_used_bytes, u.samples, u.cells, u.leases, u.staged) for u in tq.list_units()]
        stored = tq.kv_batch_get("old", "p")
        schema = tq.get_client().get_meta([], None, "p", mode="force_fetch").field_schema
        return tq.kv_list(), units, stored["x"].values().tolist(), stored["o"], repr(schema)

    before = state()
    with pytest.raises(classes[0]) as raised:
        call(tq)
    for cls in classes:
        assert isinstance(raised.value, cls), f"{type(raised.value).__mro__}: {raised.value}"
    text = str(raised.value)
    assert not text.startswith(("'", '"')), "KeyError's quotes"
    for word in words:
        assert word in text, text
    assert "\n" not in text
    assert isinstance(raised.value, errors.TransferQueueError)
    assert state() == before


def _refused_by_the_core(tq: Any) -> dict[str, Callable[[], Any]]:
    """Calls that only the core can refuse, by the name of what is called."""
    client = tq.get_client()
    meta = tq.kv_batch_put(["a", "c"], "p", _td(2, x=torch.ones(2, 2)))
    rows = client.kv_retrieve_meta(["a"], "p", create=False)
    ints = _td(1, x=torch.ones(1, 2, dtype=torch.int64))
    gone = client.put(ints, partition_id="gone")
    client.clear_samples(gone)
    tq.kv_put("b", "p", {"y": torch.ones(2)})
    return {
        "kv_put": lambda: tq.kv_put("b", "p", {"x": torch.ones(2, dtype=torch.int64)}),
        "kv_batch_put": lambda: tq.kv_batch_put(["b"], "p", ints),
        "kv_update": lambda: tq.kv_update("none", "p", {"x": torch.ones(2)}, "add"),
        "kv_batch_update": lambda: tq.kv_batch_update(["a"], "p", ints, "add"),
        "kv_batch_get": lambda: tq.kv_batch_get(["none"], "p"),
        "kv_batch_get_by_meta": lambda: tq.kv_batch_get_by_meta(
            KVBatchMeta(keys=["a", "b"], tags=[{}, {}], partition_id="p", fields=meta.fields), strict=True
        ),
        "kv_wait": lambda: tq.kv_wait("p", keys=["none"], timeout=0.05),
        "put": lambda: client.put(ints, metadata=rows),
        "update": lambda: client.update(rows, ints, "add"),
        "get_data": lambda: client.get_data(gone),
        "get_meta": lambda: client.get_meta(["none"], 1, "p", task_name="t", timeout=0.05),
        "load_storage_checkpoint": lambda: client.load_storage_checkpoint("/nowhere"),
        "load_checkpoint": lambda: tq.load_checkpoint("/nowhere"),
    }


def test_errors_of_the_core_name_what_was_called(tq: Any) -> None:
    for name, call in _refused_by_the_core(tq).items():
        with pytest.raises(errors.TransferQueueError) as raised:
            call()
        assert raised.value.op == name, raised.value
        assert str(raised.value).startswith(f"{name}: ")


def test_every_error_has_code_operation_and_retryable(tq: Any) -> None:
    with pytest.raises(errors.NotFoundError) as raised:
        tq.kv_batch_get("gone", "nowhere")
    assert raised.value.op
    assert str(raised.value).startswith(raised.value.op + ": ")
    assert raised.value.code.name == "NOT_FOUND"
    assert not raised.value.retryable


def test_a_constant_column_is_broadcast_or_named(tq: Any) -> None:
    """clients.md 14: a whole-column NonTensorData."""
    data = _td(2, x=torch.ones(2), const=NonTensorData("c", batch_size=[2]))
    tq.kv_batch_put(["a", "b"], "p", data)
    assert tq.kv_batch_get(["a", "b"], "p")["const"] == ["c", "c"]


def test_a_column_is_free_again_after_its_last_holder(tq: Any) -> None:
    tq.kv_batch_put(["a", "b"], "p", _td(2, x=torch.ones(2)))
    with pytest.raises(errors.SchemaMismatchError, match=re.escape("x")):
        tq.kv_put("c", "p", {"x": torch.ones((), dtype=torch.int64)})
    tq.kv_clear("a", "p")
    with pytest.raises(errors.SchemaMismatchError):
        tq.kv_put("c", "p", {"x": "object"})
    tq.kv_clear("b", "p", fields="x")
    tq.kv_put("c", "p", {"x": "object"})
    assert tq.kv_batch_get("c", "p")["x"] == ["object"]
    with pytest.raises(errors.SchemaMismatchError):
        tq.kv_put("d", "p", {"x": torch.ones(())})


@pytest.mark.parametrize(
    ("conf", "name"),
    [
        ({"runtime": "cloud"}, "runtime"),
        ({"namespace": "a/b"}, "namespace"),
        ({"client": {"layout": "wide"}}, "client.layout"),
        ({"client": {"timeout_s": 0}}, "client.timeout_s"),
        ({"controller": {"polling_mode": "yes"}}, "controller.polling_mode"),
        ({"controller": {"sampler": "NoSampler"}}, "NoSampler"),
        ({"backend": {"SimpleStorage": {"num_data_storage_units": 0}}}, "num_data_storage_units"),
        ({"backend": {"SimpleStorage": {"memory_limit_bytes": "1 GB"}}}, "memory_limit_bytes"),
        ({"backend": {"SimpleStorage": {"put_wait_s": -1}}}, "put_wait_s"),
        ({"backend": {"storage_backend": 5}}, "storage_backend"),
        ({"backend": None}, None),
        (5, "config"),
    ],
)
def test_wrong_configuration_opens_nothing(runtime_dir: Any, conf: Any, name: str | None) -> None:
    import transfer_queue as tq

    if name is None:
        tq.init(conf)
        tq.close()
        return
    with pytest.raises(ValueError, match=re.escape(name)):
        tq.init(conf)
    assert not list(runtime_dir.iterdir())
    with pytest.raises(AssertionError):
        tq.get_client()


@pytest.mark.parametrize("wrong", [None, 3, ["a"]])
def test_what_is_no_metadata_is_refused_by_name(tq: Any, wrong: Any) -> None:
    client, row = tq.get_client(), TensorDict({"x": torch.zeros(1)}, batch_size=[1])
    calls: list[Callable[[Any], Any]] = [
        client.clear_samples,
        client.set_custom_meta,
        lambda meta: client.update(meta, row, "add"),
    ]
    if wrong is None:
        assert client.get_data(None).batch_size == torch.Size([0])
    else:
        calls += [client.get_data, lambda meta: client.put(row, metadata=meta)]
    for call in calls:
        with pytest.raises(TypeError, match=f"metadata: got {type(wrong).__name__}, want a BatchMeta"):
            call(wrong)
    assert tq.kv_list() == {}


@pytest.mark.parametrize("wrong", [dict, 3, object()])
def test_what_is_no_sampler_is_refused(runtime_dir: Any, wrong: Any) -> None:
    import transfer_queue

    with pytest.raises(TypeError, match=r"controller\.sampler: got"):
        transfer_queue.init({"controller": {"sampler": wrong}})


@pytest.mark.parametrize("what", ["key", "partition_id", "field", "task_name", "keys"])
def test_a_name_that_is_no_text_is_refused_by_name(tq: Any, what: str) -> None:
    bad, row = "a\ud800", {"x": torch.zeros(1)}
    calls: dict[str, Callable[[], Any]] = {
        "key": lambda: tq.kv_put(bad, "p", row),
        "partition_id": lambda: tq.get_client().clear_partition(bad),
        "field": lambda: tq.kv_put("k", "p", {bad: torch.zeros(1)}),
        "task_name": lambda: tq.get_client().get_meta(["x"], 1, "p", task_name=bad),
        "keys": lambda: tq.kv_batch_get(["fine", bad], "p"),
    }
    with pytest.raises(ValueError, match=rf"{what} 'a\\ud800'"):
        calls[what]()
    assert tq.kv_list() == {}


@pytest.mark.parametrize("wrong", [3, ["p"], b"p"])
@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("get_consumption_status", ("t", ...), "partition_id"),
        ("get_consumption_status", (..., "p"), "task_name"),
        ("get_production_status", (["x"], ...), "partition_id"),
        ("check_production_status", (["x"], ...), "partition_id"),
        ("reset_consumption", ("p", ...), "task_name"),
    ],
)
def test_a_status_of_what_is_no_name_is_refused_by_name(
    tq: Any, method: str, arguments: tuple[Any, ...], name: str, wrong: Any
) -> None:
    given = [wrong if argument is ... else argument for argument in arguments]
    with pytest.raises(TypeError, match=f"{name}: got {type(wrong).__name__}, want a str"):
        getattr(tq.get_client(), method)(*given)


def test_fields_of_a_status_are_read_as_those_of_a_fetch(tq: Any) -> None:
    client = tq.get_client()
    client.put(TensorDict({"ids": torch.zeros(2)}, batch_size=[2]), partition_id="p")
    assert client.check_production_status("ids", "p") is True
    assert client.get_production_status("ids", "p")[1].tolist() == [[1], [1]]
    for wrong, text in ((3, "data_fields: got int"), (["ids", 3], r"data_fields\[1\]: got int")):
        with pytest.raises(TypeError, match=text):
            client.get_production_status(wrong, "p")


def test_an_index_that_cannot_be_and_a_meta_that_is_none_are_refused_by_name(tq: Any) -> None:
    tq.kv_put("k", "p", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=f"global_indexes: {2**63} does not fit"):
        tq.get_client().kv_retrieve_keys([0, 2**63], "p")
    assert tq.get_client().kv_retrieve_keys([0, 2**63 - 1], "p") == ["k", None]
    with pytest.raises(TypeError, match=r"global_indexes\[1\]: got str, want an int"):
        tq.get_client().kv_retrieve_keys([0, "k"], "p")
    for wrong in (None, "k", {"keys": ["k"]}):
        with pytest.raises(TypeError, match=f"meta: got {type(wrong).__name__}, want a KVBatchMeta"):
            tq.kv_batch_get_by_meta(wrong)


def test_metadata_of_no_or_of_several_partitions_is_not_written_to(tq: Any) -> None:
    client = tq.get_client()
    parts = [client.put(TensorDict({"x": torch.zeros(1)}, batch_size=[1]), partition_id=name) for name in ("b", "a")]
    both, rows = tq.BatchMeta.concat(parts), TensorDict({"x": torch.ones(2)}, batch_size=[2])
    for write in (partial(client.put, rows, metadata=both), partial(client.update, both, rows, "add")):
        with pytest.raises(ValueError, match='metadata: got samples of partitions "a", "b", want those of one'):
            write()
    assert client.get_data(both)["x"].tolist() == [0, 0]
    nothing = TensorDict({"x": torch.zeros(0)}, batch_size=[0])
    with pytest.raises(ValueError, match="update: metadata cannot be empty"):
        client.update(tq.BatchMeta(), nothing, "add")
