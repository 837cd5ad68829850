"""Makes the helper modules of the tests importable, and the fixtures of sessions known."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sessions import conf, nursery, nursery_process, tq

__all__ = ["conf", "nursery", "nursery_process", "tq"]
