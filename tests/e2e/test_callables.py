"""Python of users where the data lies: merge functions and data parsers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from processes import Nursery, until
from transfer_queue import errors


def _table(**columns: Any) -> TensorDict:
    count = len(next(iter(columns.values())))
    packed = {name: NonTensorStack(*c) if isinstance(c, list) else c for name, c in columns.items()}
    return TensorDict(packed, batch_size=[count])


def _doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: [2 * value for value in column] for name, column in columns.items()}


class _Times:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, old: Any, new: Any) -> Any:
        return old * self.factor + new


def test_parsers_and_merges_from_threads(tq: Any) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            key, factor = str(number), number + 2
            tq.kv_put(key, "p", {"x": torch.tensor([number]), "t": "ab"}, data_parser=_doubled)
            tq.kv_update(key, "p", {"x": torch.tensor([1])}, lambda old, new: old * factor + new)
            tq.kv_update(key, "p", {"x": torch.tensor([1])}, _Times(factor))
            tq.kv_update(key, "p", {"x": torch.tensor([1])}, functools.partial(lambda k, old, new: old + k * new, 7))
            got = tq.kv_batch_get(key, "p")
            assert got["x"].values().tolist() == [(2 * number * factor + 1) * factor + 1 + 7]
            assert got["t"] == ["abab"]
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    assert not failed, failed


def test_callables_of_another_process(tq: Any, nursery: Nursery) -> None:
    def other(line: Any) -> None:
        import transfer_queue as tq

        offset = 100

        class Local:
            def __call__(self, old: Any, new: Any) -> Any:
                return old + new + offset

        tq.kv_put("a", "p", {"x": torch.tensor([1])}, data_parser=lambda c: {"x": c["x"] + offset})
        tq.kv_update("a", "p", {"x": torch.tensor([1])}, Local())

    nursery.start(other).result()
    assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [202]


def _waits(folder: Path, count: int) -> Callable[[Any, Any], Any]:
    """A merge that tells by a file that it has begun, and ends when so many files are there."""

    def waits(old: Any, new: Any) -> Any:
        (folder / str(threading.get_ident())).touch()
        until(lambda: len(list(folder.iterdir())) >= count, "others have begun", 50)
        return old + new

    return waits


def test_a_slow_callable_holds_up_only_its_own_cells(tq: Any, tmp_path: Path) -> None:
    tq.kv_batch_put(["slow", "fast"], "p", _table(x=torch.zeros(2, 3)))
    worker = threading.Thread(target=tq.kv_update, args=("slow", "p", {"x": torch.ones(3)}, _waits(tmp_path, 2)))
    worker.start()
    until(lambda: list(tmp_path.iterdir()), "it has begun")
    for _ in range(30):
        tq.kv_update("fast", "p", {"x": torch.ones(3)}, lambda old, new: old + new, timeout=20)
        tq.kv_put("other", "p", {"x": torch.ones(3)}, timeout=20)
        assert tq.kv_batch_get("slow", "p")["x"].values().tolist() == [0.0] * 3
    (tmp_path / "end").touch()
    worker.join()
    assert tq.kv_batch_get("slow", "p")["x"].values().tolist() == [1.0] * 3


def test_more_slow_callables_than_threads_at_first(tq: Any, tmp_path: Path) -> None:
    """None ends before all of them have begun."""
    keys = [str(n) for n in range(20)]
    tq.kv_batch_put(keys, "p", _table(x=torch.zeros(20)))
    merge = _waits(tmp_path, 20)
    workers = [threading.Thread(target=tq.kv_update, args=(key, "p", {"x": torch.ones(())}, merge)) for key in keys]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert tq.kv_batch_get(keys, "p")["x"].tolist() == [1.0] * 20


def test_a_callable_may_use_the_queue(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    tq.kv_put("b", "p", {"x": torch.full((1,), 5.0)})

    def reads(old: Any, new: Any) -> Any:
        import transfer_queue as tq

        return old + tq.kv_batch_get("b", "p")["x"].values()

    tq.kv_update("a", "p", {"x": torch.zeros(1)}, reads)
    assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [5.0]


def test_an_update_whose_time_is_over_changes_nothing(tq: Any, tmp_path: Path) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    end = tmp_path / "end"

    def waits(old: Any, new: Any) -> Any:
        until(end.exists, "the test goes on", 50)
        return old + new

    with pytest.raises(TimeoutError):
        tq.kv_update("a", "p", {"x": torch.ones(1)}, waits, timeout=0.2)
    end.touch()
    assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [0.0]
    tq.kv_update("a", "p", {"x": torch.ones(1)}, "add")
    assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [1.0]


def _raises(old: Any, new: Any) -> Any:
    raise ZeroDivisionError("by the user")


def _exits(old: Any, new: Any) -> Any:
    raise SystemExit(3)


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raises_what_has_no_text(old: Any, new: Any) -> Any:
    raise _Mute


def test_errors_without_a_text_cost_no_thread(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    for _ in range(3):
        with pytest.raises(errors.FailedError, match=r"_Mute: .its text cannot be had: RuntimeError"):
            tq.kv_update("a", "p", {"x": torch.ones(1)}, _raises_what_has_no_text, timeout=20)
    tq.kv_update("a", "p", {"x": torch.ones(1)}, lambda old, new: old + new, timeout=20)
    assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [1.0]


@pytest.mark.parametrize(
    ("merge", "text"),
    [
        (_raises, "ZeroDivisionError: by the user"),
        (_exits, "SystemExit"),
        (lambda old, new: None, "None"),
        (lambda old, new: old.double(), "float64"),
        (lambda old, new: "text", "str"),
        (lambda old, new: [1.0], "list"),
        (lambda old: old, "argument"),
    ],
    ids=["raises", "exits", "none", "dtype", "kind", "list", "signature"],
)
def test_a_merge_that_fails_changes_nothing_anywhere(tq: Any, merge: Any, text: str) -> None:
    """Ten samples on two units; only the last one fails."""
    keys = [str(n) for n in range(10)]
    tq.kv_batch_put(keys, "p", _table(x=torch.arange(10.0), y=torch.arange(10)))
    before = [unit.memory_used_bytes for unit in tq.list_units()]

    def sometimes(old: Any, new: Any) -> Any:
        return merge(old, new) if float(old) == 9 else old + new

    with pytest.raises(errors.FailedError, match="merge_fn") as raised:
        tq.kv_batch_update(keys, "p", _table(x=torch.ones(10), y=torch.ones(10, dtype=torch.int64)), sometimes)
    assert text in str(raised.value)
    assert "'9'" in str(raised.value)
    assert "transfer_queue" not in str(raised.value), "a line of the package is no line of the user's"
    got = tq.kv_batch_get(keys, "p")
    assert torch.equal(got["x"], torch.arange(10.0))
    assert torch.equal(got["y"], torch.arange(10))
    assert [unit.memory_used_bytes for unit in tq.list_units()] == before
    assert all(unit.staged == 0 for unit in tq.list_units())
    tq.kv_batch_update(keys, "p", _table(x=torch.ones(10)), "add")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (lambda columns: None, "data_parser must return a dict"),
        (lambda columns: {**columns, "more": columns["x"]}, "data_parser must not change dict keys"),
        (lambda columns: {"x": columns["x"][:1]}, "data_parser changed the number of elements"),
        (lambda columns: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_parser_that_fails_leaves_nothing(tq: Any, parser: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        tq.kv_batch_put(["a", "b"], "p", _table(x=torch.arange(6).reshape(2, 3)), tags=[{}, {}], data_parser=parser)
    assert not any(tq.kv_list().values())
    assert [unit.memory_used_bytes for unit in tq.list_units()] == [0, 0]


def test_native_merges(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.tensor([1, 5]), "t": torch.tensor(3)})
    for merge, want in [
        ("add", [3, 8]),
        (tq.merge.max, [3, 8]),
        ("min", [2, 3]),
        ("concat", [2, 3, 2, 3]),
        (tq.merge.replace, [2, 3]),
    ]:
        tq.kv_update("a", "p", {"x": torch.tensor([2, 3])}, merge)
        assert tq.kv_batch_get("a", "p")["x"].values().tolist() == want, merge
    with pytest.raises(errors.InvalidArgumentError, match="median"):
        tq.kv_update("a", "p", {"x": torch.tensor([1, 1])}, "median")
