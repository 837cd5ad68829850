"""The main job in short: real processes, a reward that rises, memory that returns, and an orderly end in any case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tutorial" / "grpo_demo.py"
PNG = b"\x89PNG\r\n\x1a\n"
# On a busy machine six processes that import torch take their time.
SECONDS = 150

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Demos that a test has started, each the leader of a process group; what is left of them is killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        for left in members(process.pid):
            left.kill()
        process.wait()


def launch(demo: list[subprocess.Popen[bytes]], folder: Path, *options: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--plot", str(folder / "run.png"), *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Whoever runs the tests in the background has Ctrl-C ignored, and the demo would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    demo.append(process)
    return process


def members(group: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            pass
    return found


def left_over(group: int) -> list[psutil.Process]:
    """Processes that do not end by themselves; that of multiprocessing which tracks resources is the last to go."""
    left: list[psutil.Process] = psutil.wait_procs(members(group), timeout=10)[1]
    return left


def until_training(process: subprocess.Popen[bytes]) -> bytes:
    """Reads the live line until it shows a reward."""
    assert process.stderr is not None
    seen = b""
    while b"samples/s" not in seen:
        chunk = os.read(process.stderr.fileno(), 4096)
        assert chunk, f"ended early: {seen.decode()}"
        seen += chunk
    return seen


def test_reward_rises_and_memory_returns(demo, tmp_path):
    process = launch(demo, tmp_path, "--seconds=8")
    out, err = (stream.decode() for stream in process.communicate(timeout=SECONDS))
    assert process.returncode == 0, err
    assert left_over(process.pid) == []
    start, end = map(float, re.search(r"mean reward +([\d.]+) at the start, ([\d.]+) at the end", out).groups())
    assert end > start, out
    peak, left = map(float, re.search(r"unit memory +([\d.]+) MiB at the peak, ([\d.]+) MiB at the end", out).groups())
    assert left < 1 < peak, out
    assert re.search(r"policy lag +[\d.]+ versions on average, [0-2]\.\d+ at most", out), out
    assert re.search(r"reward [\d.]+ at level 9 \| [\d,]+ samples/s \| lag [\d.]+ \| units [\d.]+ MiB", err), err
    assert "Traceback" not in err
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_ctrl_c_ends_all_processes(demo, tmp_path):
    process = launch(demo, tmp_path, "--rollouts=1")
    until_training(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = (stream.decode() for stream in process.communicate(timeout=SECONDS))
    assert process.returncode == 130, err
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert "mean reward" in out
    assert left_over(process.pid) == []


def test_death_of_a_process_is_named_and_ends_the_others(demo, tmp_path):
    process = launch(demo, tmp_path, "--rollouts=1")
    until_training(process)
    children = [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]
    assert len(children) == 4
    children[-1].kill()
    _, err = (stream.decode() for stream in process.communicate(timeout=SECONDS))
    assert process.returncode == 1, err
    assert re.search(r"error: process [a-z]+(-\d)? ended early, by signal 9", err), err
    assert "Traceback" not in err
    assert left_over(process.pid) == []
