"""The shared library of the core: loading it, its C signatures, and what happens to it in a forked child.

The Go runtime inside the library does not survive ``fork()``. The library is therefore loaded on first use, and a
forked child that uses the queue loads a private copy of it: a memory file under a fresh name, made from the descriptor
that the parent kept open, so that it is the very library the parent runs even if the file was rebuilt. Before a fork
the descriptors of the library are noted, and the child closes them, so that the end of the parent is still seen as the
end of its connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from transfer_queue._codes import Code
from transfer_queue.errors import InternalError, from_code

ABI_VERSION = 2

u8, u32, u64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
i32, i64 = ctypes.c_int32, ctypes.c_int64
pointer = ctypes.c_void_p


class Error(ctypes.Structure):
    _fields_ = [("op", ctypes.c_char_p), ("message", ctypes.c_char_p)]


class Bytes(ctypes.Structure):
    _fields_ = [("data", pointer), ("size", u64)]


class Completion(ctypes.Structure):
    _fields_ = [
        ("ticket", u64),
        ("code", i32),
        ("n_columns", u32),
        ("rows", u64),
        ("body", pointer),
        ("body_size", u64),
        ("columns", pointer),
        ("memory", pointer),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        ("job", u64),
        ("kind", u32),
        ("n_columns", u32),
        ("rows", u64),
        ("callable", pointer),
        ("callable_size", u64),
        ("body", pointer),
        ("body_size", u64),
        ("columns", pointer),
        ("memory", pointer),
    ]


_ERROR = ctypes.POINTER(Error)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tq_abi_version": (u32, []),
    "tq_free": (None, [pointer]),
    "tq_error_release": (None, [_ERROR]),
    "tq_session_open": (i32, [ctypes.c_char_p, u64, ctypes.POINTER(u64), ctypes.POINTER(Bytes), _ERROR]),
    "tq_session_abort": (i32, [u64]),
    "tq_session_close": (i32, [u64, i64, _ERROR]),
    "tq_queue_open": (i32, [ctypes.POINTER(u64), ctypes.POINTER(i32), _ERROR]),
    "tq_queue_close": (i32, [u64, _ERROR]),
    "tq_submit": (
        i32,
        [
            *[u64, u64, u32, u32, ctypes.c_char_p, u64, pointer, u32, u64, i64],
            *[ctypes.POINTER(u64), ctypes.POINTER(i32), _ERROR],
        ],
    ),
    "tq_cancel": (i32, [u64, u64, _ERROR]),
    "tq_reap": (i32, [u64, ctypes.POINTER(Completion), u32, ctypes.POINTER(u32), _ERROR]),
    "tq_release": (i32, [u64]),
    "tq_job_next": (i32, [u64, i64, ctypes.POINTER(Job), _ERROR]),
    "tq_job_done": (i32, [u64, u64, pointer, u32, u64, _ERROR]),
    "tq_job_fail": (i32, [u64, u64, i32, ctypes.c_char_p, u64, _ERROR]),
    "tq_descriptors": (i32, [ctypes.POINTER(i32), u32, ctypes.POINTER(u32)]),
    "tq_counters": (i32, [u64, ctypes.POINTER(Bytes), _ERROR]),
    "tq_panic_for_test": (i32, [u32, _ERROR]),
}

_PATH = Path(__file__).with_name("_core.so")


class Library:
    """The loaded library of this process; its functions are attributes."""

    def __init__(self, path: str) -> None:
        cdll = ctypes.CDLL(path)
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(cdll, name)
            function.restype, function.argtypes = restype, argtypes
            setattr(self, name, function)
        if (found := cdll.tq_abi_version()) != ABI_VERSION:
            raise InternalError(f"library {_PATH} has ABI version {found}, want {ABI_VERSION}: reinstall TransferQueue")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def check(self, code: int, error: Error, name: str = "") -> None:
        """Raise what a call reported, of the operation of a name if there is one."""
        if code == Code.OK:
            return
        message = (error.message or b"").decode(errors="replace")
        op = (error.op or b"").decode(errors="replace")
        self.tq_error_release(ctypes.byref(error))
        raise from_code(code, message, name or op)


_lock = threading.RLock()
_library: Library | None = None
_source = -1  # descriptor of the library file that this process, or the one it was forked from, has loaded
_inherited = False  # the process was forked from one that had loaded the library
_noted: list[int] = []


def library() -> Library:
    """The library of this process, loaded on first use."""
    return _library or _load()


def loaded() -> bool:
    """Whether this process has loaded the library."""
    return _library is not None


def _load() -> Library:
    global _library, _source
    with _lock:
        if _library is None:
            if _source < 0:
                _source = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
            _library = _private_copy() if _inherited else Library(str(_PATH))
        return _library


def _private_copy() -> Library:
    """The library, from a copy under a name that the loader does not know yet."""
    try:
        target = os.memfd_create(f"tq-core-{os.getpid()}", os.MFD_CLOEXEC)
        try:
            _copy_to(target)
            return Library(f"/proc/{os.getpid()}/fd/{target}")
        finally:
            os.close(target)
    except OSError:  # no memory files, or none that may be executed
        target, path = tempfile.mkstemp(prefix="tq-core-", suffix=".so")
        try:
            _copy_to(target)
            return Library(path)
        finally:
            os.close(target)
            os.unlink(path)


def _copy_to(target: int) -> None:
    size, at = os.fstat(_source).st_size, 0
    while at < size:
        at += os.sendfile(target, _source, at, size - at)


def _before_fork() -> None:
    # A thread that is loading the library holds locks of the loader, which the child would never get.
    _lock.acquire()
    _noted.clear()
    if _library is not None:
        count, capacity = u32(), 1024
        while _library.tq_descriptors(room := (i32 * capacity)(), capacity, ctypes.byref(count)) == Code.OK:
            if count.value <= capacity:
                _noted.extend(room[: count.value])
                break
            capacity = 2 * count.value


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _library, _inherited, _lock
    _lock = threading.RLock()
    if _library is not None:
        _library, _inherited = None, True
    for descriptor in _noted:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _noted.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
