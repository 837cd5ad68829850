"""Units with a local disk: large values, memory that runs short, and a unit that is taken out while readers go on.

Run `python tutorial/disk.py`; it needs nothing else.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import transfer_queue as tq

MIB = 1 << 20
KEYS = [f"small/{number}" for number in range(64)]


def on_disk() -> int:
    """MiB of values that lie on the disks of all units."""
    return sum(unit.disk_used_bytes for unit in tq.list_units()) // MIB


def large_values() -> None:
    """A value of `threshold_bytes` or more goes to disk at once; programs see no difference."""
    tq.kv_put("large", "train", {"image": torch.ones(4 * MIB, dtype=torch.uint8)}, tag={})
    tq.kv_update("large", "train", {"image": torch.ones(4 * MIB, dtype=torch.uint8)}, merge_fn="add")
    image = tq.kv_batch_get("large", "train")["image"]
    print("large     ", on_disk(), "MiB on disk, all twos:", bool((image == 2).all()))
    tq.kv_clear("large", "train")
    print("cleared   ", on_disk(), "MiB on disk")


def memory_runs_short() -> None:
    """16 MiB of values in units of 4 MiB each: what was used longest ago moves to disk, and nothing is dropped."""
    for number, key in enumerate(KEYS):
        tq.kv_put(key, "train", {"x": torch.full((MIB // 4,), number, dtype=torch.uint8)}, tag={})
    units = tq.list_units()
    print("spilled   ", all(unit.spilled_bytes > 0 for unit in units))
    print("in limits ", all(unit.memory_used_bytes <= unit.memory_limit_bytes for unit in units))
    print("intact    ", check())


def check() -> bool:
    """Whether all samples have their values, in memory or not."""
    rows = tq.kv_batch_get(KEYS, "train")["x"].unbind()
    return all(bool((row == number).all()) for number, row in enumerate(rows))


def take_a_unit_out() -> None:
    """Everything of one unit moves to the other, in memory and on disk; then its host could be stopped."""
    leaves = tq.list_units()[1].unit_id
    done = tq.drain(leaves).wait()
    (left,) = [unit for unit in tq.list_units() if unit.unit_id == leaves]
    print("drained   ", done.state, left.state, left.cells, "cells left")
    print("intact    ", check())
    tq.uncordon(leaves)  # it may take samples again
    print("back      ", [unit.state for unit in tq.list_units()])


def main() -> None:
    """Everything once."""
    with tempfile.TemporaryDirectory() as folder:
        disk = {"enabled": True, "path": folder, "threshold_bytes": MIB}
        storage = {"num_data_storage_units": 2, "memory_limit_bytes": 4 * MIB, "ssd_offload": disk}
        tq.init({"backend": {"SimpleStorage": storage}})
        large_values()
        memory_runs_short()
        take_a_unit_out()
        tq.close()
        print("left      ", len([path for path in Path(folder).rglob("*") if path.is_file()]), "files")


if __name__ == "__main__":
    main()
