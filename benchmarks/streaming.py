"""An epoch of a partition through the streaming loader: samples per second, by number of workers and micro-batch size.

    .out/venv/bin/python benchmarks/streaming.py --out streaming.json

Samples are ``x: int64[32]`` (256 bytes), fetched in batches of 1000. One session is embedded in this process; the
workers of the loader are forked. An epoch begins with the iterator, so the start of the workers is part of it, and ends
with the end of the stream. The consumer sums up every micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES, WIDTH, BATCH = 100_000, 32, 1000
CASES = [(0, 100), (1, 100), (2, 100), (2, 1000), (2, 10)]


def epoch(config: Any, partition: str, workers: int, micro: int) -> float:
    """Seconds of one epoch."""
    import transfer_queue as tq

    dataset = tq.StreamingDataset(config, BATCH, micro, ["x"], partition, f"{workers}-{micro}-{time.time()}", 0, True)
    loader = tq.StreamingDataLoader(dataset, num_workers=workers)
    total = rows = 0
    began = time.perf_counter()
    for data, meta in loader:
        total += int(data["x"].values().sum())
        rows += meta.size
    took = time.perf_counter() - began
    if (rows, total) != (SAMPLES, SAMPLES * WIDTH * (SAMPLES * WIDTH - 1) // 2):
        raise RuntimeError(f"{rows} rows with sum {total} came out")
    return took


def measure(rounds: int) -> dict[str, Any]:
    """Median and best of each case in samples per second."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    torch.set_num_threads(1)
    config = tq.init({"controller": {"sampler": "RankAwareSampler", "polling_mode": True}})
    rows = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)
    tq.get_client().put(TensorDict({"x": rows}, batch_size=[SAMPLES]), partition_id="p")
    results = {}
    for workers, micro in CASES:
        took = [epoch(config, "p", workers, micro) for _ in range(rounds)]
        results[f"{workers} workers, micro-batches of {micro}"] = {
            "median_samples_s": round(SAMPLES / statistics.median(took)),
            "best_samples_s": round(SAMPLES / min(took)),
            "epochs_s": [round(one, 3) for one in took],
        }
    tq.close()
    return results


def described() -> dict[str, Any]:
    """Machine, commit and versions."""
    import torch

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False
        ).stdout.strip()

    return {
        "cpu": platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD"),
        "changed": bool(git("status", "--porcelain")),
    }


def main() -> None:
    """Measures and prints; with ``--out`` also writes JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="tq-")
    os.environ["TQ_RUNTIME_DIR"] = folder
    try:
        report = {"machine": described(), "results": measure(options.rounds)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, result in report["results"].items():
        print(f"{name:38} {result['median_samples_s']:>10,} samples/s, best {result['best_samples_s']:,}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
