"""Sessions that are reached over TCP, as from another host: ``serve --listen`` and ``TQ_ADDRESS``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from attaching import attach
from processes import Child, Nursery, program, until

pytestmark = pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")


@contextmanager
def _serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with program("-m", "transfer_queue", "serve", "--units", "2", *arguments) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        address = re.search(r"at (tcp://\S+)", first)
        assert address, first + process.communicate(timeout=20)[0]
        yield process, address[1]


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with _serving("--listen", "tcp://:0") as served:
        yield served


def test_a_daemon_says_where_its_token_is(
    daemon: tuple[subprocess.Popen[str], str], runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert daemon[0].stdout is not None
    assert daemon[0].stdout.readline() == f"token in {runtime_dir / 'default.token'}\n"
    monkeypatch.setenv("TQ_TOKEN", "x" * 20)
    with _serving("--listen", "tcp://:0", "--namespace", "other") as (process, _):
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.read() == "closed\n"


def test_the_ports_of_units_that_join_are_in_their_configuration(
    daemon: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    with socket.socket() as free, socket.socket() as other:
        for probe in (free, other):
            probe.bind(("127.0.0.1", 0))
        requests, payload = free.getsockname()[1], other.getsockname()[1]
    conf = tmp_path / "conf.yaml"
    conf.write_text(f"remote: {{listen: 'tcp://127.0.0.1:{requests}', payload_port: {payload}}}\n")
    with program("-m", "transfer_queue", "serve", "--join", daemon[1], "--config", str(conf)) as unit:
        assert unit.stdout is not None
        assert unit.stdout.readline().endswith(f"at tcp://127.0.0.1:{requests}\n")
        for port in (requests, payload):
            socket.create_connection(("127.0.0.1", port), 5).close()


@pytest.fixture
def tq(daemon: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import transfer_queue

    monkeypatch.setenv("TQ_ADDRESS", daemon[1])
    transfer_queue.init()
    yield transfer_queue
    transfer_queue.close()


def _rows(n: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "dense": torch.arange(n * width, dtype=torch.float32).reshape(n, width),
        "scalar": torch.arange(n),
        "ragged": torch.nested.nested_tensor([torch.arange(i % 5 + 1) for i in range(n)], layout=torch.jagged),
    }


def _same(got: Any, sent: dict[str, torch.Tensor], n: int) -> bool:
    return (
        torch.equal(torch.stack(list(got["dense"].unbind())), sent["dense"])
        and torch.equal(got["scalar"], sent["scalar"])
        and all(torch.equal(got["ragged"].unbind()[i], sent["ragged"].unbind()[i]) for i in range(n))
    )


@pytest.mark.parametrize("width", [2, 4000, 1 << 20])
@pytest.mark.parametrize("copy", [True, False])
def test_batches_cross_as_they_are(tq: Any, width: int, copy: bool) -> None:
    keys = [f"k{i}" for i in range(16)]
    sent = _rows(16, width)
    data = TensorDict({**sent, "text": [f"row {i}" for i in range(16)]}, batch_size=[16])
    tq.kv_batch_put(keys, "part", data, tags=[{"n": i} for i in range(16)])
    got = tq.kv_batch_get(keys, "part", copy=copy)
    assert _same(got, sent, 16)
    assert got["text"][3] == "row 3"
    got["dense"].unbind()[0].fill_(7)  # independent memory
    assert _same(tq.kv_batch_get(keys, "part", copy=copy), sent, 16)
    back = tq.kv_batch_get(keys[::-3], "part", select_fields=["dense"], copy=copy)["dense"].unbind()
    assert all(torch.equal(row, sent["dense"][15 - 3 * i]) for i, row in enumerate(back))
    tq.kv_batch_update(keys, "part", TensorDict({"dense": sent["dense"]}, batch_size=[16]), "add")
    assert torch.equal(torch.stack(list(tq.kv_batch_get(keys, "part")["dense"].unbind())), 2 * sent["dense"])
    assert tq.kv_list("part")["part"]["k3"] == {"n": 3}
    tq.kv_clear(keys, "part")
    until(lambda: all(u.memory_used_bytes + u.leases + u.staged == 0 for u in tq.list_units()), "nothing is left")


def test_callables_run_where_the_cells_are(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(100_000)})
    tq.kv_update("a", "p", {"x": torch.full((100_000,), 3.0)}, lambda old, new: old - new)
    assert torch.equal(tq.kv_batch_get("a", "p")["x"].unbind()[0], torch.full((100_000,), -2.0))


def test_an_event_loop_goes_on_during_a_large_put(tq: Any) -> None:
    data = TensorDict({"x": torch.ones(32, 1 << 20)}, batch_size=[32])
    gaps: list[float] = []

    async def ticking(over: asyncio.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - began)

    async def main() -> None:
        over = asyncio.Event()
        ticker = asyncio.create_task(ticking(over))
        await tq.async_kv_batch_put([f"k{i}" for i in range(32)], "p", data)
        got = await tq.async_kv_batch_get([f"k{i}" for i in range(32)], "p")
        over.set()
        await ticker
        assert got["x"].unbind()[31].sum() == 1 << 20

    asyncio.run(main())
    assert gaps


def test_a_forked_child_connects_itself(tq: Any) -> None:
    small = 20_000  # more elements are summed by threads, which a fork does not copy
    tq.kv_put("a", "p", {"x": torch.ones(small)})
    pid = os.fork()
    if pid == 0:
        try:
            ok = tq.kv_batch_get("a", "p")["x"].unbind()[0].sum() == small
            tq.kv_put("b", "p", {"x": torch.zeros(small)})
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tq.kv_batch_get("b", "p")["x"].unbind()[0].sum() == 0


def _kept_busy(line: Any) -> None:
    import transfer_queue as tq

    tq.init()
    tq.kv_batch_put([f"k{i}" for i in range(8)], "p", TensorDict({"x": torch.ones(8, 100_000)}, batch_size=[8]))
    line.send("ready")
    while True:
        tq.kv_batch_get([f"k{i}" for i in range(8)], "p")


def test_a_client_that_is_killed_leaves_nothing(tq: Any, nursery: Nursery) -> None:
    child: Child = nursery.start(_kept_busy)
    assert child.recv() == "ready"
    child.signal(signal.SIGKILL)
    child.wait()
    tq.kv_clear([f"k{i}" for i in range(8)], "p")
    until(lambda: all(u.memory_used_bytes + u.leases + u.staged == 0 for u in tq.list_units()), "leases end", 30)


def test_ctrl_c_ends_a_waiting_call(tq: Any) -> None:
    timer = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tq.kv_wait("nothing", count=1, timeout=30)
    assert time.monotonic() - began < 5
    assert tq.kv_list() == {}


def test_the_end_of_the_daemon_is_seen_and_its_restart_found(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transfer_queue as tq

    with _serving("--listen", "tcp://127.0.0.1:0") as (process, address):
        monkeypatch.setenv("TQ_ADDRESS", address)
        tq.init()
        try:
            tq.kv_put("a", "p", {"x": torch.ones(3)})
            process.kill()
            process.wait()
            began = time.monotonic()
            with pytest.raises(ConnectionError, match=address):
                tq.kv_list()
            assert time.monotonic() - began < 5.5
            with _serving("--listen", address) as (_, again):
                assert again == address
                assert tq.kv_list() == {}
                tq.kv_put("a", "p", {"x": torch.zeros(3)})
                assert tq.kv_batch_get("a", "p")["x"].unbind()[0].tolist() == [0, 0, 0]
        finally:
            tq.close()


def test_tokens(daemon: tuple[subprocess.Popen[str], str], runtime_dir: Path, tmp_path: Path) -> None:
    _, address = daemon
    file = runtime_dir / "default.token"
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    copied = tmp_path / "copied"
    copied.write_text(token + "\n")
    copied.chmod(0o600)
    wrong = {
        "": f"RuntimeError: init: {address} asks for a token: set TQ_TOKEN",
        "not-the-token-of-this-session": f"ValueError: the token is not that of the session at {address}",
        "short": "ValueError: a token of 5 characters, want 16 to 255",
    }
    given = [{"TQ_TOKEN": token}, {"TQ_TOKEN_FILE": str(copied)}, *({"TQ_TOKEN": text} for text in wrong)]
    said = attach([({}, environment) for environment in given], TQ_ADDRESS=address, TQ_RUNTIME_DIR=str(tmp_path))
    assert said[:2] == [": {}"] * 2
    for got, want in zip(said[2:], wrong.values(), strict=True):
        assert got.startswith(want)
    assert token not in "".join(said)


def _serve_fails(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "transfer_queue", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_addresses_that_cannot_be(runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert f"{address}: the port is taken" in _serve_fails("--listen", address)
    assert '"127.0.0.1:5"' in _serve_fails("--listen", "127.0.0.1:5")
    assert "no-such-host.invalid" in _serve_fails("--listen", "tcp://no-such-host.invalid:0")
    assert not list(runtime_dir.glob("*.json"))
    os.chmod(runtime_dir / "default.token", 0o644)
    assert "can be read by others" in _serve_fails("--listen", "tcp://:0")
