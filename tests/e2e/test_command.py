"""``python -m transfer_queue``: a session as a daemon, and what it tells about itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from disks import offload
from processes import program, until
from transfer_queue import _session

MIB = 1 << 20


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with program("-m", "transfer_queue", "serve", "--units", "2", "--memory-limit-bytes", str(64 * MIB)) as process:
        first = _line(process)
        assert first.startswith("serving session"), first + process.communicate(timeout=20)[0]
        yield process


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transfer_queue", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def _memory(pid: int) -> int:
    """Bytes of a process: resident ones of its own, and those of its memory files, mapped or not."""
    with open(f"/proc/{pid}/status") as file:
        own = sum(int(text.split()[1]) << 10 for text in file if text.startswith(("RssAnon:", "RssFile:")))
    files = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith("/memfd:")]
    return own + sum(512 * path.stat().st_blocks for path in files)


def _imports_torch(pid: int) -> bool:
    return "torch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_daemon_serves_and_ends(daemon: subprocess.Popen[str], runtime_dir: Path) -> None:
    assert not _imports_torch(daemon.pid)
    memory = _memory(daemon.pid)
    print(f"a daemon that serves nothing has {memory / MIB:.1f} MiB")
    assert memory <= 80 * MIB
    import transfer_queue as tq

    tq.init()
    try:
        units = tq.list_units()
        assert [(unit.unit_id, unit.memory_limit_bytes) for unit in units] == [
            ("unit-0", 64 * MIB),
            ("unit-1", 64 * MIB),
        ]
        data = TensorDict({"x": torch.arange(4 * 1000).reshape(4, -1), "t": torch.arange(4)}, batch_size=[4])
        tq.kv_batch_put([*"abcd"], "part/1", data, tags=[{"n": n} for n in range(4)])
        tq.kv_update("a", "part/1", {"x": torch.arange(3)}, "concat")
        assert not _imports_torch(daemon.pid), "native merges need no Python"
        assert tq.get_client().get_meta(["x"], 2, "part/1", task_name="train", timeout=5).size == 2

        told = json.loads(_command("status", "--json").stdout)
        assert told["pid"] == daemon.pid
        assert told["clients"] >= 2
        (part,) = told["partitions"]
        assert (part["name"], part["samples"], part["keys"]) == ("part/1", 4, 4)
        assert sorted(part["fields"]) == ["t", "x"]
        assert part["consumed"] == {"train": 2}
        used = sum(unit["memory_used_bytes"] for unit in told["units"])
        assert used == 4 * 8000 + 4 * 8 + 24 == sum(unit.memory_used_bytes for unit in tq.list_units())
        text = _command("status").stdout
        for word in ("part/1", "unit-0", "unit-1", "4 samples", "train 2", str(daemon.pid)):
            assert word in text, text

        tq.kv_update("a", "part/1", {"t": torch.tensor(5)}, lambda old, new: old + new)
        assert tq.kv_batch_get("a", "part/1")["t"].tolist() == [5]
        assert _imports_torch(daemon.pid), "a callable needs it"
        os.kill(daemon.pid, signal.SIGTERM)
        output, _ = daemon.communicate(timeout=20)
        assert (daemon.returncode, output) == (0, "closed\n")
        with pytest.raises(ConnectionError):
            tq.kv_list()
    finally:
        tq.close()
    assert {path.suffix for path in runtime_dir.iterdir()} == {".lock"}


def test_commands_without_a_session_or_with_one_too_many(daemon: subprocess.Popen[str], tmp_path: Path) -> None:
    second = _command("serve")
    assert second.returncode == 1
    assert second.stderr.startswith("error: ")
    assert "default" in second.stderr
    other = _command("status", "--namespace", "other")
    assert other.returncode == 1
    assert "no session is running" in other.stderr
    assert "Traceback" not in second.stderr + other.stderr
    daemon.send_signal(signal.SIGINT)
    output, _ = daemon.communicate(timeout=20)
    assert (daemon.returncode, output) == (0, "closed\n"), "Ctrl-C ends it as well"


def test_status_tells_what_lies_on_disk(runtime_dir: Path, tmp_path: Path) -> None:
    import transfer_queue as tq

    tq.init(offload(tmp_path, 1000))
    try:
        tq.kv_put("a", "p", fields={"x": torch.zeros(5000)})
        text = _command("status").stdout
        assert "20,000 bytes on disk, 1 cells in 20,480 bytes of files" in text, text
        (unit,) = json.loads(_command("status", "--json").stdout)["units"]
        assert (unit["disk_cells"], unit["disk_logical_bytes"], unit["written_cells"]) == (1, 20_000, 1)
    finally:
        tq.close()


def test_a_daemon_reads_a_file(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "_place", {})  # a process remembers its namespace, also for the tests that follow
    path = tmp_path / "conf.yaml"
    path.write_text("namespace: special\nmark: 5\nbackend: {SimpleStorage: {num_data_storage_units: 3}}\n")
    with program("-m", "transfer_queue", "serve", "--config", str(path)) as process:
        assert _line(process).startswith("serving session")
        import transfer_queue as tq

        conf = tq.init({"namespace": "special", "runtime": "attach"})
        try:
            assert (conf.mark, len(tq.list_units())) == (5, 3)
            process.kill()
            until(lambda: _fails(tq), "the end of the daemon is seen", 2)
        finally:
            tq.close()


def _fails(tq: Any) -> bool:
    try:
        tq.kv_list()
    except ConnectionError:
        return True
    return False
