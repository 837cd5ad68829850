"""Values that no 32 bit number can count. Run with ``--large``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue
from disks import offload

GIB = 1 << 30
SIZE = 5 * GIB


@pytest.fixture
def tq(runtime_dir: Path, tmp_path: Path) -> Iterator[Any]:
    """A unit whose memory holds a fifth of the value. ``--basetemp`` says where its disk is."""
    transfer_queue.init(offload(tmp_path, memory_limit_bytes=GIB, put_wait_s=30))
    yield transfer_queue
    transfer_queue.close()


@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_value_of_5_gib_goes_through_the_disk(tq: Any) -> None:
    """It is staged, kept and read with the limit held, exact to the last byte, and its space comes back."""
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, SIZE - 1]
    value = torch.zeros(SIZE, dtype=torch.uint8)
    value[places] = torch.arange(1, 7, dtype=torch.uint8)
    tq.kv_put("k", "p", fields={"x": value, "n": torch.tensor(7)}, timeout=600)
    del value
    (unit,) = tq.list_units()
    assert (unit.disk_used_bytes, unit.disk_cells, unit.memory_used_bytes) == (SIZE, 1, 8)
    got = tq.kv_batch_get("k", "p", timeout=600)
    x = got["x"].values()
    assert x.numel() == SIZE
    assert x[places].tolist() == [1, 2, 3, 4, 5, 6]
    assert int(torch.count_nonzero(x)) == 6
    assert got["n"].tolist() == [7]
    del got, x
    tq.kv_clear("k", "p")
    (unit,) = tq.list_units()
    assert (unit.disk_used_bytes, unit.disk_physical_bytes, unit.memory_used_bytes) == (0, 0, 0)
