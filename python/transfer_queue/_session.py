"""The session of this process: opening, attaching, and ending it. There is one at a time."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import sys
import threading
from typing import Any

from transfer_queue import _calls, _lib, config
from transfer_queue._codes import Code
from transfer_queue._jobs import Workers
from transfer_queue.errors import InvalidArgumentError, InvalidStateError, TransferQueueError

_CLOSE_S = 5.0


class Session:
    """A handle of the core's session and what Python needs of its configuration.

    Attributes:
        handle: number of the session in the core.
        pid: process that opened it; in a forked child it is of no use.
        owner: whether controller and units run in this process.
        config: configuration of the session, as its owner has it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        library = _lib.library()
        handle, info, error = _lib.u64(), _lib.Bytes(), _lib.Error()
        packed = _calls.encode(options)
        code = library.tq_session_open(
            packed, len(packed), ctypes.byref(handle), ctypes.byref(info), ctypes.byref(error)
        )
        library.check(code, error)
        described = _calls.decode(ctypes.string_at(info.data, info.size))
        library.tq_free(info.data)
        self.handle, self.pid, self.options = handle.value, os.getpid(), options
        self.owner: bool = described["owner"]
        self.id: str = described["session"]
        self.owner_pid: int = described["pid"]
        self.config: Any = pickle.loads(described["config"])
        client = self.config.get("client") or {}
        self.timeout_s = float(client.get("timeout_s") or 60.0)
        self.layout: str = client.get("layout") or "jagged"
        self.workers = Workers(self.handle) if self.owner else None

    def close(self) -> None:
        library, error = _lib.library(), _lib.Error()
        code = library.tq_session_close(self.handle, int(_CLOSE_S * 1000), ctypes.byref(error))
        library.check(code, error)
        if self.workers is not None:
            self.workers.join(_CLOSE_S)


_lock = threading.RLock()
_current: Session | None = None
_place: dict[str, Any] = {}  # where this process looked for a session last; a forked child looks there too


def _options(conf: Any, mode: str) -> dict[str, Any]:
    """What the core needs to know of a configuration."""
    storage = conf["backend"]["SimpleStorage"] or {}
    client = conf.get("client") or {}
    controller = conf["controller"]
    return {
        "mode": mode,
        "dir": os.environ.get("TQ_RUNTIME_DIR", ""),
        "namespace": conf.get("namespace") or "default",
        "units": int(storage.get("num_data_storage_units") or 1),
        "memory_limit_bytes": int(storage.get("memory_limit_bytes") or 0),
        "total_storage_size": int(storage.get("total_storage_size") or 0),
        "put_wait_ms": int(1000 * float(30 if storage.get("put_wait_s") is None else storage["put_wait_s"])),
        "pre_allocate": _pre_allocate(),
        "polling_mode": bool(controller.get("polling_mode")),
        "config": b"",
        "timeout_ms": int(1000 * float(client.get("timeout_s") or 60.0)),
        "version": version(),
    }


def _pre_allocate() -> int:
    text = os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "1")
    if not text.isdigit() or int(text) < 1:
        raise InvalidArgumentError(f"TQ_PRE_ALLOC_SAMPLE_NUM={text!r}: want a whole number of at least 1", "init")
    return int(text)


def version() -> str:
    """Version of the package."""
    with open(os.path.join(os.path.dirname(__file__), "version", "version")) as file:
        return file.read().strip()


def _runtime(conf: Any) -> str:
    """Mode of the core for the configured runtime."""
    runtime = conf.get("runtime") or "auto"
    if os.environ.get("TQ_ADDRESS"):
        runtime = "attach"
    return {"auto": "auto", "embedded": "own", "attach": "attach", "own": "own"}[runtime]


def open_session(conf: Any, mode: str | None = None) -> Session:
    """Join the running session of this host, or start one; the session of this process when it has one."""
    global _current
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            return _current
        options = _options(conf, mode or _runtime(conf))
        options["config"] = _pickled(conf)
        _place.update(dir=options["dir"], namespace=options["namespace"])
        _current = Session(options)
        return _current


def _pickled(conf: Any) -> bytes:
    import cloudpickle

    packed: bytes = cloudpickle.dumps(conf)
    return packed


def current(op: str = "") -> Session:
    """The session of this process; without one, the running session of this host is joined.

    Raises:
        NotInitializedError: there is none (an AssertionError).
    """
    session = _current
    if session is not None and session.pid == os.getpid():
        return session
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            return _current
        conf = config.load(None)
        if _place.get("namespace"):
            conf["namespace"] = _place["namespace"]
        try:
            return open_session(conf, "attach")
        except TransferQueueError as error:
            error.op = error.op or op
            raise


def has_session() -> bool:
    """Whether this process has a session."""
    return _current is not None and _current.pid == os.getpid()


def close() -> bool:
    """End or leave the session of this process; returns whether there was one."""
    global _current
    with _lock:
        session, _current = _current, None
        if session is None or session.pid != os.getpid():
            return False
        session.close()
        return True


def _at_exit() -> None:
    """Leave in time: a session that cannot end must not hold up the process."""
    if not has_session() or not _lib.loaded():
        return
    leaving = threading.Thread(target=_quietly, name="tq-exit", daemon=True)
    leaving.start()
    leaving.join(_CLOSE_S)


def _quietly() -> None:
    with contextlib.suppress(TransferQueueError):
        close()


def poisoned(error: TransferQueueError) -> bool:
    """Whether an error says that the library has had a panic."""
    return error.code == Code.INTERNAL


def require(op: str) -> Session:
    """The session that this process has; never joins one.

    Raises:
        InvalidStateError: this process has none.
    """
    if not has_session() or _current is None:
        raise InvalidStateError("transfer queue is not initialized in this process, call init() first", op)
    return _current


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
if "sphinx" not in sys.modules:
    atexit.register(_at_exit)
