"""Programs over the public API type-check, strictly, and wrong ones do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def _mypy(root: Path, path: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "--warn-unused-ignores"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, cwd=root, timeout=120, check=False)
    return done.stdout + done.stderr


def test_expectations(root: Path) -> None:
    """Every ``assert_type`` holds, and every line that is to fail has an error: an ignore without one is an error."""
    output = _mypy(root, Path(__file__).with_name("expectations.py"))
    assert output.startswith("Success"), output
