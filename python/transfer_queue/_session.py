"""The sessions of this process: opening, joining and ending them.

One is that of the process, which the functions of the package use. Clients that are made by hand may join others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue import _calls, _lib, _metrics, _remote, config, sampler
from transfer_queue._controller_requests import packed_config
from transfer_queue._jobs import Workers
from transfer_queue._ops import Op
from transfer_queue._whole_numbers import MOST
from transfer_queue.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    InvalidStateError,
    NotInitializedError,
    TransferQueueError,
    UnavailableError,
    UnimplementedError,
)
from transfer_queue.utils.zmq_utils import Role, ZMQServerInfo

_CLOSE_S = 5.0
# As in config.yaml, for configurations that have null there.
_TIMEOUT_S, _PUT_WAIT_S, _SAMPLER_TIMEOUT_S, _RESTART_WAIT_S = 60.0, 30.0, 30.0, 30.0


class Session:
    """A handle of the core's session and what Python needs of its configuration.

    Attributes:
        handle: number of the session in the core.
        pid: process that opened it; in a forked child it is of no use.
        owner: whether controller and units run in this process.
        info: its address, with which other processes join it.
        key: public key of its server, which clients of other hosts need when the session uses CURVE.
        config: configuration of the session, as its owner has it, with the address in ``controller.zmq_info``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.handle, described = _opened(options)
        self.pid = os.getpid()
        self.owner: bool = described["owner"]
        self.id: str = described["session"]
        self.restored: bool = described["restored"]
        self.owner_pid: int = described["pid"]
        self.key: bytes = described["key"] or b""
        self.workers: Workers | None = None
        self.page: _metrics.Page | None = None
        self.info = _info(Role.CONTROLLER, "TransferQueueController", described)
        self.info.token = options.get("token", b"") if self.info.ports else b""
        if self.key and b" " not in self.info.token:
            self.info.token += b" " + self.key.hex().encode()
        try:
            self.config: Any = _with_addresses(_unpickled(described["config"]), self.info, described)
            client = self.config.get("client") or {}
            self.timeout_s = float(client.get("timeout_s") or _TIMEOUT_S)
            self.layout: str = client.get("layout") or "jagged"
            if self.owner:
                self.workers = Workers(self.handle, options["sampler"].get("pickled"))
        except BaseException:
            self.close()
            raise

    def close(self, join_s: float = _CLOSE_S) -> None:
        """End it, or leave it, and wait so long for callables of the user that still run.

        Raises:
            TransferQueueError: it did not end in time, or not cleanly.
        """
        if self.page is not None:
            self.page.close()
        _ended(self.handle)
        if self.workers is not None:
            self.workers.join(join_s)


def _info(role: Role, name: str, described: Mapping[str, Any]) -> ZMQServerInfo:
    host, _, port = described["address"].removeprefix("tcp://").rpartition(":")
    return ZMQServerInfo(
        role,
        name,
        ip=host.strip("[]") or described["host"],
        ports={"requests": int(port)} if port else None,
        socket=described["socket"],
        secret=described["secret"] or b"",
        session=described["session"],
        pid=described["pid"],
        machine=described["machine"],
    )


def _with_addresses(conf: Any, controller: ZMQServerInfo, described: Mapping[str, Any]) -> Any:
    """The configuration with the addresses of controller and units, unless somebody has stored others."""
    section = (conf.get("backend") or {}).get("SimpleStorage")
    if conf.get("controller") is not None and conf["controller"].get("zmq_info") is None:
        conf["controller"]["zmq_info"] = controller
        if section is not None and section.get("zmq_info") is None:
            units = range(int(section.get("num_data_storage_units") or 1))
            section["zmq_info"] = {f"unit-{i}": _info(Role.STORAGE, f"unit-{i}", described) for i in units}
    return conf


def _opened(options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Handle and description of a session of the core.

    The core may wait for another process; the wait is on a thread so that Ctrl-C ends it at once. The core is told
    then, and a session that has opened meanwhile is ended again.
    """
    options = {**options, "key": next(_keys), "host_id": _remote.machine()}
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
_others: dict[str, Session] = {}  # by identity: those that are joined or owned beside the session of this process
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
        "disk": disk_options(storage),
        "journal": _journal_options(controller.get("journal") or {}),
        "total_storage_size": int(storage.get("total_storage_size") or 0),
        "put_wait_ms": int(1000 * float(_PUT_WAIT_S if storage.get("put_wait_s") is None else storage["put_wait_s"])),
        "pre_allocate": _pre_allocate(),
        "polling_mode": bool(controller.get("polling_mode")),
        "sampler": sampler.describe(sampler.resolve(controller.get("sampler"))) if mode != "attach" else {},
        "sampler_timeout_ms": int(1000 * float(controller.get("sampler_timeout_s") or _SAMPLER_TIMEOUT_S)),
        "config": b"",
        "timeout_ms": int(1000 * float(client.get("timeout_s") or _TIMEOUT_S)),
        "version": version(),
        "security": conf.get("security") or "token",
        **({} if mode == "attach" else _remote.listening(conf)),
    }


def disk_options(storage: Any) -> dict[str, Any]:
    """What the core needs to know of the disk of units. A path is of each host, relative to the owner's directory."""
    offload = storage.get("ssd_offload") or {}
    if not offload.get("enabled"):
        return {"enabled": False}
    return {
        "enabled": True,
        "path": os.path.abspath(os.path.expanduser(path)) if (path := offload.get("path")) else "",
        "limit_bytes": int(storage.get("disk_limit_bytes") or 0),
        "threshold_bytes": int(offload.get("threshold_bytes") or 1 << 20),
        "high_watermark": float(storage.get("high_watermark") or 0.9),
        "low_watermark": float(storage.get("low_watermark") or 0.7),
        "durability": offload.get("durability") or "none",
    }


def _journal_options(journal: Any) -> dict[str, Any]:
    """What the core needs to know of the journal of a controller."""
    return {
        "durability": journal.get("durability") or "none",
        "path": os.path.abspath(os.path.expanduser(path)) if (path := journal.get("path")) else "",
        "restart_wait_ms": int(1000 * float(journal.get("restart_wait_s") or _RESTART_WAIT_S)),
    }


def _pre_allocate() -> int:
    text = os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise InvalidArgumentError(f"TQ_PRE_ALLOC_SAMPLE_NUM={text!r}: want a whole number of at least 1", "init")
    return int(text)


def version() -> str:
    """Version of the package."""
    with open(os.path.join(os.path.dirname(__file__), "version", "version")) as file:
        return file.read().strip()


def _runtime(conf: Any) -> str:
    """Mode of the core for the configured runtime; "ray" when the session is one of Ray."""
    mode = {"auto": "auto", "embedded": "own", "attach": "attach", "ray": "ray"}[conf.get("runtime") or "auto"]
    return "ray or attach" if mode == "auto" and _ray_usable() else mode


def _ray_usable() -> bool:
    if "ray" not in sys.modules:
        return False
    from transfer_queue import _ray

    return _ray.usable()


def _open_with_ray(conf: Any, mode: str) -> Session:
    """The session of the Ray cluster, unless one of this host is published, which comes first."""
    from transfer_queue import _ray

    if mode == "ray or attach":
        with contextlib.suppress(NotInitializedError):
            return open_session(conf, "attach")
    return _ray.open_session(conf)


def _refuse_what_is_missing(conf: Any) -> None:
    """Raise for a configuration that asks for something this release does not have; ignoring it could lose data."""
    backend = conf["backend"].get("storage_backend")
    if backend not in conf["backend"]:
        have = ", ".join(repr(name) for name in conf["backend"] if name != "storage_backend")
        text = f"config: backend.storage_backend: got {backend!r}, want the name of a section of backend: {have}"
        raise InvalidArgumentError(text, "init")
    if backend != "SimpleStorage":
        raise UnimplementedError(f"not supported by this release: backend.storage_backend: {backend}", "init")


def open_session(
    conf: Any, mode: str | None = None, folder: str | None = None, units_join: bool = False, keep: bool = False
) -> Session:
    """Join the running session of this host, or start one; the session of this process when it has one.

    Args:
        conf: complete configuration.
        mode: of the core, by default that of the configured runtime.
        folder: runtime directory, by default that of the environment.
        units_join: when it starts one, no unit runs in this process.
        keep: when it is owned, what is durable stays after it was closed, for the next owner of its name.
    """
    global _current
    with _lock:
        if has_session():
            return _here()
        _refuse_what_is_missing(conf)
        mode = mode or _runtime(conf)
        if "ray" in mode:
            return _open_with_ray(conf, mode)
        options = _options(conf, mode)
        options["config"] = packed_config(_unplaced(conf))
        if units_join:
            options["units"] = -1
        options["keep"] = keep
        if _remote.address() and options["mode"] != "own":
            options.update(mode="attach", address=_remote.address(), token=_remote.token(options["namespace"]))
        if folder is None:
            _place.clear()
            _place.update(dir=options["dir"], namespace=options["namespace"], pid=os.getpid())
        else:
            options["dir"] = folder
        _current = _metrics.opened(conf, options, Session)
        return _current


def own_private(conf: Any, units_join: bool = False, listen: str = "") -> Session:
    """Start a session that others join only by its address, beside the session of this process.

    Args:
        conf: its configuration.
        units_join: no unit runs in this process; they run in others and join.
        listen: ``tcp://HOST:PORT`` where other hosts reach it, with a token and a key of its own; the configuration
            comes first.
    """
    _refuse_what_is_missing(conf)
    options = {**_options(conf, "own"), "unpublished": True, "config": packed_config(_unplaced(conf))}
    if units_join:
        options["units"] = -1
    if listen and "listen" not in options:
        options.update(listen=listen, token=_remote.new_token())
    session = Session(options)
    with _lock:
        _others[session.id] = session
    return session


def _unplaced(conf: Any) -> Any:
    """The configuration without the addresses of another session that its user may have taken it from."""
    conf["controller"]["zmq_info"] = None
    if conf.get("metrics"):
        conf["metrics"].pop("endpoint", None)
    if conf["backend"]["SimpleStorage"]:
        conf["backend"]["SimpleStorage"]["zmq_info"] = None
    return conf


def join(info: ZMQServerInfo, timeout: float | None = None, op: str = "") -> Session:
    """The session at an address: that of this process when it is the one, else one beside it.

    Raises:
        UnavailableError: nobody answers there.
    """
    session = _current
    if session is not None and session.id == info.session and session.pid == os.getpid():
        return session
    session = _others.get(info.session)
    if session is not None and session.pid == os.getpid():
        return session
    with _lock:
        session = _others.get(info.session)
        if session is not None and session.pid == os.getpid():
            return session
        if _current is not None and _current.id == info.session and not has_session():
            inherited = current(op, timeout)  # this process was forked from one with that session
            if inherited.id == info.session:
                return inherited
        session = _others[info.session] = _joined(info, timeout, op)
        return session


def enter(info: ZMQServerInfo, timeout: float | None = None) -> Session:
    """Make the session at an address the session of this process, unless it has one."""
    global _current
    with _lock:
        if not has_session():
            _current = _joined(info, timeout, "init")
            _place.clear()
            _place.update(info=info, pid=os.getpid())
        return _here()


def _joined(info: ZMQServerInfo, timeout: float | None, op: str) -> Session:
    limit_s = max(timeout, _LEAST_ATTACH_S) if isinstance(timeout, int | float) else _JOIN_S
    options = {
        "mode": "attach",
        "socket": info.socket,
        "secret": info.secret,
        "machine": info.machine,
        "timeout_ms": int(1000 * limit_s),
    }
    if info.token:
        options.update(address=info.to_addr("requests"), token=info.token)
    try:
        return Session(options)
    except TransferQueueError as error:
        error.op = error.op or op
        raise


def leave(info: ZMQServerInfo) -> None:
    """Leave a session that was joined beside that of this process; one that is owned here goes on."""
    with _lock:
        session = _others.get(info.session)
        if session is None or session.owner:
            return
        del _others[info.session]
    if session.pid == os.getpid():
        session.close()


_LEAST_ATTACH_S = 1.0  # joining a session that runs takes a moment, also for a call that does not want to wait
_JOIN_S = 60.0


def current(op: str = "", timeout: float | None = None) -> Session:
    """The session of this process; without one, the running session of this host is joined.

    Args:
        op: the operation that needs it.
        timeout: seconds that the caller gives the operation, and so the joining; the request checks the value.

    Raises:
        NotInitializedError: there is none (an AssertionError).
    """
    if has_session():
        return _here()
    with _lock:
        if has_session():
            return _here()
        try:
            session = _found(timeout)
        except TransferQueueError as error:
            error.op = error.op or op
            raise
        for joined in on_join:
            joined(session)
        return session


on_join: list[Callable[[Session], None]] = []  # told of a session that this process has joined without being asked to


def _found(timeout: float | None) -> Session:
    """The session where this process, or the one it was forked from, looked last; else the running one of this host."""
    forked = _place.get("pid", os.getpid()) != os.getpid()
    if forked and "info" in _place:
        return enter(_place["info"], timeout)
    conf = config.load(None)
    if "namespace" in _place:
        conf["namespace"] = _place["namespace"]
    if isinstance(timeout, int | float):
        conf["client"]["timeout_s"] = min(max(timeout, _LEAST_ATTACH_S), conf["client"]["timeout_s"])
    return _attached(conf, _place["dir"] if forked else None)


def _attached(conf: Any, folder: str | None) -> Session:
    """The published session of this host, else that of the Ray cluster."""
    try:
        return open_session(conf, "attach", folder)
    except NotInitializedError:
        if not _ray_usable():
            raise
    from transfer_queue import _ray

    return _ray.join_session(float(conf["client"]["timeout_s"]))


def has_session() -> bool:
    """Whether this process has a session."""
    return _current is not None and _current.pid == os.getpid()


def _here() -> Session:
    assert _current is not None
    return _current


def close(join_s: float = _CLOSE_S) -> bool:
    """End or leave the session of this process; returns whether there was one."""
    global _current
    with _lock:
        session, _current = _current, None
        if session is None or session.pid != os.getpid():
            return False
        session.close(join_s)
        return True


def refuse_another(conf: Any) -> None:
    """Raise when this process has a session and the configuration of its user names another one.

    Raises:
        InvalidStateError: its namespace is not the one that the session was found in (a RuntimeError).
    """
    wanted = conf.get("namespace") if isinstance(conf, Mapping) else getattr(conf, "namespace", None)
    with _lock:
        have = _place.get("namespace") if has_session() else None
    if wanted and have and wanted != have:
        text = f"this process is in the session of namespace {have!r}, close() it before you want one of {wanted!r}"
        raise InvalidStateError(text, "init")


def forget_lost() -> bool:
    """Leave the session of this process when its owner has died; returns whether it did.

    Only who asks for a session anew gets another one. A call on the one that is gone goes on to fail, because what was
    in it is lost.
    """
    with _lock:
        session = _current
        if session is None or session.pid != os.getpid() or session.owner or not _is_lost(session):
            return False
        from transfer_queue import _ray

        with contextlib.suppress(TransferQueueError):
            close()
        _ray.close()
        return True


def _is_lost(session: Session) -> bool:
    try:
        _calls.run(session.handle, _calls.Call(Op.PARTITIONS, b"", _calls.no_result, timeout=_LEAST_ATTACH_S))
    except UnavailableError:
        return True
    except DeadlineExceededError:  # whoever does not answer may be stopped for a while
        return False
    return False


def _at_exit() -> None:
    """Leave in time: a session that cannot end must not hold up the process."""
    if not _lib.loaded() or not (has_session() or any(other.pid == os.getpid() for other in _others.values())):
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
    for other in list(_others.values()):
        if other.pid == os.getpid():
            with contextlib.suppress(TransferQueueError):
                other.close(join_s=0)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
if "sphinx" not in sys.modules:
    atexit.register(_at_exit)
