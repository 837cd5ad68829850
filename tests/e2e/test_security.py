"""What protects sessions that are reached over TCP: loopback, the token, and encryption with ``security: curve``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import TensorDict

from attaching import attach
from processes import program

pytestmark = pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")


@contextmanager
def _serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A daemon, its address, and its key when it has one."""
    with program("-m", "transfer_queue", "serve", "--units", "2", *arguments) as process:
        yield process, *_address_and_key(process)


def _address_and_key(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    first = process.stdout.readline()
    found = re.search(r"at (tcp://[^\s,]+)(?:, key ([0-9a-f]{64}))?$", first.strip())
    assert found, first + process.communicate(timeout=20)[0]
    return found[1], found[2] or ""


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    with _serving("--listen", "tcp://:0", "--security", "curve") as served:
        yield served


@pytest.mark.parametrize("security", ["token", "curve"])
def test_nothing_listens_to_the_network_unless_told(runtime_dir: Path, security: str) -> None:
    with _serving("--listen", "tcp://:0", "--security", security) as (process, _, key):
        assert bool(key) == (security == "curve")
        listening = [c.laddr.ip for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert [ip.removeprefix("::ffff:") for ip in listening] == ["127.0.0.1"] * 2


def test_batches_cross_encrypted(
    daemon: tuple[subprocess.Popen[str], str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transfer_queue as tq

    monkeypatch.setenv("TQ_ADDRESS", daemon[1])
    tq.init({"security": "curve"})
    try:
        keys = [f"k{i}" for i in range(16)]
        large = torch.arange(16 * 300_000, dtype=torch.float32).reshape(16, 300_000)
        data = TensorDict({"large": large, "n": torch.arange(16), "text": [str(i) for i in range(16)]}, batch_size=[16])
        tq.kv_batch_put(keys, "p", data)
        got = tq.kv_batch_get(keys, "p")
        assert torch.equal(torch.stack(list(got["large"].unbind())), large)
        assert got["n"].tolist() == list(range(16))
        assert got["text"][3] == "3"
        tq.kv_update("k1", "p", {"large": torch.ones(300_000)}, "add")
        assert torch.equal(tq.kv_batch_get("k1", "p", select_fields=["large"])["large"].unbind()[0], large[1] + 1)
        tq.kv_clear(keys, "p")
        assert tq.kv_list() == {"p": {}}
    finally:
        tq.close()


def test_token_and_key_files(daemon: tuple[subprocess.Popen[str], str, str], runtime_dir: Path, tmp_path: Path) -> None:
    _, address, key = daemon
    file, secret = runtime_dir / "default.token", runtime_dir / "default.key"
    assert [path.stat().st_mode & 0o777 for path in (file, secret)] == [0o600, 0o600]
    token, public = file.read_text().split()
    assert public == key
    assert secret.read_text().strip() not in file.read_text()
    copied = tmp_path / "copied"
    copied.write_text(file.read_text())
    copied.chmod(0o600)
    right = [{"TQ_TOKEN": f"{token} {key}"}, {"TQ_TOKEN_FILE": str(copied)}]
    wrong = {
        token: f"ValueError: the session at {address} uses CURVE",
        f"{token} {'0f' * 32}": f"ConnectionError: the server at {address} has another key",
        f"not-the-token-of-this-session {key}": f"ValueError: the token is not that of the session at {address}",
        f"{token} {key[1:]}": "ValueError: behind the token",
    }
    attempts = [(conf, given) for given in right for conf in ({}, {"security": "curve"})]
    attempts += [({}, {"TQ_TOKEN": given}) for given in wrong]
    attempts.append(({"security": "curve"}, {"TQ_TOKEN": token}))
    said = attach(attempts, TQ_ADDRESS=address, TQ_RUNTIME_DIR=str(tmp_path))
    assert said[:4] == [": {}"] * 4
    for got, want in zip(said[4:8], wrong.values(), strict=True):
        assert got.startswith(want)
    assert said[8].startswith("ValueError: security: curve, but behind the token for " + address)
    assert token not in "".join(said)


def test_a_restarted_daemon_has_the_same_key(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transfer_queue as tq

    with _serving("--listen", "tcp://127.0.0.1:0", "--security", "curve") as (process, address, key):
        monkeypatch.setenv("TQ_ADDRESS", address)
        tq.init()
        try:
            process.kill()
            process.wait()
            with _serving("--listen", address, "--security", "curve") as (_, _, again):
                assert again == key
                tq.kv_put("a", "p", {"x": torch.ones(3)})
                assert tq.kv_batch_get("a", "p")["x"].unbind()[0].tolist() == [1, 1, 1]
        finally:
            tq.close()
        done = subprocess.run(
            [sys.executable, "-m", "transfer_queue", "serve", "--listen", "tcp://:0"],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode == 1
    assert "default.token, so its clients want security: curve" in done.stderr, "no silent step back"


def test_a_session_that_goes_on_from_its_journal_is_encrypted_as_before(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients and units, which only have the key of the controller that was killed, find the next one."""
    import transfer_queue as tq

    conf = tmp_path / "conf.json"
    journal = {"durability": "relaxed", "path": str(tmp_path), "restart_wait_s": 60}
    conf.write_text(json.dumps({"security": "curve", "controller": {"journal": journal}}))
    owner = ("-m", "transfer_queue", "serve", "--units", "0", "--config", str(conf), "--listen")
    with program(*owner, "tcp://127.0.0.1:0") as first:
        address, key = _address_and_key(first)
        with program("-m", "transfer_queue", "serve", "--join", address, "--units", "1") as unit:
            assert unit.stdout is not None
            assert any(line.startswith("serving 1 units") for line in unit.stdout)
            monkeypatch.setenv("TQ_ADDRESS", address)
            tq.init({"security": "curve"})
            try:
                tq.kv_put("a", "p", {"x": torch.ones(50_000)}, tag={"n": 1})
                first.kill()
                first.wait()
                with program(*owner, address) as second:
                    tq.kv_update("a", "p", {"x": torch.ones(50_000)}, "add")
                    assert _address_and_key(second) == (address, key)
                    assert tq.kv_batch_get("a", "p")["x"].unbind()[0].sum() == 100_000
                    assert tq.kv_list("p") == {"p": {"a": {"n": 1}}}
                    assert unit.poll() is None
            finally:
                tq.close()


def test_configurations_that_cannot_be(runtime_dir: Path) -> None:
    import transfer_queue as tq

    with pytest.raises(ValueError, match=r"config: security: got 'tls'.*'token' or 'curve'"):
        tq.init({"security": "tls"})
    with pytest.raises(ValueError, match=r"config: remote.security: the key is security"):
        tq.init({"remote": {"listen": "tcp://:0", "security": "curve"}})
    assert list(runtime_dir.iterdir()) == []
