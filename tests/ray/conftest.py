"""Makes the helper modules of the tests importable, and the fixtures of clusters known."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clusters import conf, ray, tq

__all__ = ["conf", "ray", "tq"]

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives Ray time: the first test of a module starts a cluster, and every session starts processes with torch."""
    for item in items:
        if item.path.parent == _FOLDER:
            item.add_marker(pytest.mark.timeout(400))


def pytest_unconfigure() -> None:
    """Removes what the clusters have written."""
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
