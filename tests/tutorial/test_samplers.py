"""The tutorial of samplers prints what its comments promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tutorial" / "samplers.py"


def test_it_prints_what_each_sampler_hands_out(runtime_dir: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "groups: [9, 11, 1, 1] then []",
        "refused: get_meta: GRPOGroupNSampler: batch_size 3 must be a multiple of n_samples_per_prompt 2",
        "rank 1: [9, 11, 1, 1], 22 tokens",
        "rank 0: [6, 6, 7, 3], 22 tokens",
        "rank 1: [9, 11, 1, 1], 22 tokens",
        "longest first: [11, 9, 7] then [6, 6, 3]",
        "batch 0: [9]",
        "batch 1: [11, 1]",
        "batch 2: [1, 6]",
        "batch 3: [6]",
        "batch 4: [7, 3]",
        "drained: True",
    ]
    assert done.stderr == ""
