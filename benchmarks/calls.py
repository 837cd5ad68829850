"""Time of single calls that the side-by-side harness does not measure; writes JSON and a table.

    python benchmarks/calls.py [--out calls.json] [--samples 1000000]

* Python time of one ``kv_batch_put`` of 1024 rows x 8 dense fields and of one ``kv_batch_get`` of 1024 rows x 4 dense
  and 2 jagged columns. Rows are a few bytes, so copying is next to nothing; time spent inside the core and waiting for
  it is subtracted, and also shown with it.
* ``kv_put`` of one row into a partition that holds a million samples, against an empty one, in turns.

Figures are medians of rounds in microseconds; the spread is half the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQ_RUNTIME_DIR", tempfile.mkdtemp(prefix="tqb"))

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import _calls

ROWS = 1024
KEYS = [f"key-{i}" for i in range(ROWS)]


class InCore:
    """Sums the time that calls spend in the core: submitting, waiting, reaping."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> InCore:
        self._submit, self._wait = _calls.Queue.submit, _calls.Queue.wait
        _calls.Queue.submit = self._timed(self._submit)  # type: ignore[method-assign]
        _calls.Queue.wait = self._timed(self._wait)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        _calls.Queue.submit, _calls.Queue.wait = self._submit, self._wait  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def measure(call: Callable[[], Any], rounds: int = 7, repeats: int = 60) -> dict[str, list[float]]:
    """Microseconds per call, whole and in Python alone, one figure per round."""
    figures: dict[str, list[float]] = {"whole": [], "python": []}
    for _ in range(rounds):
        whole, python = [], []
        for _ in range(repeats):
            with InCore() as core:
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
            whole.append(took * 1e6)
            python.append((took - core.seconds) * 1e6)
        figures["whole"].append(statistics.median(whole))
        figures["python"].append(statistics.median(python))
    return figures


def batch_calls() -> dict[str, list[float]]:
    dense = TensorDict({f"f{i}": torch.zeros(ROWS, 2) for i in range(8)}, batch_size=[ROWS])
    ragged = torch.nested.nested_tensor([torch.arange(i % 7 + 1) for i in range(ROWS)], layout=torch.jagged)
    mixed = {f"d{i}": torch.zeros(ROWS, 2) for i in range(4)} | {"j0": ragged, "j1": ragged * 2}
    tq.kv_batch_put(KEYS, "read", fields=TensorDict(mixed, batch_size=[ROWS]))
    put = measure(lambda: tq.kv_batch_put(KEYS, "written", fields=dense))
    get = measure(lambda: tq.kv_batch_get(KEYS, "read"))
    return {
        "kv_batch_put 1024 x 8 dense, in Python": put["python"],
        "kv_batch_put 1024 x 8 dense, whole call": put["whole"],
        "kv_batch_get 1024 x (4 dense + 2 jagged), in Python": get["python"],
        "kv_batch_get 1024 x (4 dense + 2 jagged), whole call": get["whole"],
    }


def fill(partition: str, samples: int) -> None:
    step = 10_000
    for start in range(0, samples, step):
        keys = [f"full-{i}" for i in range(start, start + step)]
        tq.kv_batch_put(keys, partition, fields=TensorDict({"x": torch.zeros(step, 1)}, batch_size=[step]))


def beside_a_million(samples: int) -> dict[str, list[float]]:
    """One-row puts of new keys into an empty partition, and into one that holds a million samples, in turns."""
    row = {"x": torch.zeros(1)}
    figures: dict[str, list[float]] = {"empty": [], "full": []}
    fill("full", samples)
    for round_ in range(7):
        for partition, took_of in figures.items():
            keys = [f"{round_}-{i}" for i in range(300)]
            took = []
            for key in keys:
                begin = time.perf_counter()
                tq.kv_put(key, partition, fields=row)
                took.append((time.perf_counter() - begin) * 1e6)
            took_of.append(statistics.median(took))
            tq.kv_clear(keys, partition)
    return {"kv_put, empty partition": figures["empty"], f"kv_put beside {samples:,} samples": figures["full"]}


def machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if line.startswith("model name")), "?")
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transfer_queue": tq.__version__,
        "commit": commit.stdout.strip(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    options.add_argument("--samples", type=int, default=1_000_000)
    given = options.parse_args()
    torch.set_num_threads(1)
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    results = batch_calls() | beside_a_million(given.samples)
    tq.close()
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for name, rounds in results.items():
        print(f"{name:<55} {statistics.median(rounds):8.1f} us  ± {(max(rounds) - min(rounds)) / 2:.1f}")
    if given.out:
        given.out.write_text(json.dumps({"machine": about, "microseconds": results}, indent=1))


if __name__ == "__main__":
    main()
