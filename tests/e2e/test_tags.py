"""Tags that are unusual: whatever they hold, only the call that brings a bad one fails, and nobody else notices."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from transfer_queue import errors


class _Unwritable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of this")


class _Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not here")


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def _rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, batch_size=[count])


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"a": _Unwritable()}, ("tags[1]", "'a'", "_Unwritable", "no pickle of this")),
        ({"a": _deep()}, ("tags[1]", "'a'", "list", "nested too deeply")),
        ({"\ud800": 1}, ("tags[1]", "surrogates")),
    ],
    ids=["unwritable", "deep", "surrogate"],
)
def test_a_tag_that_cannot_be_stored_is_named_and_nothing_is_written(
    tq: Any, tag: dict[str, Any], words: tuple[str, ...]
) -> None:
    client = tq.get_client()
    calls: dict[str, Callable[[], Any]] = {
        "kv_batch_put": lambda: tq.kv_batch_put(["a", "b"], "p", _rows(2), tags=[{}, tag]),
        "put": lambda: client.put(_rows(2), partition_id="p", custom_meta=[{}, tag]),
    }
    for op, call in calls.items():
        with pytest.raises(errors.InvalidArgumentError) as caught:
            call()
        assert caught.value.op == op
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(errors.InvalidArgumentError, match="tags"):
        tq.kv_list(tags=tag)
    assert tq.kv_list() == {}


@pytest.mark.parametrize("wrong", [5, 1.5, True], ids=repr)
def test_tags_that_are_no_list_are_refused_by_name(tq: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="kv_batch_put: tags: got"):
        tq.kv_batch_put(["a"], "p", tags=wrong)
    assert tq.kv_list() == {}


def test_any_mapping_is_a_tag(tq: Any) -> None:
    tags = [OrderedDict(a=1), types.MappingProxyType({"a": 2}), OmegaConf.create({"a": 3}), {"a": 4}]
    keys = [str(row) for row in range(len(tags))]
    tq.kv_batch_put(keys, "p", tags=tags)
    assert tq.kv_list("p") == {"p": {key: {"a": row + 1} for row, key in enumerate(keys)}}
    assert list(tq.kv_list("p", tags=types.MappingProxyType({"a": 2}))["p"]) == ["1"]


def test_a_text_that_is_no_text_is_a_value_like_others(tq: Any) -> None:
    tq.kv_put("a", "p", tag={"a": "\ud800"})
    assert tq.kv_list("p") == {"p": {"a": {"a": "\ud800"}}}


def test_a_value_that_cannot_be_read_keeps_nobody_from_the_rest(tq: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = tq.get_client()
    client.put(_rows(2), partition_id="p", custom_meta=[{"good": 1, "bad": _Unreadable()}, {"good": 2}])
    tq.kv_put("key", "p", tag={"bad": _Unreadable(), "good": 3})

    assert tq.kv_list("p")["p"]["key"]["good"] == 3
    assert "RuntimeError: not here" in caplog.text
    fetched = client.get_meta(["x"], 2, "p", "fetch", "task")
    assert [tag["good"] for tag in fetched.custom_meta] == [1, 2]
    packed = fetched.custom_meta[0]["bad"]
    assert isinstance(packed, msgspec.msgpack.Ext)

    fetched.update_custom_meta([{"good": 4}, {"good": 5}])
    client.set_custom_meta(fetched)
    again = client.get_meta(["x"], None, "p", "force_fetch").custom_meta
    assert [tag["good"] for tag in again] == [4, 5, 3]
    assert again[0]["bad"] == packed
