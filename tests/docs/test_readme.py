"""The README is true: its example runs and prints what it says, and the files it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, "TQ_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert run.returncode == 0, run.stderr
    read, left = run.stdout.splitlines()
    assert read == "['a/0', 'a/1'] [[0, 1, 2, 7, 8], [0, 1, 2, 3, 4]] [2.0, 2.0]"
    assert left == "{'train': {'a/0': {'group': 'a'}, 'a/1': {'group': 'a'}, 'b/0': {'group': 'b'}}} 12"
    assert list(tmp_path.glob("*.sock")) == []


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_commands_of_the_readme_exist() -> None:
    commands = re.findall(r"^bash (\S+)", README, re.MULTILINE)
    assert commands == ["build/demo.sh", "build/test.sh"]
    assert [command for command in commands if not (ROOT / command).is_file()] == []
