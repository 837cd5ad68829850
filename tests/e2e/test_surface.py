"""What the package shows: names, that they can be replaced, and documentation that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import transfer_queue
from transfer_queue import metadata

_MODULES = [
    f"transfer_queue.{module.name}"
    for module in pkgutil.iter_modules(transfer_queue.__path__)
    if module.name != "_core"  # the library of the core, which is no Python module
]
_PUBLIC = sorted({*transfer_queue.__all__} - {"errors", "merge", "__version__"})


def test_everything_that_is_promised_is_there() -> None:
    for name in transfer_queue.__all__:
        assert name in vars(transfer_queue), "a plain attribute, so that it can be replaced"
    assert transfer_queue.KVBatchMeta is metadata.KVBatchMeta
    assert inspect.isclass(transfer_queue.BatchMeta)
    assert len(transfer_queue.BatchMeta()) == 0
    assert Version(transfer_queue.__version__) >= Version("0.1.11")
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        getattr(transfer_queue, "nothing_of_ours")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from transfer_queue import nothing_of_ours")


def test_async_twins_have_the_same_parameters() -> None:
    for name in _PUBLIC:
        twin = getattr(transfer_queue, f"async_{name}", None)
        if twin is not None:
            assert list(inspect.signature(twin).parameters) == list(
                inspect.signature(getattr(transfer_queue, name)).parameters
            )
    client = transfer_queue.TransferQueueClient
    for name in dir(client):
        if name.startswith("async_"):
            waiting = getattr(client, name.removeprefix("async_"))
            assert inspect.signature(waiting) == inspect.signature(getattr(client, name)), name


@pytest.mark.parametrize("name", ["kv_list", "kv_clear", "kv_batch_get", "kv_batch_put", "kv_put", "__version__"])
def test_functions_can_be_replaced(tq: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As tests of programs do (clients.md 15): looked up when called, also by code that imported the package before."""
    original = getattr(tq, name)
    calls = []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **named)

    def program() -> Any:
        import transfer_queue as tq

        tq.kv_put("a", "p", {"x": torch.ones(1)})
        return tq.kv_list("p"), tq.__version__

    monkeypatch.setattr(tq, name, counted if callable(original) else "9.9.9")
    listed, version = program()
    assert listed == {"p": {"a": {}}}
    assert calls if name in ("kv_list", "kv_put") else not calls
    assert version == ("9.9.9" if name == "__version__" else original if not callable(original) else tq.__version__)
    monkeypatch.undo()
    assert getattr(tq, name) is original


def test_modules_where_programs_look() -> None:
    from importlib import resources

    interface = importlib.import_module("transfer_queue.interface")
    for name in ("_TQ_CLIENT", "_TQ_CONTROLLER", "_TQ_STORAGE"):
        assert hasattr(interface, name)
    assert "storage_backend" in (resources.files("transfer_queue") / "config.yaml").read_text()
    from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.sampler import BaseSampler, SequentialSampler

    assert issubclass(TransferQueueClient, AsyncTransferQueueClient)
    assert issubclass(SequentialSampler, BaseSampler)
    assert (BatchMeta, KVBatchMeta) == (transfer_queue.BatchMeta, transfer_queue.KVBatchMeta)


def _documented(item: Any) -> str:
    return inspect.getdoc(item) or ""


@pytest.mark.parametrize("name", _PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    item = getattr(transfer_queue, name)
    assert _documented(item), name
    if inspect.isclass(item):
        for method, function in vars(item).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert _documented(getattr(item, method)), f"{name}.{method}"


def test_arguments_in_the_documentation_exist() -> None:
    """``Args:`` of a docstring names parameters of the function, and no others."""
    for name in _PUBLIC:
        item = getattr(transfer_queue, name)
        text = _documented(item)
        if not callable(item) or "Args:" not in text:
            continue
        section = text.split("Args:\n")[1].split("\n\n")[0]
        named = [line.split(":")[0].strip() for line in section.splitlines() if line[:4] == "    " and line[4] != " "]
        parameters = list(inspect.signature(item).parameters)
        assert [word for word in named if word not in parameters] == [], name
        if name.startswith("kv_"):
            assert named == parameters, f"{name}: describe every argument, in order"


@pytest.mark.parametrize("module", _MODULES)
def test_examples_in_docstrings_run(runtime_dir: Path, module: str) -> None:
    found = importlib.import_module(module)
    failed, _ = doctest.testmod(found, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_functions_that_everybody_uses_have_an_example() -> None:
    interface = importlib.import_module("transfer_queue.interface")
    parsed = ast.parse(inspect.getsource(interface))
    texts = {
        node.name: ast.get_docstring(node) or ""
        for node in parsed.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name in ("init", "kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_update", "kv_list", "kv_clear", "kv_wait"):
        assert ">>> " in texts[name], name
    assert ">>> " in texts["kv_watch"]
    assert ">>> " in _documented(transfer_queue.TransferQueueClient)
