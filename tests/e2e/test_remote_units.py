"""A client that attaches over TCP to a session whose storage units are processes of their own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, program, until
from transfer_queue import _session
from transfer_queue._calls import run
from transfer_queue._controller_requests import join_units
from transfer_queue._unit import UnitHost

KEYS = [f"k{i}" for i in range(6)]
WIDTHS = [3, 20_000, 1 << 20]  # inside the message, on a stream, on several

pytestmark = pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")


def _hosts(line: Any, name: str) -> None:
    host = UnitHost(name)
    line.send(host.address)
    line.recv()
    host.close()


@pytest.fixture
def unit_processes(runtime_dir: Path, nursery: Nursery) -> dict[str, Any]:
    return {name: nursery.start(_hosts, name) for name in ("unit-a", "unit-b")}


@pytest.fixture
def address(unit_processes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a session listens whose owner, this process, has no unit."""
    import transfer_queue

    options = _session._options
    monkeypatch.setattr(_session, "_options", lambda *args: {**options(*args), "units": -1})
    transfer_queue.init({"client": {"timeout_s": 20}, "remote": {"listen": "tcp://:0"}})
    try:
        session = _session.current()
        addresses = [child.recv() for child in unit_processes.values()]
        run(session.handle, join_units(addresses, session.timeout_s))
        yield session.info.to_addr("requests")
    finally:
        transfer_queue.close()


def _attached(at: str) -> Any:
    """The package, attached over TCP. For a process that has no session yet."""
    import transfer_queue

    os.environ["TQ_ADDRESS"] = at
    transfer_queue.init()
    assert _session.current().info.to_addr("requests") == at
    return transfer_queue


def _batch(width: int, factor: float = 1.0) -> TensorDict:
    rows = torch.arange(len(KEYS) * width, dtype=torch.float32).reshape(len(KEYS), width) * factor
    ragged = torch.nested.nested_tensor([torch.arange(i + 1) for i in range(len(KEYS))], layout=torch.jagged)
    data = {"x": rows, "ragged": ragged, "text": [f"row {i}" for i in range(len(KEYS))]}
    return TensorDict(data, batch_size=[len(KEYS)])


def _rows(got: Any, field: str) -> list[torch.Tensor]:
    return list(got[field].unbind())


def _everything(line: Any, at: str, width: int) -> None:
    tq = _attached(at)
    sent = _batch(width)
    for i, key in enumerate(KEYS):  # one write after another, so that both units get some
        tq.kv_batch_put([key], "p", sent[i : i + 1], tags=[{"n": i}])
    used = {unit.unit_id: unit.memory_used_bytes for unit in tq.list_units()}
    assert sorted(used) == ["unit-a", "unit-b"]
    assert all(n > 0 for n in used.values()), used

    for copy in (True, False):
        order = [4, 0, 5, 3]
        got = tq.kv_batch_get([KEYS[i] for i in order], "p", copy=copy)
        for row, i in enumerate(order):
            assert torch.equal(_rows(got, "x")[row], sent["x"][i])
            assert _rows(got, "ragged")[row].tolist() == list(range(i + 1))
            assert got["text"][row] == f"row {i}"
        _rows(got, "x")[0].fill_(-1)
        again = tq.kv_batch_get([KEYS[4]], "p", select_fields=["x"], copy=copy)
        assert torch.equal(_rows(again, "x")[0], sent["x"][4]), "what is got is independent"

    kept = tq.kv_batch_get(KEYS, "p", select_fields=["x"], copy=False)
    operand = TensorDict({"x": torch.ones(len(KEYS), width)}, batch_size=[len(KEYS)])
    tq.kv_batch_update(KEYS, "p", operand, "add")
    tq.kv_batch_update(KEYS, "p", operand * 3, lambda old, new: old * new)
    got = tq.kv_batch_get(KEYS, "p", select_fields=["x"])
    assert all(torch.equal(row, (sent["x"][i] + 1) * 3) for i, row in enumerate(_rows(got, "x")))
    assert all(torch.equal(row, sent["x"][i]) for i, row in enumerate(_rows(kept, "x"))), "a view keeps its version"
    parsed = tq.kv_batch_put(["parsed"], "p", operand[:1], data_parser=lambda d: {"x": d["x"] * 5})
    assert parsed.keys == ["parsed"]
    assert _rows(tq.kv_batch_get(["parsed"], "p", select_fields=["x"]), "x")[0].sum() == 5 * width
    assert tq.kv_list("p")["p"]["k3"] == {"n": 3}
    line.send("stored")
    line.recv()

    tq.kv_clear(KEYS[:2], "p")
    tq.kv_clear(KEYS[2:], "p", fields=["x"])
    left = tq.kv_batch_get(KEYS[2:], "p")
    assert set(left.keys()) == {"ragged", "text"}
    tq.kv_clear([*KEYS[2:], "parsed"], "p")
    del kept, got, again, left
    for unit in tq.list_units():
        assert (unit.memory_used_bytes, unit.samples, unit.cells, unit.leases, unit.staged) == (0, 0, 0, 0, 0)
    tq.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_works_over_tcp_and_unit_processes(address: str, nursery: Nursery, width: int) -> None:
    import transfer_queue as tq

    child = nursery.start(_everything, address, width)
    assert child.recv(60) == "stored"
    got = tq.kv_batch_get(KEYS, "p", select_fields=["x"])  # the owner maps what the other one has streamed
    sent = _batch(width)["x"]
    assert all(torch.equal(row, (sent[i] + 1) * 3) for i, row in enumerate(_rows(got, "x")))
    del got
    child.send("clear")
    child.result()


def _keeps_reading(line: Any, at: str) -> str:
    tq = _attached(at)
    operand = TensorDict({"x": torch.ones(8, 1 << 18)}, batch_size=[8])
    keys = [f"k{i}" for i in range(8)]
    for i, key in enumerate(keys):
        tq.kv_batch_put([key], "p", operand[i : i + 1])
    line.send("reading")
    try:
        while True:
            tq.kv_batch_put([f"more{i}" for i in range(8)], "p", operand)
            assert sum(row.sum().item() for row in _rows(tq.kv_batch_get(keys, "p"), "x")) == 8 << 18
    except ConnectionError as error:
        return str(error)


def test_a_unit_is_killed_under_a_client_over_tcp(
    address: str, unit_processes: dict[str, Any], nursery: Nursery
) -> None:
    import transfer_queue as tq

    child = nursery.start(_keeps_reading, address)
    assert child.recv() == "reading"
    unit_processes["unit-a"].signal(signal.SIGKILL)
    assert re.search('unit "unit-a".* is gone', child.result())
    assert {u.unit_id: u.state for u in tq.list_units()} == {"unit-a": "UNAVAILABLE", "unit-b": "ACTIVE"}


def test_the_session_ends_under_a_client_over_tcp(address: str, nursery: Nursery) -> None:
    import transfer_queue as tq

    child = nursery.start(_keeps_reading, address)
    assert child.recv() == "reading"
    tq.close()
    said = child.result()
    assert re.search(rf"the session (is closing|was closed)|{re.escape(address)}.*(closed|is gone)", said), said


def test_a_client_over_tcp_that_is_killed_leaves_nothing(address: str, nursery: Nursery) -> None:
    import transfer_queue as tq

    child = nursery.start(_keeps_reading, address)
    assert child.recv() == "reading"
    child.signal(signal.SIGKILL)
    child.wait()
    tq.kv_clear(list(tq.kv_list("p")["p"]), "p")

    def nothing() -> bool:
        listed = tq.kv_list("p").get("p") or {}
        if listed:  # a put that was under way
            tq.kv_clear(list(listed), "p")
        return all(u.memory_used_bytes + u.leases + u.staged == 0 for u in tq.list_units())

    until(nothing, "leases and staged writes end", 30)


def test_a_program_attaches_by_its_environment(address: str) -> None:
    code = "import transfer_queue as tq; tq.init(); tq.kv_put('a', 'p', {'n': 1}); print(tq.kv_list())"
    with program("-c", code, TQ_ADDRESS=address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "{'p': {'a': {}}}\n"
