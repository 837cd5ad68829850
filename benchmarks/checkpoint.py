"""Save and load of a checkpoint in tmpfs, against ``cat`` of the same bytes; writes JSON and a table.

    python benchmarks/checkpoint.py [--gib 4] [--rounds 3] [--folder /dev/shm] [--units 2] [--out checkpoint.json]

* ``cat`` copies the files of the checkpoint to another file in the same folder, ``cp``'s way of read and write.
* ``save`` and ``load`` are the whole calls. A load follows a clear, so that the units hold the values once.
* ``resident`` is by how much the process grew at the most during a save.
* ``incompressible`` values are random bits, ``compressible`` ones small integers in int64.

Peak memory is about three times the size of the checkpoint. Rates are medians of rounds in GB/s of payload.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQ_RUNTIME_DIR", tempfile.mkdtemp(prefix="tqb"))

import torch
from tensordict import TensorDict

import transfer_queue as tq

ROW_BYTES = 64 << 10
BATCH = 1024


def fill(size: int, compressible: bool) -> int:
    """Put so many bytes; returns how many there are."""
    put = 0
    while put < size:
        width = ROW_BYTES // 8
        bits = torch.randint(0, 100 if compressible else 2**62, (BATCH, width))
        keys = [f"{put}-{i}" for i in range(BATCH)]
        tq.kv_batch_put(keys, "train", fields=TensorDict({"x": bits}, batch_size=[BATCH]))
        put += BATCH * ROW_BYTES
    return put


def resident() -> int:
    """Bytes of this process that are its own: neither files nor shared memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


class Growth:
    """The most that the process grows meanwhile."""

    def __enter__(self) -> Growth:
        self.before, self.most, self._stop = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, resident() - self.before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def took(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def cat(files: list[Path], copy: Path) -> None:
    with copy.open("wb") as out:
        subprocess.run(["cat", *files], stdout=out, check=True)


def measure(folder: Path, size: int, rounds: int, compressible: bool) -> dict[str, Any]:
    payload = fill(size, compressible)
    place, copy = folder / "checkpoint", folder / "copy"
    figures: dict[str, list[float]] = {"cat": [], "save": [], "load": []}
    grown = 0
    for _ in range(rounds):
        with Growth() as growth:
            figures["save"].append(payload / took(lambda: tq.save_checkpoint(place)) / 1e9)
        grown = max(grown, growth.most)
        files = [path for path in sorted(place.rglob("*")) if path.is_file()]
        stored = sum(path.stat().st_size for path in files)
        tq.get_client().clear_partition("train")
        figures["cat"].append(stored / took(functools.partial(cat, files, copy)) / 1e9)
        copy.unlink()
        figures["load"].append(payload / took(lambda: tq.load_checkpoint(place)) / 1e9)
        shutil.rmtree(place)
    tq.get_client().clear_partition("train")
    return {"gb_per_s": figures, "payload_bytes": payload, "stored_bytes": stored, "resident_growth_bytes": grown}


def machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if line.startswith("model name")), "?")
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "transfer_queue": tq.__version__,
        "commit": commit.stdout.strip(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=4)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options.add_argument("--units", type=int, default=2)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the folder is memory, and goes then too
    folder = Path(tempfile.mkdtemp(prefix="tqb", dir=given.folder))
    results = {}
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": given.units}}})
    try:
        for name in ("incompressible", "compressible"):
            result = measure(folder, int(given.gib * 2**30), given.rounds, name == "compressible")
            results[name] = result
            rates = {what: statistics.median(values) for what, values in result["gb_per_s"].items()}
            print(f"{name}: {result['payload_bytes'] / 1e9:.2f} GB, {result['stored_bytes'] / 1e9:.2f} GB stored")
            for what, rate in rates.items():
                rounds = result["gb_per_s"][what]
                spread = (max(rounds) - min(rounds)) / 2
                print(f"  {what:<6} {rate:6.2f} GB/s  ± {spread:.2f}  {rate / rates['cat']:5.2f} of cat")
            print(f"  the process grew by {result['resident_growth_bytes'] / 2**20:.0f} MiB during a save")
    finally:
        tq.close()
        shutil.rmtree(folder)
    if given.out:
        given.out.write_text(json.dumps({"machine": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
