"""Sessions on other hosts: where one listens or is found, and the token that both sides must know."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

from transfer_queue.errors import InvalidArgumentError, InvalidStateError, UnavailableError

_TOKEN_BYTES = 32
_LONGEST = 4096  # of a token file
_LONGEST_ID = 128  # of a host


def address() -> str:
    """``TQ_ADDRESS``: the session of another host that this process uses; empty for none."""
    return os.environ.get("TQ_ADDRESS", "")


def _folder() -> Path:
    given = os.environ.get("TQ_RUNTIME_DIR")
    if given:
        return Path(given)
    run = os.environ.get("XDG_RUNTIME_DIR")
    if run and os.path.isdir(run):
        return Path(run, "transferqueue")
    return Path(os.environ.get("TMPDIR") or "/tmp", f"transferqueue-{os.getuid()}")


def token_file(namespace: str) -> Path:
    """``TQ_TOKEN_FILE``, else ``<namespace>.token`` in the runtime directory."""
    given = os.environ.get("TQ_TOKEN_FILE")
    return Path(given) if given else _folder() / f"{namespace}.token"


def token(namespace: str) -> bytes:
    """The token of the session to attach to, with the server's key behind it when the session uses CURVE: ``TQ_TOKEN``,
    else the contents of the token file.

    Raises:
        InvalidStateError: there is neither, or others can read the file.
    """
    given = os.environ.get("TQ_TOKEN", "").strip()
    if given:
        return given.encode()
    path = token_file(namespace)
    try:
        return _read(path)
    except FileNotFoundError:
        raise InvalidStateError(
            f"{address()} asks for a token: set TQ_TOKEN, or TQ_TOKEN_FILE to a copy of the owner's token file "
            f"(there is no {path})",
            "init",
        ) from None


def key_file(namespace: str) -> Path:
    """``TQ_KEY_FILE``, else ``<namespace>.key`` beside the token file: the secret key of an owner with CURVE."""
    given = os.environ.get("TQ_KEY_FILE")
    beside = token_file(namespace)
    return Path(given) if given else beside.with_name(beside.name.removesuffix(".token") + ".key")


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise InvalidStateError(f"token file {path} can be read by others, want mode 600", "init")
        found = file.read(_LONGEST + 1).strip()
    if not found or len(found) > _LONGEST:
        raise InvalidArgumentError(f"token file {path}: want one line with the token", "init")
    return found


def own_token(namespace: str) -> bytes:
    """The token of a session that listens: as in `token`, or a new one, which is written to the token file."""
    given = os.environ.get("TQ_TOKEN", "").strip()
    if given:
        return given.encode()
    path = token_file(namespace)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = new_token()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    with open(descriptor, "w") as file:
        file.write(fresh.decode() + "\n")
    return fresh


def new_token() -> bytes:
    """A random token."""
    return secrets.token_hex(_TOKEN_BYTES).encode()


def machine() -> str:
    """Where this process is, as the core compares it; see ``TQ_HOST_ID`` in docs/environment.md."""
    given = os.environ.get("TQ_HOST_ID", "")[:_LONGEST_ID]
    if given:
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()[:_LONGEST_ID]


def facing(other: str) -> str:
    """The address of this host as the host of ``tcp://HOST:PORT`` sees it.

    Raises:
        InvalidArgumentError: the address makes no sense (a ValueError).
        UnavailableError: the name does not resolve, or there is no way there (a ConnectionError).
    """
    host, _, port = other.removeprefix("tcp://").rpartition(":")
    if not other.startswith("tcp://") or not port.isdigit():
        raise InvalidArgumentError(f"address {other!r}: want tcp://HOST:PORT", "join")
    try:
        family, kind, _, _, at = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(at)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"address {other!r}: {error}", "join") from error


def listening(conf: Any) -> dict[str, Any]:
    """Options of the core for a session that is to listen for other hosts; none when it is not."""
    section = conf.get("remote") or {}
    if "security" in section:  # unknown keys are ignored, but this one must not be
        raise InvalidArgumentError("config: remote.security: the key is security, outside of any section", "init")
    listen = section.get("listen")
    if not listen:
        return {}
    namespace = conf.get("namespace") or "default"
    return {
        "listen": str(listen),
        "payload_port": int(section.get("payload_port") or 0),
        "token": own_token(namespace),
        "token_file": "" if os.environ.get("TQ_TOKEN", "").strip() else str(token_file(namespace)),
        "key_file": str(key_file(namespace)),
    }
