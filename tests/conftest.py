"""What every test needs: its own runtime directory, so that no test meets a session of this user or of another run."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports transfer_queue, and inherited by every process that a test starts.
for _name in ("TQ_ADDRESS", "TQ_TOKEN", "TQ_TOKEN_FILE"):
    os.environ.pop(_name, None)
_scratch = Path(tempfile.mkdtemp(prefix="tq-"))  # short: the path of a unix socket has 107 bytes
os.environ["TQ_RUNTIME_DIR"] = str(_scratch)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--large``."""
    parser.addoption("--large", action="store_true", help="also run tests that need about 15 GiB of memory and disk")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests marked ``large`` out unless asked for."""
    if not config.getoption("--large"):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="runs with --large"))


def pytest_unconfigure() -> None:
    """Removes what the whole run shared."""
    shutil.rmtree(_scratch, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Keeps what is there before a module's tests, torch and all, out of the many collections that they ask for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # or the end of the program takes it for leaked


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh TQ_RUNTIME_DIR for one test and the processes it starts."""
    folder = Path(tempfile.mkdtemp(prefix="tq-"))
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
