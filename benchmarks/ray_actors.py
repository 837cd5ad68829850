"""Many actors of Ray putting and getting at once against one session; writes JSON and a table.

    python benchmarks/ray_actors.py [--actors 64] [--seconds 5] [--out ray.json]

Every actor puts 64 rows of 1 KiB under its own keys, gets them, compares a row, and clears them, in a loop. Figures
are rows put and got per second over all actors, for one actor and for many, in turns; the last column is many ÷ one. An
error of any actor ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="tqr"))
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # it counts the libraries that all actors share for each

import torch
from tensordict import TensorDict

import ray
import transfer_queue as tq

ROWS = 64
WIDTH = 256  # float32: 1 KiB


@ray.remote(num_cpus=0)
class Worker:
    """One client."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        self.keys = [f"{number}/{row}" for row in range(ROWS)]
        self.batch = TensorDict({"x": torch.full((ROWS, WIDTH), float(number))}, batch_size=[ROWS])

    def ready(self) -> int:
        """Join the session."""
        return len(tq.list_units())

    def run(self, seconds: float) -> int:
        """Put, get and clear for so long; returns the rows that went through."""
        rows, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            tq.kv_batch_put(self.keys, "bench", fields=self.batch)
            got = tq.kv_batch_get(self.keys, "bench")["x"]
            if not torch.equal(got.unbind()[-1], self.batch["x"][-1]):
                raise ValueError("wrong data")
            tq.kv_clear(self.keys, "bench")
            rows += ROWS
        return rows


def throughput(workers: list[Any], seconds: float) -> float:
    """Rows per second of all workers together."""
    began = time.monotonic()
    rows = sum(ray.get([worker.run.remote(seconds) for worker in workers]))
    return rows / (time.monotonic() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=64, help="each has about 450 MiB of its own, which is torch")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init()
    workers = [Worker.remote(number) for number in range(arguments.actors)]
    ray.get([worker.ready.remote() for worker in workers])
    throughput(workers, 1.0)  # what happens once in every process
    one, many = [], []
    for _ in range(arguments.rounds):
        one.append(throughput(workers[:1], arguments.seconds))
        many.append(throughput(workers, arguments.seconds))
    left = sum(unit.memory_used_bytes for unit in tq.list_units())
    tq.close()
    ray.shutdown()
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "load": os.getloadavg()[0],
        "actors": arguments.actors,
        "one_rows_per_s": statistics.median(one),
        "many_rows_per_s": statistics.median(many),
        "ratio": statistics.median(many) / statistics.median(one),
        "bytes_left": left,
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
