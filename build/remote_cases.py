"""Runs the acceptance cases with the session on other hosts, for which network namespaces stand in.

``python build/remote_cases.py FOLDER [pytest arguments]``: the tests and their children run on one host, the controller
on a second, the storage units on a third. What is about shared memory, about sessions that a process owns, or needs a
configuration that only a program can have is in ``remote.skip``, beside what ``cases.skip`` lists.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "build")]

import cases  # noqa: E402

import netns  # noqa: E402
from served import Served  # noqa: E402

LIST = Path(__file__).resolve().with_name("remote.skip")


class Elsewhere:
    """A pytest plugin: sessions of the cases are daemons on other hosts, one for each configuration."""

    def __init__(self, hosts: list[netns.Host]) -> None:
        self.hosts = hosts
        self.served: Served | None = None

    def pytest_collection(self, session: pytest.Session) -> None:
        """Before the modules of the cases are imported, which take names out of these."""
        import conftest
        import processes

        private_env, plugin = processes.private_env, self

        def use(self: Any, conf: dict[str, Any]) -> Any:
            import transfer_queue as tq

            if not self.usable or self.conf != conf:
                self.stop()
                plugin.serve(conf)
                self.config = tq.init()
                self.conf, self.usable = conf, True
            return tq

        conftest.Session.use = use
        processes.private_env = lambda: {**private_env(), "TQ_ADDRESS": ""}

    def serve(self, conf: dict[str, Any]) -> None:
        """Start a session with a configuration, instead of the one before."""
        import yaml

        self.end()
        units = int(conf.get("backend", {}).get("SimpleStorage", {}).get("num_data_storage_units") or 2)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
            yaml.safe_dump(conf, file)
        try:
            self.served = Served(self.hosts[1], self.hosts[2:], "--config", file.name, each=units)
        finally:
            os.unlink(file.name)
        os.environ.update(self.served.environment)

    def end(self) -> None:
        """End the session that there is."""
        served, self.served = self.served, None
        if served is not None:
            served.end()

    def pytest_unconfigure(self) -> None:
        """However the run ends."""
        self.end()


def main(folder: str, arguments: list[str]) -> int:
    """Runs pytest in the folder on a host of its own and returns its exit status."""
    if os.environ.get("TQ_CASES_HOSTS"):
        hosts = [netns.Host(name, number, Path(path)) for number, name, path in _listed(os.environ["TQ_CASES_HOSTS"])]
        os.chdir(folder)
        sys.path[0] = ""
        entries = [*cases.read_list(cases.LIST), *cases.read_list(LIST)]
        complete = all(argument.startswith("-") for argument in arguments)
        plugins = [cases.LeftOut(entries, False, complete), Elsewhere(hosts)]
        return int(pytest.main(["-q", "--continue-on-collection-errors", *arguments], plugins=plugins))
    if missing := netns.reason():
        print(f"skipped: {missing}")
        return 0
    with netns.hosts(3) as made:
        listed = ",".join(f"{number}:{host.namespace}:{host.folder}" for number, host in enumerate(made, 1))
        command = made[0].command(sys.executable, __file__, folder, *arguments)
        environment = made[0].environment(TQ_CASES_HOSTS=listed, TQ_CASES_RUNTIME="remote")
        return subprocess.run(command, env=environment, check=False).returncode


def _listed(text: str) -> list[tuple[int, str, str]]:
    out = []
    for entry in text.split(","):
        number, name, path = entry.split(":", 2)
        out.append((int(number), name, path))
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
