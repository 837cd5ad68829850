"""Time of operations on a `BatchMeta` of 100,000 samples, against the peer package in the same run; JSON and a table.

    python benchmarks/batch_meta.py [--peer PYTHON] [--samples 100000] [--out batch_meta.json]

The batch has eight fields, one of them ragged, and a tag per sample. It is made by the public constructor, so both
packages get the same. ``--peer`` is a Python that has the peer package installed; each package is measured by a process
of its own, in turns. Figures are milliseconds of the thread's processor time, so that other work on the machine does
not count; the median of all rounds and half the range.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_MS = 20.0
TARGETS = ("chunk(8)", "concat of 8", "union", "select_samples, half", "select_fields", "reorder")
TURNS, ROUNDS = 3, 5


def operations(samples: int) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What is prepared and what is measured, on batches of the package that this process imports."""
    import torch

    from transfer_queue.metadata import BatchMeta

    draw = random.Random(1)

    def batch(*names: str, ragged: str | None = None) -> Any:
        schema: dict[str, Any] = {
            name: {"dtype": torch.float32, "shape": torch.Size((4,)), "is_nested": False, "is_non_tensor": False}
            for name in names
        }
        if ragged:
            shapes = [torch.Size((draw.randrange(1, 2048),)) for _ in range(samples)]
            schema[ragged] = {"dtype": torch.int64, "shape": shapes[0], "is_nested": True, "is_non_tensor": False}
            schema[ragged]["per_sample_shapes"] = shapes
        tags = [{"step": row % 7, "reward": row / samples} for row in range(samples)]
        return BatchMeta(list(range(samples)), ["train"] * samples, schema, [1] * samples, {"run": 1}, tags)

    whole = batch(*(f"f{i}" for i in range(7)), ragged="ids")
    other = batch("g0", "g1")
    parts = whole.chunk(8)
    half = draw.sample(range(samples), samples // 2)
    order = draw.sample(range(samples), samples)
    packed = pickle.dumps(whole)
    runs: dict[str, Callable[[Any], Any]] = {
        "chunk(8)": lambda meta: meta.chunk(8),
        "concat of 8": lambda _: BatchMeta.concat(parts),
        "union": lambda meta: meta.union(other),
        "select_samples, half": lambda meta: meta.select_samples(half),
        "select_fields": lambda meta: meta.select_fields(["f1", "f2", "f3", "ids"]),
        "reorder": lambda meta: meta.reorder(order),
        "slice": lambda meta: meta[100:-100],
        "pickle": pickle.dumps,
        "unpickle": lambda _: pickle.loads(packed),
    }
    # What is reordered once lies scattered in memory, so each round gets a batch of its own.
    fresh = {"reorder": lambda: whole[:]}
    return {name: (fresh.get(name, lambda: whole), run) for name, run in runs.items()}


def measure(samples: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for name, (prepare, run) in operations(samples).items():
        run(prepare())
        took = []
        for _ in range(ROUNDS):
            meta = prepare()
            begin = time.thread_time()
            run(meta)
            took.append((time.thread_time() - begin) * 1e3)
        figures[name] = took
    return figures


def in_process(python: str, samples: int) -> dict[str, list[float]]:
    """Figures of the package that a Python has, out of a process of its own."""
    command = [python, str(Path(__file__).resolve()), "--measure", "--samples", str(samples)]
    # Not in this folder: the package beside the script must not be found before the installed one.
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    figures: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--peer", help="Python with the peer package")
    options.add_argument("--samples", type=int, default=100_000)
    options.add_argument("--out", type=Path)
    options.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        print(json.dumps(measure(given.samples)))
        return 0
    pythons = {"ours": sys.executable} | ({"peer": given.peer} if given.peer else {})
    results: dict[str, dict[str, list[float]]] = {name: {} for name in pythons}
    for _ in range(TURNS):
        for name, python in pythons.items():
            for operation, took in in_process(python, given.samples).items():
                results[name].setdefault(operation, []).extend(took)
    return report(results, given.samples, given.out)


def report(results: dict[str, dict[str, list[float]]], samples: int, out: Path | None) -> int:
    """Print a table; 1 when an operation with a target misses it."""
    missed = 0
    print(f"{samples:,} samples, 7 fields and a ragged one, tags; Python {platform.python_version()}")
    print(f"{'':<22}" + "".join(f"{name + ' ms':>20}" for name in results) + f"{'peer / ours':>14}")
    for operation in results["ours"]:
        line, medians = f"{operation:<22}", []
        for took in (figures[operation] for figures in results.values()):
            medians.append(statistics.median(took))
            line += f"{medians[-1]:>12.2f} ± {(max(took) - min(took)) / 2:5.2f}"
        line += f"{medians[1] / medians[0]:>14.1f}" if len(medians) > 1 else ""
        if operation in TARGETS and medians[0] > LIMIT_MS:
            line, missed = f"{line}  beyond {LIMIT_MS:g} ms", missed + 1
        print(line)
    if out:
        out.write_text(json.dumps({"samples": samples, "load": os.getloadavg()[0], "milliseconds": results}, indent=1))
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
