"""Calls into the core: one request in, one result out, waited for by a thread or by an event loop.

A request is submitted to a completion queue that has an eventfd. A thread waits in ``os.read`` on it, so Ctrl-C answers
at once; an event loop watches it. A queue belongs to one waiting thread, or to one loop while that has requests in
flight, and then goes back to a free list: neither descriptors nor threads grow with calls, loops or threads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import itertools
import os
import select
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Generic, TypeVar

import msgspec

from transfer_queue import _lib
from transfer_queue._codes import Code
from transfer_queue._ops import Op
from transfer_queue.errors import ResourceExhaustedError, TransferQueueError, from_code

T = TypeVar("T")

_REAP = 16
_WAITS = 4  # TQ_WAITS: the caller waits for this request alone
_TOKENS = Struct("=24xQ16xQ40x")  # token and offsets_token of a tq_result_column
_DECODER = msgspec.msgpack.Decoder()

decode = _DECODER.decode
encode = msgspec.msgpack.Encoder().encode


def encode_ints(numbers: Iterable[int]) -> bytes:
    """A list of integers as it crosses: little-endian int64."""
    return array("q", numbers).tobytes()


def decode_ints(raw: bytes | None) -> list[int]:
    """The numbers of `encode_ints`; None is an empty list."""
    return array("q", raw or b"").tolist()


class Reply:
    """A finished request. ``columns`` and what they point to are valid only while the reply is decoded."""

    __slots__ = ("body", "columns", "n_columns", "rows")

    def __init__(self, completion: _lib.Completion) -> None:
        self.body = ctypes.string_at(completion.body, completion.body_size) if completion.body else b""
        self.columns: int = completion.columns or 0
        self.n_columns: int = completion.n_columns
        self.rows: int = completion.rows


def no_result(_: Reply) -> None:
    """Decoder of replies without a content."""


@dataclass(slots=True)
class Call(Generic[T]):
    """A request: what to send, and how to read the answer.

    Args:
        op: number of the request.
        body: msgpack request.
        decode: makes the result from the reply.
        columns: address of an array of column structs, 0 for none.
        keep: whatever must live until the request is submitted.
        timeout: seconds.
        name: the operation as its caller knows it, which errors name; ``""``: as the core does.
    """

    op: Op
    body: bytes
    decode: Callable[[Reply], T]
    columns: int = 0
    n_columns: int = 0
    rows: int = 0
    flags: int = 0
    timeout: float = 0.0
    name: str = ""
    keep: Any = field(default=None, repr=False)


class Queue:
    """A completion queue of the core."""

    __slots__ = ("_completions", "_count", "_handle", "_library", "_ticket", "_wait_fd", "fd", "handle", "pid")

    def __init__(self, library: _lib.Library) -> None:
        # In this order, so that a queue that a signal handler cuts short is closed all the same.
        self.pid, self._library, self._handle = os.getpid(), library, _lib.u64()
        fd, error = _lib.i32(), _lib.Error()
        library.check(library.tq_queue_open(ctypes.byref(self._handle), ctypes.byref(fd), ctypes.byref(error)), error)
        self.handle, self.fd = self._handle.value, fd.value
        self._completions = (_lib.Completion * _REAP)()
        self._count, self._ticket, self._wait_fd = _lib.u32(), _lib.u64(), _lib.i32()

    def submit(self, session: int, call: Call[Any], flags: int = 0) -> int:
        """Start a request and return its ticket."""
        error = _lib.Error()
        code = self._library.tq_submit(
            session,
            self.handle,
            call.op,
            call.flags | flags,
            call.body,
            len(call.body),
            call.columns,
            call.n_columns,
            call.rows,
            max(1, int(call.timeout * 1000)),
            self._ticket,
            self._wait_fd,
            error,
        )
        if code:
            self._library.check(code, error, call.name)
        return self._ticket.value

    def wait(self) -> None:
        """Wait for the request that was submitted with ``_WAITS``, or for a part of it.

        A second wait is for one that goes on by itself, because the descriptor it was waited for at has ended.
        """
        fd = self._wait_fd.value
        if fd != self.fd:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.register(self.fd, select.POLLIN)  # a panic of the library shows here
            if all(ready != self.fd for ready, _ in poller.poll()):
                self._wait_fd.value = self.fd
                return
        os.read(self.fd, 8)

    def cancel(self, ticket: int) -> None:
        """Ask for the early end of a request; one that cannot be cancelled has ended or never will."""
        error = _lib.Error()
        if self._library.tq_cancel(self.handle, ticket, ctypes.byref(error)):
            self._library.tq_error_release(ctypes.byref(error))

    def reap(self, finish: Callable[[_lib.Completion], None]) -> None:
        """Hand every completion that waits to ``finish``, then free it.

        When an error comes out of ``finish``, or a signal handler raises anywhere here, the rest is given back.
        """
        error = _lib.Error()
        self._count.value = 0
        try:
            code = self._library.tq_reap(self.handle, self._completions, _REAP, self._count, error)
            if code:
                self._library.check(code, error)
            for i in range(self._count.value):
                finish(self._completions[i])
                self._free(self._completions[i])
        except BaseException:
            for i in range(self._count.value):
                self._discard(self._completions[i])
            raise

    def _free(self, completion: _lib.Completion) -> None:
        memory, completion.memory = completion.memory, None
        self._library.tq_free(memory)

    def _discard(self, completion: _lib.Completion) -> None:
        """Free a completion and what its columns hold. A token that was given back already does nothing."""
        if completion.memory:
            raw = ctypes.string_at(completion.columns or 0, _TOKENS.size * completion.n_columns)
            for token in itertools.chain.from_iterable(_TOKENS.iter_unpack(raw)):
                self._library.tq_release(token)
            self._free(completion)

    def close(self, getpid: Callable[[], int] = os.getpid) -> None:
        """End all its requests. A library that is out of use has no queues to close."""
        if self.pid == getpid() and self._handle.value:
            handle, self._handle.value = self._handle.value, 0
            self._library.tq_queue_close(handle, None)

    def __del__(self) -> None:
        # One that is neither free nor closed was dropped by a signal handler that raised.
        self.close()


# Ends of a deque may be used from any thread.
_free: collections.deque[Queue] = collections.deque()


def _take() -> Queue:
    library = _lib.library()
    while True:
        try:
            queue = _free.pop()
        except IndexError:
            return Queue(library)
        if queue.pid == os.getpid():
            return queue


def forget() -> None:
    """Drop the queues of another process, after a fork."""
    _free.clear()
    _bound.clear()


def result_of(completion: _lib.Completion, call: Call[T]) -> T:
    """The result of a completion, or its error raised."""
    reply = Reply(completion)
    if completion.code == Code.OK:
        return call.decode(reply)
    op, message = decode(reply.body) if reply.body else ("", "no reason given")
    raise from_code(completion.code, message, call.name or op)


def run(session: int, call: Call[T]) -> T:
    """Send a request and wait for its result.

    A write that found no room is sent once more when the garbage collector finds results in cycles, which may be views
    that keep the memory of cleared samples.
    """
    try:
        return _run(session, call)
    except ResourceExhaustedError:
        if not (call.columns and _found_results()):
            raise
    return _run(session, call)


def _found_results() -> bool:
    before = counters()["results_held"]
    gc.collect()
    return counters()["results_held"] < before


def _run(session: int, call: Call[T]) -> T:
    queue = _take()
    result: list[T] = []
    waiting = True  # from before the submit: a signal handler may raise between any two lines

    def finish(completion: _lib.Completion) -> None:
        nonlocal waiting
        waiting = False
        result.append(result_of(completion, call))

    try:
        try:
            queue.submit(session, call, _WAITS)
        except TransferQueueError:
            waiting = False
            raise
        while waiting:
            queue.wait()
            queue.reap(finish)
    finally:
        if waiting:
            queue.close()  # this ends the request
        else:
            _free.append(queue)
    return result[0]


class _Loop:
    """The queue of an event loop while requests of it are in flight."""

    __slots__ = ("loop", "queue", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.queue = loop, _take()
        self.waiting: dict[int, tuple[asyncio.Future[Any], Call[Any]]] = {}
        loop.add_reader(self.queue.fd, self._ready)

    def _ready(self) -> None:
        os.read(self.queue.fd, 8)
        try:
            self.queue.reap(self._finish)
        except TransferQueueError as error:
            self._fail(error)
        self.rest()

    def _fail(self, error: TransferQueueError) -> None:
        """The library is out of use: nothing will be answered any more."""
        waiting, self.waiting = self.waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)

    def _finish(self, completion: _lib.Completion) -> None:
        future, call = self.waiting.pop(completion.ticket)
        try:
            result = result_of(completion, call)
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def rest(self) -> None:
        """Give the queue back when nothing is in flight."""
        if not self.waiting and _bound.get(id(self.loop)) is self:
            self._leave()
            _free.append(self.queue)

    def _leave(self) -> None:
        del _bound[id(self.loop)]
        self.loop.remove_reader(self.queue.fd)

    def abandon(self, ticket: int) -> None:
        """Cancel a request whose caller has gone. Its completion is not waited for when it was the only one."""
        if ticket not in self.waiting:
            return
        self.queue.cancel(ticket)
        if all(future.done() for future, _ in self.waiting.values()):
            self.waiting.clear()
            self._leave()
            self.queue.close()


_bound: dict[int, _Loop] = {}


def _bind(loop: asyncio.AbstractEventLoop) -> _Loop:
    """The queue of a loop, made when it has none; those of loops that were closed meanwhile are dropped."""
    bound = _bound.get(id(loop))
    if bound is not None and bound.queue.pid == os.getpid():
        return bound
    for key, other in list(_bound.items()):
        if other.loop.is_closed() and _bound.pop(key, None) is other:
            other.queue.close()
    bound = _bound[id(loop)] = _Loop(loop)
    return bound


async def run_async(session: int, call: Call[T]) -> T:
    """Send a request and await its result.

    Cancelling the coroutine cancels the request, and is over when the request is: what was cancelled does not happen
    behind the caller's back. A second cancellation does not wait for that.
    """
    loop = asyncio.get_running_loop()
    bound = _bind(loop)
    future: asyncio.Future[T] = loop.create_future()
    try:
        ticket = bound.queue.submit(session, call)
    except BaseException:
        bound.rest()
        raise
    bound.waiting[ticket] = (future, call)
    call.keep = None
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        bound.queue.cancel(ticket)
        try:
            with contextlib.suppress(Exception):
                await asyncio.shield(future)
        except asyncio.CancelledError:
            future.cancel()
            bound.abandon(ticket)
        raise


def counters(session: int = 0) -> dict[str, int]:
    """Counters of the core in this process."""
    library, out, error = _lib.library(), _lib.Bytes(), _lib.Error()
    library.check(library.tq_counters(session, ctypes.byref(out), ctypes.byref(error)), error)
    try:
        counted: dict[str, int] = decode(ctypes.string_at(out.data, out.size))
        return counted
    finally:
        library.tq_free(out.data)


os.register_at_fork(after_in_child=forget)
