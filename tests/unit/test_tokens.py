"""The token file of a session that listens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from transfer_queue import _remote


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    monkeypatch.delenv("TQ_TOKEN_FILE", raising=False)
    return tmp_path


def test_all_who_make_it_at_once_have_the_same(folder: Path) -> None:
    for turn in range(20):
        start = Barrier(8)

        def make(_: int, name: str = f"n{turn}", start: Barrier = start) -> bytes:
            start.wait()
            return _remote.own_token(name)

        with ThreadPoolExecutor(8) as pool:
            tokens = set(pool.map(make, range(8)))
        assert len(tokens) == 1
        (token,) = tokens
        file = folder / f"n{turn}.token"
        assert file.read_bytes().strip() == token == _remote.token(f"n{turn}")
        assert file.stat().st_mode & 0o777 == 0o600
    assert len(list(folder.iterdir())) == 20, "nothing is left beside them"


def test_a_file_that_others_can_read_is_refused(folder: Path) -> None:
    token = _remote.own_token("n")
    (folder / "n.token").chmod(0o640)
    for read in (_remote.own_token, _remote.token):
        with pytest.raises(RuntimeError, match=r"n\.token can be read by others, want mode 600") as caught:
            read("n")
        assert token.decode() not in str(caught.value)
