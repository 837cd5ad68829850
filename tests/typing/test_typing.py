"""Programs over the public API type-check, strictly, and wrong ones do not; and so do the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def _mypy(root: Path, *paths: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), *map(str, paths)]
    environment = {**os.environ, "MYPYPATH": f"{root}/python:{root}/tests:{root}/tests/unit"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=150, check=False)
    return done.stdout + done.stderr


def test_expectations(root: Path) -> None:
    """Every ``assert_type`` holds, and every line that is to fail has an error: an ignore without one is an error."""
    output = _mypy(root, Path(__file__).with_name("expectations.py"))
    assert output.startswith("Success"), output


def test_helpers_and_tests(root: Path) -> None:
    tests = root / "tests"
    paths = [path for folder in (tests, tests / "e2e", tests / "crash") for path in folder.glob("*.py")]
    output = _mypy(root, *(path for path in paths if path.name != "conftest.py"))
    assert output.startswith("Success"), output
