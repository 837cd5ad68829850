"""A storage unit as a daemon: it joins the session of its namespace on this host, and joins again when it has to."""

from __future__ import annotations

import signal
from collections.abc import Set
from typing import Any

from transfer_queue import _calls, _session
from transfer_queue._controller_requests import join_units
from transfer_queue._unit import UnitHost, limits
from transfer_queue.errors import TransferQueueError

_AGAIN_S = 1.0  # how often it makes sure that the session has it


class JoiningUnit:
    """A unit of the running session that goes on when the session's controller is gone, and joins the next.

    Args:
        conf: configuration that says where to look for the session; what the unit is like is up to the session's.
        name: what listings call it, and under which it finds what it has left on a durable disk.
        memory_limit_bytes: instead of the session's; None for that.

    Raises:
        NotInitializedError: no session runs.
        AlreadyExistsError: the session has another unit of that name, or the disk holds values of another session.
    """

    def __init__(self, conf: Any, name: str, memory_limit_bytes: int | None = None) -> None:
        self._conf = conf
        session = _session.open_session(conf, "attach")
        storage = session.config["backend"]["SimpleStorage"] or {}
        memory, samples = limits(storage)
        memory = memory if memory_limit_bytes is None else memory_limit_bytes
        self.host = UnitHost(name, memory, samples, conf["namespace"], storage)
        try:
            self._join(session)
        except BaseException:
            self.host.close()
            raise
        self.session = session.id

    def _join(self, session: _session.Session) -> None:
        _calls.run(session.handle, join_units([self.host.address], session.timeout_s))

    def run(self, ends: Set[signal.Signals]) -> None:
        """Serve until one of the signals, which are blocked, arrives."""
        there = True
        while signal.sigtimedwait(ends, _AGAIN_S) is None:
            try:
                self._join(_session.open_session(self._conf, "attach"))
            except TransferQueueError as error:
                if there:
                    print(f"waiting for the session: {error}", flush=True)
                _session.close()
                there = False
                continue
            if not there:
                print("joined again", flush=True)
            there = True

    def close(self) -> None:
        """End the unit. What a durable one has on disk stays there."""
        _session.close()
        self.host.close()
