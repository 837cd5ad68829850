"""Replacing the sampler of a running session."""

from __future__ import annotations

from typing import Any

from transfer_queue import _calls, _requests, _session

__all__ = ["register_sampler"]


def register_sampler(sampler_or_class: Any, timeout: float | None = None) -> None:
    """Replace the sampler of the session of this process, whoever owns it.

    Nothing that the old sampler remembers is carried over; fetches that wait ask the new one. An object that the core
    does not have is shipped to the owner, with the module it is from when that may not be installed there.

    Args:
        sampler_or_class: a sampler, its class, or the name of its class.
        timeout: seconds.

    Raises:
        InvalidArgumentError: nothing has that name, or the object cannot be pickled (a ValueError).
        WrongTypeError: it is no sampler (a TypeError).

    Example:
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> tq.register_sampler(tq.RankAwareSampler)
        >>> tq.close()
    """
    session = _session.current("register_sampler", timeout)
    _calls.run(session.handle, _requests.register_sampler(session, sampler_or_class, timeout))
