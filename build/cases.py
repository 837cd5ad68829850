"""Runs the acceptance cases without those that ``cases.skip`` lists.

``python build/cases.py FOLDER [--left-out] [pytest arguments]`` runs the cases of FOLDER; ``--left-out`` runs those on
the list instead, to see which of them could leave it. An entry that names no case is an error: the list never rots.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parent / "cases.skip"


class Entry:
    """A line of the list: a file, a test, or one parametrised case, and the issue that brings it."""

    def __init__(self, name: str, issue: str) -> None:
        self.name = name
        self.issue = issue
        self.is_file = "::" not in name
        self.cases = 0

    def matches(self, nodeid: str) -> bool:
        """Whether a case is this entry or belongs to it."""
        return nodeid == self.name or nodeid.startswith((self.name + "[", self.name + "::"))


def read_list(path: Path) -> list[Entry]:
    """Parses ``node id  # issue N`` lines."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = re.fullmatch(r"(\S.*?)\s+# issue (\d+)", line.rstrip())
        if parts is None:
            sys.exit(f"{path}:{number}: {line!r}, want `node id  # issue N`")
        entries.append(Entry(parts[1], parts[2]))
    return entries


class LeftOut:
    """A pytest plugin that leaves out the entries, or everything else."""

    def __init__(self, entries: list[Entry], only: bool, complete: bool) -> None:
        self.entries = entries
        self.only = only
        self.complete = complete  # the run was asked for every case, so every entry has to match one
        self.files = {entry.name for entry in entries if entry.is_file}

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        # Not imported at all: a file may need what only its issue brings.
        listed = collection_path.relative_to(config.rootpath).as_posix() in self.files
        return True if listed and not self.only else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        listed: set[pytest.Item] = set()
        for entry in self.entries:
            hits = [item for item in items if entry.matches(item.nodeid)]
            entry.cases = len(hits)
            listed.update(hits)
        self.check(config.rootpath, broken=session.testsfailed > 0)
        config.hook.pytest_deselected(items=[item for item in items if (item in listed) != self.only])
        items[:] = [item for item in items if (item in listed) == self.only]

    def check(self, folder: Path, broken: bool) -> None:
        """Raises for entries that name nothing; those of files that could not be imported prove nothing."""
        unknown = [entry.name for entry in self.entries if entry.is_file and not (folder / entry.name).exists()]
        if self.complete and not broken:
            unknown += [entry.name for entry in self.entries if not entry.is_file and not entry.cases]
        if unknown:
            raise pytest.UsageError(f"{LIST.name}: no such case: {', '.join(unknown)}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.only:
            return
        lines = []
        for issue in sorted({entry.issue for entry in self.entries}, key=int):
            mine = [entry for entry in self.entries if entry.issue == issue]
            files, cases = sum(entry.is_file for entry in mine), sum(entry.cases for entry in mine)
            lines.append(f"issue {issue}: {files} files, {cases} cases")
        terminalreporter.write_line(f"left out by {LIST.name}: {'; '.join(lines) or 'nothing'}")


def main(folder: str, arguments: list[str]) -> int:
    """Runs pytest in the folder and returns its exit status."""
    only = "--left-out" in arguments
    arguments = [argument for argument in arguments if argument != "--left-out"]
    complete = all(argument.startswith("-") for argument in arguments)
    os.chdir(folder)
    sys.path[0] = ""  # as `python -m pytest` in the folder has it
    plugin = LeftOut(read_list(LIST), only, complete)
    return pytest.main(["-q", "--continue-on-collection-errors", *arguments], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
