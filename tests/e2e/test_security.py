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
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

from processes import program

pytestmark = pytest.mark.skipif(os.environ.get("TQ_LIBZMQ") == "none", reason="built without libzmq")

# Attaches once after the other, as the lines of its input say, and tells what came of it.
ATTACH = """
import json, os, sys, transfer_queue as tq
for line in sys.stdin:
    conf, environment = json.loads(line)
    for name in ("TQ_TOKEN", "TQ_TOKEN_FILE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        tq.init({"client": {"timeout_s": 3}, **conf})
        print(json.dumps(["", str(tq.kv_list())]))
        tq.close()
    except Exception as error:
        kinds = [kind.__name__ for kind in (ValueError, ConnectionError) if isinstance(error, kind)]
        print(json.dumps([*kinds, str(error)]))
"""


@contextmanager
def _serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A daemon, its address, and its key when it has one."""
    with program("-m", "transfer_queue", "serve", "--units", "2", *arguments) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"at (tcp://[^\s,]+)(?:, key ([0-9a-f]{64}))?$", first.strip())
        assert found, first + process.communicate(timeout=20)[0]
        yield process, found[1], found[2] or ""


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    with _serving("--listen", "tcp://:0", "--security", "curve") as served:
        yield served


def _attach(attempts: list[tuple[dict[str, Any], dict[str, str]]], **environment: str) -> list[str]:
    """What each attempt, a configuration and variables of the environment, printed or was told."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACH],
        input="".join(json.dumps(attempt) + "\n" for attempt in attempts),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [": ".join(json.loads(line)) for line in done.stdout.splitlines()]


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
    said = _attach(attempts, TQ_ADDRESS=address, TQ_RUNTIME_DIR=str(tmp_path))
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


def test_configurations_that_cannot_be(runtime_dir: Path) -> None:
    import transfer_queue as tq

    with pytest.raises(ValueError, match=r"config: security: got 'tls'.*'token' or 'curve'"):
        tq.init({"security": "tls"})
    with pytest.raises(ValueError, match=r"config: remote.security: the key is security"):
        tq.init({"remote": {"listen": "tcp://:0", "security": "curve"}})
    assert list(runtime_dir.iterdir()) == []
