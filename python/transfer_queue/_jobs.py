"""Python work of the session in this process: merge functions of updates, parsers of puts, and samplers.

The core never calls Python. Threads of this module wait in the core for a job, run the user's callable on private
copies of the values, and give the result back. There is always one thread waiting, up to a bound, so a slow callable
holds up only the request it belongs to.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue import _calls, _lib
from transfer_queue._codes import Code
from transfer_queue._sampler_jobs import Samplers

_MOST_THREADS = 64
_PACKAGE = os.path.dirname(__file__) + os.sep
_MERGE, _SAMPLE = 1, 3
_WAIT_MS = 60_000


class Workers:
    """Threads that do the Python work of one session until it ends.

    Args:
        session: its handle.
        sampler: the pickled sampler of the session, None when the core has it.
    """

    def __init__(self, session: int, sampler: bytes | None = None) -> None:
        self._session = session
        self._samplers = Samplers(session)
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._start()
        self._preparing: threading.Thread | None = None
        if sampler is not None:
            prepare = functools.partial(self._samplers.prepare, sampler)
            self._preparing = threading.Thread(target=prepare, name="tq-sampler", daemon=True)
            self._preparing.start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"tq-python-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        self._idle += 1
        thread.start()

    def prepared(self, timeout: float) -> None:
        """Wait until the sampler is loaded, or cannot be."""
        if self._preparing is not None:
            self._preparing.join(timeout)

    def join(self, timeout: float) -> None:
        """Wait for the threads; those that are in a callable of the user are left to end by themselves."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        library = _lib.library()
        job, error = _lib.Job(), _lib.Error()
        while True:
            code = library.tq_job_next(self._session, _WAIT_MS, ctypes.byref(job), ctypes.byref(error))
            if code != Code.OK:
                library.tq_error_release(ctypes.byref(error))
                if code == Code.DEADLINE_EXCEEDED:
                    continue
                return
            with self._lock:
                self._idle -= 1
                if self._idle == 0 and len(self._threads) < _MOST_THREADS:
                    self._start()
            try:
                self._do(library, job)
            finally:
                library.tq_free(job.memory)
                with self._lock:
                    self._idle += 1

    def _do(self, library: _lib.Library, job: _lib.Job) -> None:
        error = _lib.Error()
        try:
            packed = self._samplers.answer(job) if job.kind == _SAMPLE else _result(job)
        except BaseException as raised:
            text = _explained(raised).encode(errors="replace")
            kind = self._samplers.code_of(raised) if job.kind == _SAMPLE else Code.FAILED
            code = library.tq_job_fail(self._session, job.job, kind, text, len(text), ctypes.byref(error))
        else:
            code = library.tq_job_done(
                self._session, job.job, packed.address, len(packed), job.rows, ctypes.byref(error)
            )
        if code != Code.OK:
            library.tq_error_release(ctypes.byref(error))  # the one who asked has been told, or is gone


def _text(error: BaseException) -> str:
    """What an error of the user says, also when it cannot say it."""
    try:
        return str(error)
    except BaseException as worse:
        return f"(its text cannot be had: {type(worse).__name__})"


def _explained(raised: BaseException) -> str:
    """Text for the caller: what failed, and where in the user's code."""
    cause = raised.__cause__
    if cause is not None:
        frames = [at for at in traceback.extract_tb(cause.__traceback__) if not at.filename.startswith(_PACKAGE)]
        where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
        return f"{_text(raised)}: {type(cause).__name__}: {_text(cause)}{where}"
    if isinstance(raised, TypeError | ValueError):
        return _text(raised)
    return f"{type(raised).__name__}: {_text(raised)}"


def _load(pickled: bytes) -> Any:
    """The user's callable, made anew for every job so that no state of it is carried over."""
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise RuntimeError("the callable cannot be loaded where the data is stored") from error


def _result(job: _lib.Job) -> Any:
    from transfer_queue import _columns, _results  # imports torch, which a daemon needs only now

    function = _load(ctypes.string_at(job.callable, job.callable_size))
    _partition, fields, keys, *_ = _calls.decode(ctypes.string_at(job.body, job.body_size))
    names: list[str] = _calls.decode(fields)
    labels: list[str] | None = _calls.decode(keys) if keys is not None else None
    columns = _results.read_columns(job.columns, job.n_columns)
    rows: int = job.rows
    if job.kind != _MERGE:
        parsed = {name: _results.parser_input(name, c, rows) for name, c in zip(names, columns, strict=True)}
        return _parse(_columns.parse_columns, function, parsed, rows)
    values = [_results.job_values(name, column, rows) for name, column in zip(names, columns, strict=True)]
    return _merge(_columns.merge_columns, function, names, values, labels)


def _parse(parse_columns: Callable[..., Any], function: Any, columns: dict[str, Any], rows: int) -> Any:
    def called(given: dict[str, Any]) -> Any:
        try:
            return function(given)
        except BaseException as error:  # SystemExit too must not end this thread
            raise RuntimeError("data_parser failed") from error

    return parse_columns(called, columns, rows)


def _merge(
    merge_columns: Callable[..., Any],
    function: Any,
    fields: Sequence[str],
    values: Sequence[list[Any]],
    keys: Sequence[str] | None,
) -> Any:
    def what(field: str, row: int) -> str:
        name = f"key {keys[row]!r}" if keys is not None else f"row {row}"
        return f"merge_fn failed for {name}, field {field!r}"

    half = len(fields) // 2
    return merge_columns(function, list(fields[:half]), values[:half], values[half:], what)
