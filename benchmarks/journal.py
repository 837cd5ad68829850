"""What the controller's journal costs: puts and gets with durability none, relaxed and strict, in turns.

    python benchmarks/journal.py [--out journal.json] [--path FOLDER] [--rounds 7]

Each durability has a daemon and a client process of its own. Values are a few bytes and stay in memory, so the journal
is as large a part of a call as it can be. Figures are medians of rounds: microseconds of a call (its p50), and puts per
second of four threads of one client. The restart is the time from SIGKILL of the daemon, which is started again at
once, until it serves; most of it is the start of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DURABILITIES = ("none", "relaxed", "strict")
CALLS = 400


def _p50(call: Callable[[int], Any], n: int = CALLS) -> float:
    took = []
    for i in range(n):
        begin = time.perf_counter()
        call(i)
        took.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(took)


def _puts_per_second(tq: Any, row: Any, threads: int = 4, n: int = CALLS) -> float:
    def work(number: int) -> None:
        for i in range(n):
            tq.kv_put(f"t{number}/{i}", "threads", fields=row)

    all_of_them = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for thread in all_of_them:
        thread.start()
    for thread in all_of_them:
        thread.join()
    return threads * n / (time.perf_counter() - begin)


def client() -> None:
    """Answer each line of the standard input with the figures of a round."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    tq.init({"runtime": "attach"})
    row, keys = {"x": torch.zeros(4)}, [f"b{i}" for i in range(64)]
    batch = TensorDict({"x": torch.zeros(64, 4), "y": torch.zeros(64, 8)}, batch_size=[64])
    for _ in sys.stdin:
        figures = {
            "kv_put, new key, us": _p50(lambda i: tq.kv_put(f"k{i}", "single", fields=row)),
            "kv_put, overwrite, us": _p50(lambda i: tq.kv_put(f"k{i}", "single", fields=row)),
            "kv_batch_put 64 x 2, us": _p50(lambda i: tq.kv_batch_put(keys, "batch", fields=batch)),
            "kv_batch_get 64 x 2, us": _p50(lambda i: tq.kv_batch_get(keys, "batch")),
            "puts per second, 4 threads": _puts_per_second(tq, row),
        }
        for partition in ("single", "threads"):
            tq.kv_clear(list(tq.kv_list(partition)[partition]), partition)
        print(json.dumps(figures), flush=True)


class Side:
    """A daemon of one durability and its client."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.environment = {**os.environ, "TQ_RUNTIME_DIR": str(folder / durability)}
        self.config = folder / f"{durability}.yaml"
        journal = {"durability": durability, "path": str(folder / "journals" / durability)}
        self.config.write_text(json.dumps({"controller": {"journal": journal}}))  # JSON is YAML
        self.daemon = self.serve()
        self.client = self._start([__file__, "--client"], stdin=subprocess.PIPE)

    def _start(self, arguments: list[str], **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments], env=self.environment, stdout=subprocess.PIPE, text=True, **pipes
        )

    def serve(self) -> subprocess.Popen[str]:
        daemon = self._start(["-m", "transfer_queue", "serve", "--config", str(self.config)])
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("serving")
        return daemon

    def round(self) -> dict[str, float]:
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write("go\n")
        self.client.stdin.flush()
        figures: dict[str, float] = json.loads(self.client.stdout.readline())
        return figures

    def restart(self) -> float:
        """Seconds without an answer when the daemon is killed."""
        begin = time.perf_counter()
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = self.serve()
        return time.perf_counter() - begin

    def close(self) -> None:
        assert self.client.stdin is not None
        self.client.stdin.close()
        self.client.wait()
        self.daemon.terminate()
        self.daemon.wait()


def _machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"cpus": str(os.cpu_count()), "commit": commit.stdout.strip(), "load": f"{os.getloadavg()[0]:.1f}"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    options.add_argument("--path", type=Path, help="folder on the disk to measure (default: a temporary one)")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.client:
        client()
        return
    with tempfile.TemporaryDirectory(prefix="tqj", dir=arguments.path) as folder:
        sides = {durability: Side(Path(folder), durability) for durability in DURABILITIES}
        rounds: dict[str, list[dict[str, float]]] = {durability: [] for durability in DURABILITIES}
        for _ in range(arguments.rounds):
            for durability, side in sides.items():
                rounds[durability].append(side.round())
        restart = statistics.median(sides["relaxed"].restart() for _ in range(3))
        for side in sides.values():
            side.close()
    medians = {
        name: {durability: statistics.median(r[name] for r in rounds[durability]) for durability in DURABILITIES}
        for name in rounds["none"][0]
    }
    for name, figures in medians.items():
        ratios = ", ".join(f"{d} {figures[d] / figures['none']:.2f}" for d in DURABILITIES[1:])
        print(f"{name:<28}" + "".join(f"{figures[d]:>12,.0f}" for d in DURABILITIES) + f"   of none: {ratios}")
    print(f"restart of the daemon: {restart:.2f} s")
    if arguments.out:
        result = {"machine": _machine(), "medians": medians, "rounds": rounds, "restart_s": restart}
        arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
