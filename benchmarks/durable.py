"""Durable units: how long one takes to be there again after kill -9, and what durability costs a put; writes JSON.

    python benchmarks/durable.py [--values 100000] [--path FOLDER] [--out durable.json]

A unit in a process of its own stores values of 4 KiB on disk, in batches of 1000, and every second again by itself,
which leaves as many runs in its index as there are values. Then it is killed. *open* is the time in which a new process
has read its files, *join* that in which the controller has compared what both know, after which all can be read.
Puts are batches of 64 values of 64 KiB that go to disk, of one client, for each durability; all on the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import _calls, _session
from transfer_queue._controller_requests import join_units

SIZE = 4096
BATCH = 1000
ALONE = 2  # every second value

_HOST = """
import pickle, sys, time
from transfer_queue import _lib
from transfer_queue._unit import UnitHost
_lib.library()
began = time.monotonic()
host = UnitHost(sys.argv[1], storage={"ssd_offload": {
    "enabled": True, "path": sys.argv[2], "threshold_bytes": 1024, "durability": sys.argv[3]}})
took = time.monotonic() - began
sys.stdout.buffer.write(pickle.dumps((host.address, took)).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
host.close()
"""


def start(name: str, path: Path, durability: str) -> tuple[subprocess.Popen[bytes], float, float]:
    """A unit process that has joined, the seconds to open its files, and those to join."""
    import pickle

    process = subprocess.Popen(
        [sys.executable, "-c", _HOST, name, str(path), durability], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    address, opened = pickle.loads(bytes.fromhex(process.stdout.readline().decode()))
    session = _session.current()
    began = time.monotonic()
    _calls.run(session.handle, join_units([address], session.timeout_s))
    return process, opened, time.monotonic() - began


def again(values: int, path: Path, rounds: int) -> dict[str, Any]:
    """Kill a unit with so many values and start it again."""
    process, _, _ = start("unit-again", path, "relaxed")
    for first in range(0, values, BATCH):
        column = torch.arange(first, first + BATCH).unsqueeze(1).expand(BATCH, SIZE // 8).contiguous()
        tq.kv_batch_put([f"k{i}" for i in range(first, first + BATCH)], "again", TensorDict({"x": column}, [BATCH]))
    for i in range(0, values, ALONE):
        column = torch.arange(i, i + 1).unsqueeze(1).expand(1, SIZE // 8).contiguous()
        tq.kv_batch_put([f"k{i}"], "again", TensorDict({"x": column}, [1]))
    opened, joined = [], []
    for _ in range(rounds):
        process.send_signal(signal.SIGKILL)
        process.wait()
        process, open_s, join_s = start("unit-again", path, "relaxed")
        opened.append(open_s)
        joined.append(join_s)
    assert tq.list_lost() == {}
    keys = [f"k{i}" for i in range(0, values, values // 100)]
    rows = tq.kv_batch_get(keys, "again")["x"].unbind()
    assert [int(row[-1]) for row in rows] == list(range(0, values, values // 100))
    tq.get_client().clear_partition("again")
    process.kill()
    return {
        "values": values,
        "open_s": statistics.median(opened),
        "join_s": statistics.median(joined),
        "open_and_join_s": statistics.median(a + b for a, b in zip(opened, joined, strict=True)),
    }


def puts(path: Path, durability: str, seconds: float) -> float:
    """Values per second of one client."""
    process, _, _ = start(f"unit-{durability}", path, durability)
    batch = TensorDict({"x": torch.rand(64, 16384)}, batch_size=[64])
    keys = [f"{durability}/{i}" for i in range(64)]
    done, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        tq.kv_batch_put(keys, durability, batch)
        done += len(keys)
    took = time.monotonic() - began
    tq.get_client().clear_partition(durability)
    process.kill()
    process.wait()
    return done / took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, help="folder on the disk to measure; by default a temporary one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    # The units of this benchmark run in processes of their own.
    options = _session._options
    _session._options = lambda *args: {**options(*args), "units": -1}  # type: ignore[assignment]
    os.environ.setdefault("TQ_RUNTIME_DIR", tempfile.mkdtemp(prefix="tqb"))
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
        tq.init()
        result: dict[str, Any] = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
            "load": os.getloadavg()[0],
            "version": tq.__version__,
            "after_kill": again(arguments.values, Path(folder), arguments.rounds),
        }
        rates: dict[str, list[float]] = {"none": [], "relaxed": [], "strict": []}
        for number in range(arguments.rounds):
            for durability, figures in rates.items():
                figures.append(puts(Path(folder) / f"{durability}{number}", durability, arguments.seconds))
        result["puts_per_s"] = {name: statistics.median(figures) for name, figures in rates.items()}
        tq.close()
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
