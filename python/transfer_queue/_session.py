"""The session of this process: opening, attaching, and ending it. There is one at a time."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import pickle
import sys
import threading
from typing import Any

from transfer_queue import _calls, _lib, config, sampler
from transfer_queue._jobs import Workers
from transfer_queue.errors import InvalidArgumentError, InvalidStateError, TransferQueueError, UnimplementedError

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
        self.handle, described = _opened(options)
        self.pid = os.getpid()
        self.owner: bool = described["owner"]
        self.id: str = described["session"]
        self.owner_pid: int = described["pid"]
        self.workers: Workers | None = None
        try:
            self.config: Any = _unpickled(described["config"])
            client = self.config.get("client") or {}
            self.timeout_s = float(client.get("timeout_s") or 60.0)
            self.layout: str = client.get("layout") or "jagged"
            if self.owner:
                self.workers = Workers(self.handle)
        except BaseException:
            self.close()
            raise

    def close(self, join_s: float = _CLOSE_S) -> None:
        """End it, or leave it, and wait so long for callables of the user that still run.

        Raises:
            TransferQueueError: it did not end in time, or not cleanly.
        """
        _ended(self.handle)
        if self.workers is not None:
            self.workers.join(join_s)


def _opened(options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Handle and description of a session of the core.

    The core may wait for another process; the wait is on a thread so that Ctrl-C ends it at once. The core is told
    then, and a session that has opened meanwhile is ended again.
    """
    options = {**options, "key": next(_keys)}
    outcome: list[tuple[int, dict[str, Any]] | BaseException] = []
    unwanted = False

    def work() -> None:
        try:
            opened = _open(options)
        except BaseException as error:
            outcome.append(error)
            return
        outcome.append(opened)
        if unwanted:
            with contextlib.suppress(TransferQueueError):
                _ended(opened[0])

    opening = threading.Thread(target=work, name="tq-open", daemon=True)
    try:
        opening.start()
        opening.join()
    except BaseException:
        unwanted = True
        _lib.library().tq_session_abort(options["key"])
        opening.join(_ABORT_S)
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


_keys = itertools.count(1)
_ABORT_S = 0.1  # how long Ctrl-C waits for an opening session to have given up


def _open(options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    library, packed = _lib.library(), _calls.encode(options)
    handle, info, error = _lib.u64(), _lib.Bytes(), _lib.Error()
    code = library.tq_session_open(packed, len(packed), ctypes.byref(handle), ctypes.byref(info), ctypes.byref(error))
    library.check(code, error)
    described: dict[str, Any] = _calls.decode(ctypes.string_at(info.data, info.size))
    library.tq_free(info.data)
    return handle.value, described


def _ended(handle: int) -> None:
    library, error = _lib.library(), _lib.Error()
    library.check(library.tq_session_close(handle, int(_CLOSE_S * 1000), ctypes.byref(error)), error)


def _unpickled(config: bytes) -> Any:
    try:
        return pickle.loads(config)
    except Exception as error:
        text = f"the configuration of the session cannot be read here: {type(error).__name__}: {error}"
        raise InvalidStateError(text, "init") from error


_lock = threading.RLock()
_current: Session | None = None
_place: dict[str, Any] = {}  # where this process, or the one it was forked from, looked for a session last


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
        "sampler": sampler.describe(sampler.resolve(controller.get("sampler"))) if mode != "attach" else {},
        "sampler_timeout_ms": int(1000 * float(controller.get("sampler_timeout_s") or 30)),
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
    return {"auto": "auto", "embedded": "own", "attach": "attach"}[conf.get("runtime") or "auto"]


def _refuse_what_is_missing(conf: Any) -> None:
    """Raise for a configuration that asks for something this release does not have; ignoring it could lose data."""
    storage = conf["backend"]["SimpleStorage"] or {}
    asked = {
        "TQ_ADDRESS": os.environ.get("TQ_ADDRESS") or None,
        "runtime: ray": True if conf.get("runtime") == "ray" else None,
        "backend.SimpleStorage.ssd_offload.enabled": (storage.get("ssd_offload") or {}).get("enabled") or None,
        "backend.SimpleStorage.disk_limit_bytes": storage.get("disk_limit_bytes"),
    }
    backend = conf["backend"].get("storage_backend")
    if backend != "SimpleStorage":
        asked[f"backend.storage_backend: {backend}"] = True
    missing = [name for name, value in asked.items() if value is not None]
    if missing:
        raise UnimplementedError(f"not supported by this release: {', '.join(missing)}", "init")
    if (conf.get("metrics") or {}).get("enabled"):
        logging.getLogger(__name__).warning("metrics.enabled: this release exports no metrics")


def open_session(conf: Any, mode: str | None = None, folder: str | None = None) -> Session:
    """Join the running session of this host, or start one; the session of this process when it has one."""
    global _current
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            return _current
        _refuse_what_is_missing(conf)
        options = _options(conf, mode or _runtime(conf))
        options["config"] = _pickled(conf)
        if folder is None:
            _place.update(dir=options["dir"], namespace=options["namespace"], pid=os.getpid())
        else:
            options["dir"] = folder
        _current = Session(options)
        return _current


def _pickled(conf: Any) -> bytes:
    """The configuration for processes that attach, which may not have the module of its sampler."""
    given = conf["controller"].get("sampler")
    if given is None or isinstance(given, str):
        import cloudpickle

        packed: bytes = cloudpickle.dumps(conf)
        return packed
    from transfer_queue._requests import shipped

    return shipped(conf, "the configuration", "init", of=given)


_LEAST_ATTACH_S = 1.0  # joining a session that runs takes a moment, also for a call that does not want to wait


def current(op: str = "", timeout: float | None = None) -> Session:
    """The session of this process; without one, the running session of this host is joined.

    Args:
        op: the operation that needs it.
        timeout: seconds that the caller gives the operation, and so the joining; the request checks the value.

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
        if _place:
            conf["namespace"] = _place["namespace"]
        if isinstance(timeout, int | float):
            conf["client"]["timeout_s"] = min(max(timeout, _LEAST_ATTACH_S), conf["client"]["timeout_s"])
        forked = _place.get("pid", os.getpid()) != os.getpid()
        try:
            return open_session(conf, "attach", _place["dir"] if forked else None)
        except TransferQueueError as error:
            error.op = error.op or op
            raise


def has_session() -> bool:
    """Whether this process has a session."""
    return _current is not None and _current.pid == os.getpid()


def close(join_s: float = _CLOSE_S) -> bool:
    """End or leave the session of this process; returns whether there was one."""
    global _current
    with _lock:
        session, _current = _current, None
        if session is None or session.pid != os.getpid():
            return False
        session.close(join_s)
        return True


def _at_exit() -> None:
    """Leave in time: a session that cannot end must not hold up the process."""
    if not has_session() or not _lib.loaded():
        return
    leaving = threading.Thread(target=_quietly, name="tq-exit", daemon=True)
    try:
        leaving.start()
    except RuntimeError:  # Python 3.12 starts no threads so late
        _quietly()
    else:
        leaving.join(_CLOSE_S)


def _quietly() -> None:
    with contextlib.suppress(TransferQueueError):
        close(join_s=0)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
if "sphinx" not in sys.modules:
    atexit.register(_at_exit)
