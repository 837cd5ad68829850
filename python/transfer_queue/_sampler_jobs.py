"""Calls of samplers that Python runs, in the process that owns the session.

An object is loaded once and keeps its state. The core makes one call at a time; a call that it has given up may still
run while the next one is made. Bodies are arrays in the order of the structs of core/sampler/python.go.
"""

from __future__ import annotations

import ctypes
import operator
import pickle
import threading
from typing import Any

import msgspec

from transfer_queue import _calls, _lib, _plain
from transfer_queue._codes import Code
from transfer_queue._ops import Op
from transfer_queue.errors import NotFoundError
from transfer_queue.sampler.partition import Partition
from transfer_queue.sampler.streaming_token_budget_sampler import StreamingTokenBudgetSampler

_MOST_HUNG = 8  # calls of one sampler that run at a time, all but one of them given up


class Samplers:
    """The samplers of one session that were called here."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}
        self._prepared: tuple[bytes, Any] | None = None

    def prepare(self, pickled: bytes) -> None:
        """Load a sampler and what calls need ahead of the first call, whose caller would have to wait for imports."""
        from transfer_queue import _columns, _requests  # noqa: F401

        try:
            loaded = pickle.loads(pickled)
        except Exception:
            return  # the first call fails with the reason
        with self._lock:
            self._prepared = pickled, loaded

    def answer(self, job: _lib.Job) -> Any:
        """Make the call of a job; its result is one object of bytes."""
        from transfer_queue._columns import pack_row  # imports torch, which a daemon needs only now

        body = _calls.decode(ctypes.string_at(job.body, job.body_size))[3]
        call = _Call(*_calls.decode(body))
        loaded = self._of(call.sampler, ctypes.string_at(job.callable, job.callable_size))
        with loaded:
            return pack_row({"answer": loaded.run(call, self._session)})

    def _of(self, number: int, pickled: bytes) -> _Loaded:
        with self._lock:
            if number not in self._loaded:
                ready, self._prepared = self._prepared, None
                fresh = _Loaded(ready[1] if ready and ready[0] == pickled else pickle.loads(pickled))
                self._loaded = {known: other for known, other in self._loaded.items() if known > number}
                self._loaded[number] = fresh
            return self._loaded[number]

    @staticmethod
    def code_of(raised: BaseException) -> Code:
        """The code of an error that a sampler raised: a ValueError stays one."""
        return Code.INVALID_ARGUMENT if isinstance(raised, ValueError) else Code.FAILED


class _Call(msgspec.Struct):
    """One call, in the order of the core's struct."""

    sampler: int
    method: str
    partition: str
    task: str
    size: int
    sampling: bytes | None
    ready: bytes | None
    births: bytes | None
    final: bool
    state: bytes | None
    limit_ms: int
    news: list[Any] | None

    def indexes(self) -> list[int]:
        return _calls.decode_ints(self.ready)

    def put_order(self) -> dict[int, int] | None:
        if self.births is None:
            return None
        return dict(zip(self.indexes(), _calls.decode_ints(self.births), strict=True))


class _Loaded:
    """A sampler with what it was told; as a context, one call of it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._told = 0
        self._lock = threading.Lock()
        self._running = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._running >= _MOST_HUNG:
                raise RuntimeError(f"{self._running} earlier calls of it have not ended")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1

    def run(self, call: _Call, session: int) -> bytes:
        for number, partition, gone, cleared, reset in call.news or ():
            if number > self._told:
                self._told = number
                self._tell(partition, gone, _calls.decode_ints(cleared), _calls.decode(reset) if reset else [])
        if call.method == "save":
            return _answer(state=_plain.pack(self.sampler.save_checkpoint(), "the state of the sampler"))
        if call.method == "load":
            self.sampler.load_checkpoint(_plain.unpack(call.state or b""))
            return _answer()
        return self._sample(call, session)

    def _tell(self, partition: str, gone: bool, cleared: list[int], reset: list[str]) -> None:
        if gone:
            self.sampler.clear_cache(partition)
        for task in reset:
            self.sampler.consumption_reset(partition, task or None)
        if cleared:
            self.sampler.samples_cleared(partition, cleared)

    def _sample(self, call: _Call, session: int) -> bytes:
        from transfer_queue._requests import decode_sampling

        ready = call.indexes()
        config = decode_sampling(call.sampling)
        remembered = bool(self.sampler.has_cached_result(call.partition, call.task, config))
        streams = isinstance(self.sampler, StreamingTokenBudgetSampler) and config.get("token_budget") is not None
        if not (remembered or streams or len(ready) >= call.size):
            return _answer()
        reader = _Reader(session, call.limit_ms / 1000)
        seen = Partition(call.partition, call.final, call.put_order(), reader)
        picked = self.sampler(ready, call.size, partition=seen, **config)
        try:
            sampled, consumed = picked
        except (TypeError, ValueError):
            raise TypeError(f"it returned a {type(picked).__name__}, want two lists: sampled and consumed") from None
        ended = streams and not len(sampled) and self._ended(call, config)
        return _answer(remembered, _indexes("sampled", sampled), _indexes("consumed", consumed), ended)

    def _ended(self, call: _Call, config: dict[str, Any]) -> bool:
        partition, task = config.get("partition_id", ""), config.get("task_name", "")
        ended: bool = self.sampler.is_end(partition, task, config.get("dp_rank"), config.get("batch_index"))
        return ended


def _indexes(what: str, listed: Any) -> bytes:
    try:
        return _calls.encode_ints(map(operator.index, listed))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"it returned {what} indexes that are no list of whole numbers: {error}") from None


def _answer(
    remembered: bool = False, sampled: bytes = b"", consumed: bytes = b"", end: bool = False, state: bytes | None = None
) -> bytes:
    return _calls.encode([remembered, sampled, consumed, end, state])


class _Reader:
    """Reads from the session for a sampler."""

    def __init__(self, session: int, timeout: float) -> None:
        self._session, self._timeout = session, timeout

    def __call__(self, what: str, about: Any) -> Any:
        from transfer_queue import _requests

        if what == "tags":
            body = _calls.encode([about, "force_fetch", _calls.encode([]), 0, "", None])
            call: _calls.Call[Any] = _calls.Call(Op.META, body, _requests.tags_by_index, timeout=self._timeout)
            try:
                return _calls.run(self._session, call)
            except NotFoundError:  # cleared meanwhile
                return {}
        from transfer_queue import _partition_snapshot

        known = _calls.run(self._session, _partition_snapshot.snapshot(about, self._timeout))
        return _partition_snapshot.empty(about) if known is None else known
