"""Makes the helper modules of the tests importable, and the fixtures of clusters known."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clusters import conf, ray, tq

__all__ = ["conf", "ray", "tq"]


def pytest_unconfigure() -> None:
    """Removes what the clusters have written."""
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
