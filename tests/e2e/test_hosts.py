"""Sessions over several hosts, for which network namespaces stand in."""

from __future__ import annotations

import itertools
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import netns
from netns import Host
from processes import until
from served import Served

pytestmark = [
    pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq"),
    pytest.mark.skipif(bool(netns.reason()), reason=netns.reason() or "-"),
    pytest.mark.timeout(180),
]

PREAMBLE = """
import sys, time, torch
import transfer_queue as tq
from tensordict import TensorDict
tq.init({"client": {"timeout_s": 20}})

def rows(n, width):
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width)

def holders():
    return {u.unit_id: u.memory_used_bytes for u in tq.list_units() if u.memory_used_bytes}
"""

EVERYTHING = (
    PREAMBLE
    + """
for n, width in ((4, 3), (16, 5000), (8, 1 << 20)):
    keys = [f"{HERE}-{i}" for i in range(n)]
    sent = TensorDict({"x": rows(n, width), "s": [f"row {i}" for i in range(n)]}, batch_size=[n])
    tq.kv_batch_put(keys, "p", sent, tags=[{"n": i} for i in range(n)])
    assert not HAS_UNIT or all(unit.startswith(HERE) for unit in holders()), holders()
    for copy in (True, False):
        got = tq.kv_batch_get(keys, "p", copy=copy)
        assert torch.equal(torch.stack(list(got["x"].unbind())), rows(n, width))
        assert got["s"][2] == "row 2"
        del got
    tq.kv_batch_update(keys, "p", TensorDict({"x": rows(n, width)}, batch_size=[n]), "add")
    tq.kv_update(keys[1], "p", {"x": rows(n, width)[1]}, lambda old, new: old - new)
    got = torch.stack(list(tq.kv_batch_get(keys, "p", select_fields=["x"])["x"].unbind()))
    want = 2 * rows(n, width)
    want[1] = rows(n, width)[1]
    assert torch.equal(got, want)
    assert tq.kv_list("p")["p"][keys[2]] == {"n": 2}
    with open("/proc/self/maps") as maps:
        mapped = any("memfd" in line for line in maps)
    tq.kv_clear(keys, "p")
    deadline = time.monotonic() + 10
    while holders() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not holders(), holders()
print("mapped" if mapped else "streamed")
"""
)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    with netns.hosts(3) as made:
        yield made


@pytest.fixture
def served(three: list[Host]) -> Iterator[Served]:
    """A controller on the first host, a unit on each of the two others."""
    session = Served(three[0], three[1:])
    yield session
    session.end()


def _on(host: Host, source: str, session: Served, **extra: str) -> str:
    has_unit = session.has_unit(host)
    begin = f"HERE, HAS_UNIT = {host.namespace!r}, {has_unit}\n"
    return host.run(begin + textwrap.dedent(source), **session.environment, **extra)


def test_clients_of_every_host(three: list[Host], served: Served) -> None:
    for host in three[1:]:
        assert _on(host, EVERYTHING, served).split()[-1] == "mapped", "its own unit is on this host"
    assert _on(three[0], EVERYTHING, served).split()[-1] == "streamed", "no unit is"


def test_data_goes_from_host_to_host(three: list[Host], served: Served) -> None:
    put = PREAMBLE + 'tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": rows(2, 300000)}, batch_size=[2]))'
    _on(three[1], put, served)
    get = """
        got = tq.kv_batch_get(["b", "a"], "p")["x"].unbind()
        assert torch.equal(got[1], rows(2, 300000)[0]) and torch.equal(got[0], rows(2, 300000)[1])
        print("same")
    """
    for host in three:
        assert _on(host, PREAMBLE + textwrap.dedent(get), served).split()[-1] == "same"


@pytest.mark.parametrize("what", ["netem delay 10ms 3ms loss 2%", "tbf rate 400mbit burst 64kb limit 128kb"])
def test_a_slow_network_that_loses(three: list[Host], served: Served, what: str) -> None:
    if missing := three[0].cannot(what):
        pytest.skip(missing)
    for host in three:
        host.disturb(what)
    try:
        assert _on(three[1], EVERYTHING, served).split()[-1] == "mapped"
        assert _on(three[0], EVERYTHING, served).split()[-1] == "streamed"
        if what.startswith("tbf"):
            assert three[0].dropped() > 0, "the queue was too short for the bursts"
    finally:
        for host in three:
            host.disturb("")


WAITING = (
    PREAMBLE
    + """
tq.kv_put("a", "p", {"x": rows(1, 50000)[0]})
(home,) = holders()
print("home", home, flush=True)
began = None
while True:
    try:
        tq.kv_batch_get("a", "p")
        if began is not None:
            print(f"back after {time.monotonic() - began:.1f}", flush=True)
            break
        time.sleep(0.05)
    except ConnectionError as error:
        if began is None:
            began = time.monotonic()
            print(f"gone {time.time():.1f} {error}", flush=True)
        time.sleep(0.05)
    except Exception as error:
        print(f"lost {type(error).__name__}: {error}", flush=True)
        while True:
            try:
                tq.kv_put("a", "p", {"x": rows(1, 50000)[0]})
                break
            except ConnectionError:
                time.sleep(0.1)
"""
)


def _lines(process: object) -> Iterator[list[str]]:
    for line in process.stdout:  # type: ignore[attr-defined]
        yield line.split()


def test_a_cable_that_is_out_for_a_while(three: list[Host], served: Served) -> None:
    """The unit's host is noticed to be away, and its cells are there when it is back."""
    client = three[0].start("-c", f"HERE = {three[0].namespace!r}\n" + WAITING, **served.environment)
    lines = _lines(client)
    home = next(line for line in lines if line[0] == "home")[1]
    away = next(host for host in three if home.startswith(host.namespace))
    pulled = time.time()
    away.plug(up=False)
    try:
        gone = next(lines)
        assert gone[0] == "gone", gone
        assert home in " ".join(gone)
        assert float(gone[1]) - pulled < 5.5
    finally:
        away.plug(up=True)
    back = next(lines)
    assert back[:2] == ["back", "after"], f"it has kept what it holds: {back}"
    assert client.wait(20) == 0


TURNS = (
    PREAMBLE
    + """
keys = [f"k{i}" for i in range(16)]
data = TensorDict({"x": rows(16, 1 << 20)}, batch_size=[16])
try:
    for turn in range(10000):
        tq.kv_batch_put(keys, "p", data)
        assert torch.equal(tq.kv_batch_get(keys[3], "p")["x"].unbind()[0], data["x"][3])
        print("turn", turn, flush=True)
except ConnectionError as error:
    print(f"gone {time.time():.1f} {error}", flush=True)
"""
)


@pytest.fixture
def turning(three: list[Host]) -> Iterator[tuple[Served, Iterator[list[str]]]]:
    """A session with one unit, on the second host, and a client on the third one that always has bytes under way."""
    session = Served(three[0], three[1:2])
    client = three[2].start("-c", TURNS, **session.environment)
    lines = _lines(client)
    assert next(line for line in lines if line == ["turn", "1"])
    yield session, lines
    client.kill()
    session.end()


@pytest.mark.parametrize("host", [0, 1])
def test_a_cable_that_is_pulled_under_a_large_put(
    three: list[Host], turning: tuple[Served, Iterator[list[str]]], host: int
) -> None:
    """The controller's, or the unit's."""
    session, lines = turning
    pulled = time.time()
    three[host].plug(up=False)
    try:
        gone = next(line for line in lines if line[0] != "turn")
    finally:
        three[host].plug(up=True)
    assert gone[0] == "gone", gone
    assert float(gone[1]) - pulled < 5.5
    assert (session.address, three[1].namespace)[host] in " ".join(gone)


def test_who_is_stopped_for_a_while_is_not_dead(turning: tuple[Served, Iterator[list[str]]]) -> None:
    session, lines = turning
    stopped = [session.controller, *session.units]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(7)  # longer than it takes to notice that a host has vanished
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    continued = time.time()
    seen = [line for line in itertools.takewhile(lambda _: time.time() < continued + 2, lines) if line[0] != "turn"]
    assert seen == []


def test_a_unit_that_is_killed_and_started_again(three: list[Host], served: Served) -> None:
    client = three[0].start("-c", f"HERE = {three[0].namespace!r}\n" + WAITING, **served.environment)
    lines = _lines(client)
    home = next(line for line in lines if line[0] == "home")[1]
    index = next(i for i, host in enumerate(three[1:]) if home.startswith(host.namespace))
    killed = time.time()
    os.kill(served.units[index].pid, signal.SIGKILL)
    gone = next(lines)
    assert gone[0] == "gone", gone
    assert home in " ".join(gone)
    assert float(gone[1]) - killed < 5.5
    served.units[index] = served.joined(served.start_unit(three[1 + index]))
    seen = list(lines)
    assert seen[0][:1] == ["lost"], seen
    assert seen[-1][:1] == ["back"], seen
    assert client.wait(20) == 0


def test_a_controller_that_is_killed_and_started_again(three: list[Host], served: Served) -> None:
    """The units find the new one and are empty, and so does a client."""
    client = three[1].start("-c", f"HERE = {three[1].namespace!r}\n" + WAITING, **served.environment)
    lines = _lines(client)
    next(line for line in lines if line[0] == "home")
    killed = time.time()
    os.kill(served.controller.pid, signal.SIGKILL)
    gone = next(lines)
    assert gone[0] == "gone", gone
    assert served.address in " ".join(gone)
    assert float(gone[1]) - killed < 5.5
    served.restart_controller()
    count = 'print(sum(u.state == "ACTIVE" for u in tq.list_units()))'
    until(lambda: _on(three[0], PREAMBLE + count, served).split()[-1] == "2", "the units have joined it", 40)
    assert [unit.poll() for unit in served.units] == [None, None]
    until(lambda: client.poll() is not None, "the client uses the new session", 30)
    seen = [" ".join(line) for line in lines]
    assert seen[-1].startswith("back"), seen


COUNTING = (
    PREAMBLE
    + """
keys = [f"{HERE}-{width}" for width in (3, 50000)]
def add(key, width):
    while True:
        try:
            return tq.kv_update(key, "p", {"x": torch.ones(width)}, "add")
        except ConnectionError:  # more than 64 KiB, sent and not committed: it has not happened
            assert width > 3
for key, width in zip(keys, (3, 50000)):
    tq.kv_put(key, "p", {"x": rows(1, width)[0]})
for turn in range(40):
    for key, width in zip(keys, (3, 50000)):
        add(key, width)
        assert torch.equal(tq.kv_batch_get(key, "p")["x"][0], turn + 1 + rows(1, width)[0]), (key, turn)
    print("turn", turn, flush=True)
print("units", *sorted(u.state for u in tq.list_units()))
print("done", flush=True)
"""
)


def test_a_controller_that_goes_on_from_its_journal(three: list[Host], tmp_path: Path) -> None:
    """Units on other hosts are found again with what they have in memory, and no update is lost or happens twice."""
    journal = {"durability": "relaxed", "path": str(tmp_path), "restart_wait_s": 60}
    (tmp_path / "conf.yaml").write_text(yaml.safe_dump({"controller": {"journal": journal}}))
    session = Served(three[0], three[1:], "--config", str(tmp_path / "conf.yaml"))
    try:
        clients = [
            host.start("-c", f"HERE = {host.namespace!r}\n" + COUNTING, **session.environment)
            for host in (three[0], three[1])
        ]
        lines = [_lines(client) for client in clients]
        for turn in ("5", "15"):
            for of in lines:
                next(line for line in of if line == ["turn", turn])
            os.kill(session.controller.pid, signal.SIGKILL)
            session.controller.wait()
            session.restart_controller()
        for of, client in zip(lines, clients, strict=True):
            seen = list(of)
            assert client.wait(60) == 0, seen
            assert seen[-2:] == [["units", "ACTIVE", "ACTIVE"], ["done"]]
        assert [unit.poll() for unit in session.units] == [None, None]
    finally:
        session.end()
