"""The disk tier: put throughput beside a spill, and puts and gets of values on disk against the peer; writes JSON.

    python benchmarks/disk.py [--seconds 3] [--rounds 3] [--folder /dev/shm] [--peer PYTHON] [--out disk.json]

* ``beside`` is how fast a client puts and clears values that stay in memory while another process puts values that go
  to disk as fast as it can, as a share of the same without the other one.
* ``put`` and ``get`` move values that lie on disk; rates are GB/s of payload, medians of rounds. With ``--peer``, an
  interpreter that has the peer package and Ray, both are measured there in the same run and the ratio is given.

Spilling and reading back against plain files, and 100,000 small values: ``go test -bench . ./core/store/disktier``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


def conf(folder: str, threshold: int) -> dict[str, Any]:
    """One unit that puts values of ``threshold`` bytes and more on disk."""
    offload = {"enabled": True, "path": folder, "threshold_bytes": threshold}
    return {"backend": {"SimpleStorage": {"num_data_storage_units": 1, "ssd_offload": offload}}}


def spill(seconds: float) -> None:
    """Put values that go to disk, in this process, until the time is over; prints bytes per second."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    tq.init()
    rows = TensorDict({"x": torch.zeros(4, 8 * MIB, dtype=torch.uint8)}, batch_size=[4])
    keys = [f"s{i}" for i in range(4)]
    print("ready", flush=True)
    sys.stdin.readline()
    moved, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        tq.kv_batch_put(keys, "spilled", fields=rows)
        moved += 32 * MIB
    print(moved / seconds, flush=True)
    tq.close()


def memory_puts(seconds: float) -> float:
    """Bytes per second of puts and clears of values that stay in memory."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    rows = TensorDict({"x": torch.zeros(128, 64 << 10, dtype=torch.uint8)}, batch_size=[128])
    keys = [f"m{i}" for i in range(128)]
    moved, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        tq.kv_batch_put(keys, "memory", fields=rows)
        tq.kv_clear(keys, "memory")
        moved += 8 * MIB
    return moved / seconds


def beside(folder: str, seconds: float) -> dict[str, float]:
    import transfer_queue as tq

    tq.init(conf(folder, MIB))
    try:
        memory_puts(seconds / 3)
        alone = memory_puts(seconds)
        command = [sys.executable, __file__, "--spill", str(2 * seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            other.stdin.write("go\n")
            other.stdin.flush()
            time.sleep(seconds / 3)
            together = memory_puts(seconds)
            spilled = float(other.stdout.readline())
        return {"alone": alone / 1e9, "beside": together / 1e9, "spilled": spilled / 1e9, "share": together / alone}
    finally:
        tq.close()


def on_disk(folder: str) -> dict[str, float]:
    """Put and get 32 values of 8 MiB, with whichever package this interpreter has."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    tq.init(conf(folder, MIB))
    try:
        rows = TensorDict({"x": torch.randint(0, 255, (32, 8 * MIB), dtype=torch.uint8)}, batch_size=[32])
        keys = [f"k{i}" for i in range(32)]
        size = 32 * 8 * MIB / 1e9
        best = {"put": 0.0, "get": 0.0}
        for _ in range(3):
            begin = time.perf_counter()
            tq.kv_batch_put(keys, "p", fields=rows)
            best["put"] = max(best["put"], size / (time.perf_counter() - begin))
            begin = time.perf_counter()
            got = tq.kv_batch_get(keys, "p")
            best["get"] = max(best["get"], size / (time.perf_counter() - begin))
            assert got["x"].unbind()[31][-1] == rows["x"][31][-1]
            tq.kv_clear(keys, "p")
        return best
    finally:
        tq.close()


def measured(python: str, folder: str) -> dict[str, float]:
    """`on_disk` in a process of its own."""
    run = subprocess.run([python, __file__, "--on-disk", folder], capture_output=True, text=True, check=True)
    line = next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{"))
    result: dict[str, float] = json.loads(line)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--spill", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--on-disk", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.spill:
        spill(arguments.spill)
        return
    if arguments.on_disk:
        print(json.dumps(on_disk(arguments.on_disk)))
        return
    os.environ.setdefault("TQ_RUNTIME_DIR", tempfile.mkdtemp(prefix="tqb"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the folder is memory, and goes then too
    folder = tempfile.mkdtemp(prefix="tqb", dir=arguments.folder)
    try:
        report = run(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def run(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    report: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count(), "folder": arguments.folder}
    rounds = [beside(folder, arguments.seconds) for _ in range(arguments.rounds)]
    report["beside a spill"] = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    pythons = {"ours": sys.executable, **({"peer": arguments.peer} if arguments.peer else {})}
    each: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for _ in range(arguments.rounds):  # in turns, so that both meet the same machine
        for name, python in pythons.items():
            each[name].append(measured(python, folder))
    for name, results in each.items():
        report[name] = {op: statistics.median(one[op] for one in results) for op in ("put", "get")}
    if arguments.peer:
        report["ratio"] = {op: report["ours"][op] / report["peer"][op] for op in ("put", "get")}
    return report


if __name__ == "__main__":
    main()
