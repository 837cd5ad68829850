"""The tutorials run, print what they are about, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "tutorial"

# Lines that a tutorial prints, among others.
PRINTS = {
    "checkpoint": [
        "metadata   {'step': 7}",
        "loaded     ['1/a', '1/b', '2/a', '2/b'] pairs are whole: True",
        "consumed   [1, 1, 0, 0]",
        "values     True",
        "refused    CorruptionError | still there: True",
        "dumped     ['1/a', '2/b'] 2",
        "back       {'1/a': {'step': 1}, '2/b': {'step': 2}} True",
    ],
    "disk": [
        "large      4 MiB on disk, all twos: True",
        "cleared    0 MiB on disk",
        "spilled    True",
        "in limits  True",
        "intact     True",
        "drained    SUCCEEDED DRAINED 0 cells left",
        "back       ['ACTIVE', 'ACTIVE']",
        "left       0 files",
    ],
    "ray_actors": [
        "units      2",
        "step 0 tokens 20",
        "step 1 tokens 20",
        "partitions ['train']",
        "left       0 bytes",
    ],
    "kv": [
        "put         ['a', 'b'] ['prompt', 'reward', 'source'] [{'step': 1}, {'step': 1}]",
        "get         [[0, 1, 2, 3, 4], [0, 1, 2]] [0.0, 0.0] ['book', 'web']",
        "updated     [0, 1, 2, 7, 8] [10.0, 20.0]",
        "done        {'train': {'b': {'step': 1, 'status': 'done'}}}",
        "waited for  ['c']",
        "watched     put d {'status': 'new'}",
        "bytes       99 -> 19 -> 0",
    ],
    "low_level": [
        "put        [0, 1, 2, 3] ['prompt'] True",
        "answered   [0, 1, 2] ['answer', 'prompt']",
        "trained on [0, 1, 2] [14, 15]",
        "consumed   {0: 1, 1: 1, 2: 1, 3: 0}",
        "produced   [[1, 1], [1, 1], [1, 1], [1, 0]]",
        "chunks     [0, 1] [2]",
        "joined     [2, 0, 1]",
        "left       [2, 3]",
        "partitions []",
    ],
    "samplers": [
        "groups: [9, 11, 1, 1] then []",
        "refused: get_meta: GRPOGroupNSampler: batch_size 3 must be a multiple of n_samples_per_prompt 2",
        "rank 1: [9, 11, 1, 1], 22 tokens",
        "rank 0: [6, 6, 7, 3], 22 tokens",
        "longest first: [11, 9, 7] then [6, 6, 3]",
        "batch 0: [9]",
        "batch 1: [11, 1]",
        "batch 2: [1, 6]",
        "batch 3: [6]",
        "batch 4: [7, 3]",
        "drained: True",
    ],
    "streaming": [
        "step 0    [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9, 10], [11]]",
        "again     [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9, 10], [11]]",
        "step 1    [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9, 10], [11]]",
        "lengths   [[1, 2, 3], [1], [2, 3, 1], [2], [3, 1, 2], [3]]",
    ],
}


# Ray alone takes half a minute to start on a busy machine.
SECONDS = 120


@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("name", PRINTS)
def test_a_tutorial_prints_what_it_is_about(name: str, runtime_dir: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tqr") as short:  # the sockets of Ray have long names
        run = subprocess.run(
            [sys.executable, FOLDER / f"{name}.py"],
            env={**os.environ, "RAY_TMPDIR": short},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line for line in PRINTS[name] if line not in lines] == [], run.stdout
    left = [*tmp_path.iterdir(), *runtime_dir.iterdir()]
    assert [path.name for path in left if path.suffix != ".lock"] == []


def test_every_tutorial_is_run() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("grpo_")}
    assert scripts == set(PRINTS)
