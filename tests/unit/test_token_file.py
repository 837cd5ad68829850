from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue import _remote
from transfer_queue.errors import InvalidStateError

TOKEN = b"token-of-the-tests-0123456789"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o604, 0o644])
@pytest.mark.parametrize("read", [_remote.token, _remote.own_token], ids=["client", "owner"])
def test_only_a_private_token_file_is_read(
    read: object, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "copied"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(mode)
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    monkeypatch.setenv("TQ_TOKEN_FILE", str(file))
    assert callable(read)
    if mode & 0o077:
        with pytest.raises(InvalidStateError, match=f"token file {file} can be read by others, want mode 600"):
            read("default")
    else:
        assert read("default") == TOKEN
