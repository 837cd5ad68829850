"""Storage units in processes of their own: what a session over them does, also when one dies or hangs."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Child, Nursery, until
from transfer_queue import _session
from transfer_queue._controller_requests import join_units
from transfer_queue._unit import UnitHost
from transfer_queue.errors import (
    AlreadyExistsError,
    DataLostError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TransferQueueError,
    UnavailableError,
)
from transfer_queue.utils.zmq_utils import ZMQServerInfo

BIG = 1 << 18  # float32: 1 MiB


def _hosts(line: Any, name: str, limit: int, samples: int) -> None:
    host = UnitHost(name, limit, samples)
    line.send(host.address)
    line.recv()
    host.close()


class Units:
    """Unit processes and the session over them."""

    def __init__(self, tq: Any, nursery: Nursery) -> None:
        self.tq, self.nursery = tq, nursery
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, ZMQServerInfo] = {}

    def start(self, name: str, limit: int = 0, samples: int = 0) -> ZMQServerInfo:
        child = self.nursery.start(_hosts, name, limit, samples)
        self.children[name] = child
        self.addresses[name] = child.recv()
        return self.addresses[name]

    def join(self, *names: str) -> None:
        session = _session.current()
        session_call(session, join_units([self.addresses[name] for name in names], session.timeout_s))

    def state(self) -> dict[str, str]:
        return {unit.unit_id: unit.state for unit in self.tq.list_units()}

    def used(self) -> dict[str, int]:
        return {unit.unit_id: unit.memory_used_bytes for unit in self.tq.list_units()}

    def signal(self, name: str, number: int) -> None:
        child = self.children[name]
        child.signal(number)
        if number == signal.SIGSTOP:
            until(lambda: _stopped(child.pid), f"process {child.pid} has stopped")


def _stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more, which is a moment after it was told to stop."""
    states = [path.read_text().rsplit(")", 1)[1].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def session_call(session: Any, call: Any) -> Any:
    from transfer_queue._calls import run

    return run(session.handle, call)


@pytest.fixture
def bare(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package with a session whose controller has no unit in its own process."""
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    transfer_queue.init({"client": {"timeout_s": 20}, "backend": {"SimpleStorage": {"put_wait_s": 1.0}}})
    try:
        yield transfer_queue
    finally:
        transfer_queue.close()


@pytest.fixture
def units(bare: Any, nursery: Nursery) -> Units:
    """A session over two unit processes."""
    made = Units(bare, nursery)
    made.start("unit-a")
    made.start("unit-b")
    made.join("unit-a", "unit-b")
    return made


def _batch(values: list[float], width: int) -> TensorDict:
    rows = torch.stack([torch.full((width,), v) for v in values])
    return TensorDict({"x": rows, "n": torch.tensor(values)}, batch_size=[len(values)])


def _spread(units: Units, width: int = BIG) -> dict[str, str]:
    """Stores rows until both units have some; returns a key on each."""
    for i in range(8):
        units.tq.kv_batch_put([f"k{i}"], "p", _batch([float(i)], width))
    on: dict[str, str] = {}
    for i in range(8):
        before = units.used()
        units.tq.kv_clear([f"k{i}"], "p")
        after = units.used()
        (name,) = [n for n in before if before[n] != after[n]]
        units.tq.kv_batch_put([f"k{i}"], "p", _batch([float(i)], width))
        now = units.used()
        (name,) = [n for n in after if after[n] != now[n]]
        on.setdefault(name, f"k{i}")
    assert sorted(on) == ["unit-a", "unit-b"]
    return on


@pytest.mark.parametrize("width", [3, BIG])
def test_everything_works_over_units_of_other_processes(units: Units, width: int) -> None:
    tq = units.tq
    keys = [f"k{i}" for i in range(6)]
    for key, value in zip(keys, range(6), strict=True):
        tq.kv_batch_put([key], "p", _batch([float(value)], width), tags=[{"v": value}])
    assert all(used > 0 for used in units.used().values()), "rows went to both units"
    assert sum(units.used().values()) == 6 * 4 * (width + 1)

    got = tq.kv_batch_get(keys[::-1], "p")
    assert got["n"].tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert [row[0].item() for row in got["x"].unbind()] == got["n"].tolist()
    assert [len(row) for row in got["x"].unbind()] == [width] * 6

    tq.kv_batch_update(keys, "p", _batch([1.0] * 6, width), "add")
    tq.kv_batch_update(keys, "p", _batch([2.0] * 6, width).select("x"), lambda old, new: old * new)
    got = tq.kv_batch_get(keys, "p", select_fields=["x"])
    assert [row[0].item() for row in got["x"].unbind()] == [2.0 * (v + 1) for v in range(6)]

    views = tq.kv_batch_get(keys, "p", select_fields=["x"], copy=False)
    tq.kv_batch_put(keys, "p", _batch([9.0] * 6, width))
    assert [row[-1].item() for row in views["x"].unbind()] == [2.0 * (v + 1) for v in range(6)], (
        "a view keeps its version"
    )
    del views, got
    gc.collect()
    until(lambda: sum(units.used().values()) == 6 * 4 * (width + 1), "leases of views end")

    tq.kv_clear(keys[:2], "p")
    assert sum(units.used().values()) == 4 * 4 * (width + 1), "exact as soon as the clear is over"
    tq.kv_clear(keys[2:], "p", fields=["x"])
    assert sum(units.used().values()) == 4 * 4
    tq.kv_clear(keys, "p")
    for unit in tq.list_units():
        assert (unit.memory_used_bytes, unit.samples, unit.cells, unit.leases, unit.staged) == (0, 0, 0, 0, 0)


def test_another_process_attaches(units: Units, nursery: Nursery) -> None:
    def works(line: Any) -> list[float]:
        import transfer_queue as tq

        tq.init()
        rows = torch.stack([torch.full((BIG,), float(i)) for i in range(4)])
        tq.kv_batch_put(["a", "b", "c", "d"], "q", TensorDict({"x": rows}, batch_size=[4]))
        got = tq.kv_batch_get(["d", "a"], "q")["x"]
        return [row[7].item() for row in got.unbind()]

    assert nursery.start(works).result() == [3.0, 0.0]
    got = units.tq.kv_batch_get(["c"], "q")["x"]
    assert got.unbind()[0][BIG - 1].item() == 2.0


def test_a_session_without_units_says_so_until_one_joins(bare: Any, nursery: Nursery) -> None:
    with pytest.raises(UnavailableError, match="no storage unit has joined"):
        bare.kv_put("a", "p", {"x": torch.zeros(2)})
    assert bare.kv_list() == {}
    assert bare.list_units() == []
    units = Units(bare, nursery)
    units.start("unit-a", 1 << 20, 3)
    units.join("unit-a")
    units.join("unit-a")  # nothing happens
    for key in ["a", "b", "c"]:
        bare.kv_put(key, "p", {"x": torch.zeros(2)})
    with pytest.raises(TransferQueueError, match="Storage capacity exceeded"):
        bare.kv_put("d", "p", {"x": torch.zeros(2)})
    (unit,) = bare.list_units()
    assert (unit.unit_id, unit.state, unit.memory_limit_bytes) == ("unit-a", "ACTIVE", 1 << 20)
    bare.kv_put("a", "p", {"y": torch.zeros(1 << 17)})
    with pytest.raises(ResourceExhaustedError, match="no room after"):
        bare.kv_put("b", "p", {"y": torch.zeros(1 << 17)})


def test_what_cannot_join_is_refused(units: Units, nursery: Nursery) -> None:
    session = _session.current()

    def join(**changes: Any) -> None:
        address = copy.copy(units.addresses["unit-a"])
        vars(address).update(changes)
        session_call(session, join_units([address], session.timeout_s))

    with pytest.raises(UnavailableError, match="unit-c"):
        join(id="unit-c", socket=units.addresses["unit-a"].socket + "x")
    with pytest.raises(InvalidArgumentError, match="secret"):
        join(id="unit-c", secret=b"wrong")
    with pytest.raises(AlreadyExistsError, match="unit-a"):
        join(id="unit-c")
    with pytest.raises(AlreadyExistsError, match="unit-b"):
        join(id="unit-b")
    with pytest.raises(InvalidArgumentError, match="name, socket or address, and secret"):
        join(id="")
    assert units.state() == {"unit-a": "ACTIVE", "unit-b": "ACTIVE"}
    units.tq.kv_put("a", "p", {"x": torch.zeros(2)})


@pytest.mark.parametrize("width", [3, BIG])
def test_a_unit_is_killed(units: Units, width: int) -> None:
    tq = units.tq
    on = _spread(units, width)
    dead, alive = on["unit-a"], on["unit-b"]
    units.signal("unit-a", signal.SIGKILL)
    until(lambda: units.state()["unit-a"] == "UNAVAILABLE", "the death is noticed")
    assert units.state()["unit-b"] == "ACTIVE"

    for call in (
        lambda: tq.kv_batch_get([dead], "p"),
        lambda: tq.kv_batch_get([dead, alive], "p"),
        lambda: tq.kv_batch_put([dead], "p", _batch([1.0], width)),
        lambda: tq.kv_batch_update([dead], "p", _batch([1.0], width), "add"),
        lambda: tq.kv_batch_update([dead], "p", _batch([1.0], width), lambda old, new: new),
    ):
        with pytest.raises(UnavailableError, match="unit-a"):
            call()  # type: ignore[no-untyped-call]
    assert tq.kv_batch_get([alive], "p")["n"].tolist() == [float(alive[1:])]
    tq.kv_batch_update([alive], "p", _batch([1.0], width), lambda old, new: old + new)
    fresh = [f"new{i}" for i in range(4)]
    for key in fresh:
        tq.kv_batch_put([key], "p", _batch([7.0], width))
    assert tq.kv_batch_get(fresh, "p")["n"].tolist() == [7.0] * 4

    with pytest.raises(UnavailableError, match="unit-a"):
        tq.kv_clear([dead], "p")
    assert dead not in tq.kv_list("p")["p"]
    tq.kv_clear([dead], "p")
    tq.kv_batch_put([dead], "p", _batch([3.0], width))
    assert tq.kv_batch_get([dead], "p")["n"].tolist() == [3.0]

    units.start("unit-a")  # a new process under the old name
    units.join("unit-a")
    assert units.state() == {"unit-a": "ACTIVE", "unit-b": "ACTIVE"}
    lost = tq.list_lost()["p"]
    assert all(fields == ["n", "x"] for fields in lost.values())
    assert not {dead, alive, *fresh} & set(lost)
    (again,) = list(lost)[:1]
    with pytest.raises(DataLostError, match=again):
        tq.kv_batch_get([again, alive], "p")
    tq.kv_batch_put([again], "p", _batch([5.0], width))
    assert tq.kv_batch_get([again, alive], "p")["n"].tolist() == [5.0, 2 * float(alive[1:])]


def test_a_unit_that_hangs_holds_up_only_who_needs_it(units: Units) -> None:
    tq = units.tq
    on = _spread(units)
    hung, alive = on["unit-a"], on["unit-b"]
    units.signal("unit-a", signal.SIGSTOP)
    try:
        for call in (
            lambda: tq.kv_batch_get([hung], "p", timeout=0.5),
            lambda: tq.kv_batch_put([hung], "p", _batch([1.0], 3), timeout=0.5),
            lambda: tq.kv_batch_update([hung], "p", _batch([1.0], BIG), "add", timeout=0.5),
            lambda: tq.kv_clear([hung], "p", timeout=0.5),
        ):
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                call()  # type: ignore[no-untyped-call]
            assert time.monotonic() - started < 5
        started = time.monotonic()
        assert tq.kv_batch_get([alive], "p")["n"].tolist() == [float(alive[1:])]
        assert time.monotonic() - started < 5
        assert units.state() == {"unit-a": "ACTIVE", "unit-b": "ACTIVE"}
    finally:
        units.signal("unit-a", signal.SIGCONT)
    tq.kv_clear([hung], "p")
    rest = list(tq.kv_list("p")["p"])
    assert sorted(tq.kv_batch_get(rest, "p")["n"].tolist()) == sorted(float(key[1:]) for key in rest)
    tq.kv_clear(rest, "p")

    def nothing() -> bool:
        return all(
            (u.memory_used_bytes, u.samples, u.cells, u.leases, u.staged) == (0, 0, 0, 0, 0) for u in tq.list_units()
        )

    until(nothing, "what was given up has left nothing behind")


def test_a_unit_is_used_by_one_session_after_another(
    runtime_dir: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    units = Units(transfer_queue, nursery)
    units.start("unit-a")
    for value in (1.0, 2.0):
        transfer_queue.init()
        units.join("unit-a")
        assert units.used() == {"unit-a": 0}, "it begins empty"
        transfer_queue.kv_batch_put(["a"], "p", _batch([value], BIG))
        assert transfer_queue.kv_batch_get(["a"], "p")["n"].tolist() == [value]
        transfer_queue.close()


def test_sockets_of_units(runtime_dir: Path, nursery: Nursery, bare: Any) -> None:
    units = Units(bare, nursery)
    a, b = units.start("unit-a"), units.start("unit-b")
    assert Path(a.socket).parent == runtime_dir
    assert os.stat(a.socket).st_mode & 0o077 == 0
    units.children["unit-a"].send("end")
    units.children["unit-a"].wait()
    assert not Path(a.socket).exists(), "removed by its owner"
    units.signal("unit-b", signal.SIGKILL)
    units.children["unit-b"].wait()
    assert Path(b.socket).exists()
    c = units.start("unit-c")
    assert not Path(b.socket).exists(), "swept when its owner is dead"
    assert Path(c.socket).exists()
    bare.close()
    bare.init()
    assert Path(c.socket).exists(), "a session that begins leaves the sockets of living units alone"


def test_a_unit_in_the_same_process_as_its_controller(bare: Any) -> None:
    host = UnitHost("unit-a", sample_limit=2)
    try:
        session = _session.current()
        session_call(session, join_units([host.address], session.timeout_s))
        bare.kv_batch_put(["a", "b"], "p", _batch([1.0, 2.0], BIG))
        bare.kv_batch_update(["a"], "p", _batch([1.0], BIG).select("n"), lambda old, new: old + new)
        assert bare.kv_batch_get(["a", "b"], "p")["n"].tolist() == [2.0, 2.0]
    finally:
        bare.close()
        host.close()
    host.close()


@pytest.mark.parametrize(
    ("name", "limit", "match"), [("", 0, "unit name"), ("a" * 300, 0, "unit name"), ("a", -1, "limits")]
)
def test_bad_options_of_a_unit(runtime_dir: Path, name: str, limit: int, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        UnitHost(name, limit)
    assert not list(runtime_dir.iterdir())


def test_callables_run_where_the_data_is(units: Units) -> None:
    def where(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.full_like(old, os.getpid())

    on = _spread(units, 3)
    units.tq.kv_batch_update([on["unit-a"], on["unit-b"]], "p", _batch([0.0, 0.0], 3).select("n"), where)
    got = units.tq.kv_batch_get([on["unit-a"], on["unit-b"]], "p", select_fields=["n"])["n"].tolist()
    assert got == [float(units.children["unit-a"].pid), float(units.children["unit-b"].pid)]

    parsed = units.tq.kv_batch_put(
        ["parsed"], "p", _batch([1.0], 3).select("n"), data_parser=lambda d: {"n": torch.full((1,), float(os.getpid()))}
    )
    assert parsed.keys == ["parsed"]
    assert units.tq.kv_batch_get(["parsed"], "p")["n"].item() in got


def test_a_unit_dies_while_a_callable_runs(units: Units) -> None:
    on = _spread(units, 3)

    def fatal(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return new

    started = time.monotonic()
    with pytest.raises(UnavailableError, match="unit-a"):
        units.tq.kv_batch_update(
            [on["unit-b"], on["unit-a"]], "p", _batch([5.0, 5.0], 3).select("n"), _fatal_on_a(units, fatal)
        )
    assert time.monotonic() - started < 15
    kept = float(on["unit-b"][1:])
    assert units.tq.kv_batch_get([on["unit-b"]], "p")["n"].tolist() == [kept], "all or nothing over units"
    until(lambda: all(u.staged == 0 and u.leases == 0 for u in units.tq.list_units()), "what was staged is given back")


def _fatal_on_a(units: Units, fatal: Any) -> Any:
    pid = units.children["unit-a"].pid
    return lambda old, new: fatal(old, new) if os.getpid() == pid else new
