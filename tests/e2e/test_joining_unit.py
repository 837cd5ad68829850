"""``python -m transfer_queue serve --join``: a unit as a daemon of its own, beside the daemon of the session."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import program
from transfer_queue import errors

MIB = 1 << 20


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _status(*arguments: str) -> str:
    command = [sys.executable, "-m", "transfer_queue", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A session with one unit, whose units are durable."""
    path = tmp_path / "conf.yaml"
    offload = {"enabled": True, "path": str(tmp_path / "disk"), "threshold_bytes": 4096, "durability": "relaxed"}
    storage = {"num_data_storage_units": 1, "total_storage_size": 40, "ssd_offload": offload}
    path.write_text(json.dumps({"backend": {"SimpleStorage": storage}}))
    return path


@pytest.fixture
def tq(runtime_dir: Path, conf: Path) -> Iterator[Any]:
    """The package, attached to the daemon of a session."""
    with program("-m", "transfer_queue", "serve", "--config", str(conf)) as process:
        assert _line(process).startswith("serving session")
        import transfer_queue

        transfer_queue.init({"runtime": "attach"})
        try:
            yield transfer_queue
        finally:
            transfer_queue.close()
            process.terminate()
            process.wait(20)


def _joining(*more: str) -> Any:
    return program("-m", "transfer_queue", "serve", "--join", "extra", *more)


def test_a_unit_joins_is_killed_and_joins_again(tq: Any, tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(8)]
    with _joining("--memory-limit-bytes", str(8 * MIB)) as unit:
        assert _line(unit).startswith("serving unit extra of session")
        (_, extra) = tq.list_units()
        assert (extra.unit_id, extra.memory_limit_bytes, extra.sample_limit) == ("extra", 8 * MIB, 40)
        for i, key in enumerate(keys):
            tq.kv_put(key, "p", fields={"x": torch.full((2000,), i), "n": torch.tensor([i])})
        assert all(unit.cells for unit in tq.list_units())
        unit.kill()
        unit.wait()
    with pytest.raises(errors.UnavailableError, match="extra"):
        tq.kv_batch_get(keys, "p")
    with _joining() as unit:
        assert _line(unit).startswith("serving unit extra of session")
        rows = tq.kv_batch_get(keys, "p", select_fields=["x"])["x"].unbind()
        assert [int(row[-1]) for row in rows] == list(range(8))
        lost = tq.list_lost()["p"]
        assert json.loads(_status("--json"))["lost"] == {"p": lost}
        assert f"lost with a unit: {next(iter(lost))!r} [n]" in _status()
        unit.send_signal(signal.SIGTERM)
        assert unit.wait(20) == 0
    with _joining() as unit:
        assert _line(unit).startswith("serving unit extra of session")
        assert tq.list_lost()["p"] == lost, "nothing more was lost by its end"
        assert tq.kv_batch_get(keys, "p", select_fields=["x"]).batch_size[0] == 8


def test_a_second_unit_of_the_name_is_refused(tq: Any) -> None:
    with _joining() as unit:
        _line(unit)
        with _joining() as second:
            assert "in use" in _line(second)
            assert second.wait(20) == 1
        unit.send_signal(signal.SIGINT)
        assert unit.wait(20) == 0


@pytest.mark.parametrize("more", [("--units", "2"), ("--listen", "tcp://:0"), ("--payload-port", "0")])
def test_what_makes_no_sense_for_a_unit_is_refused(runtime_dir: Path, more: tuple[str, ...]) -> None:
    with _joining(*more) as unit:
        assert _line(unit).startswith("error: --join")
        assert unit.wait(20) == 1


def test_without_a_session_there_is_nothing_to_join(runtime_dir: Path) -> None:
    with _joining() as unit:
        assert "no session is running" in _line(unit)
        assert unit.wait(20) == 1


def test_a_unit_waits_for_the_next_session(runtime_dir: Path, tmp_path: Path) -> None:
    """One without values is of use to any session."""
    import transfer_queue

    with program("-m", "transfer_queue", "serve", "--units", "1") as first:
        _line(first)
        with _joining() as unit:
            _line(unit)
            first.terminate()
            assert first.wait(20) == 0
            assert _line(unit).startswith("waiting for the session")
            with program("-m", "transfer_queue", "serve", "--units", "1") as second:
                _line(second)
                assert _line(unit) == "joined again\n"
                transfer_queue.init({"runtime": "attach"})
                try:
                    states = {unit.unit_id: unit.state for unit in transfer_queue.list_units()}
                    assert states == {"unit-0": "ACTIVE", "extra": "ACTIVE"}
                finally:
                    transfer_queue.close()
