"""The metrics page of a session: a small HTTP server in the process that owns it.

Whatever goes wrong here is the scraper's trouble only: requests of the queue never wait for it and never fail by it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transfer_queue import _calls
from transfer_queue._controller_requests import packed_config, store_config
from transfer_queue._ops import Op
from transfer_queue.errors import InvalidArgumentError, InvalidStateError, NotInitializedError

if TYPE_CHECKING:
    from transfer_queue._session import Session

_SCRAPE_S = 10.0  # for the answer of the core, and for a scraper that does not read
_MOST_SCRAPES = 16  # at a time; more are turned away
_OTHERS_S = 2.0  # how long a taken port may be that of a session which is about to be published
_LOOPBACK = "127.0.0.1"
_WILDCARDS = ("0.0.0.0", "::")


class Page:
    """A port that is bound, and from `serve` on the metrics of a session behind it.

    Attributes:
        endpoint: ``host:port`` for scrapers.

    Raises:
        InvalidArgumentError: host or port cannot be used (a ValueError).
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = _listener(host, port)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(_MOST_SCRAPES)
        self._session, self._ssd_offload = 0, False
        shown = _own_address(self._listener.family) if host in _WILDCARDS else host
        bound = self._listener.getsockname()[1]
        self.endpoint = f"[{shown}]:{bound}" if ":" in shown else f"{shown}:{bound}"
        _pages.add(self)

    def serve(self, session: int, ssd_offload: bool = False) -> None:
        """Answer scrapers with the metrics of a session of the core."""
        self._session, self._ssd_offload = session, ssd_offload
        self._thread = threading.Thread(target=self._run, name="tq-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SCRAPE_S)
        self._listener.close()

    def forget(self) -> None:
        """Close the port in a forked child, which does not serve."""
        self._closing.set()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._closing.wait(0.1)  # no descriptors left, or the end
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), name="metrics-scrape", daemon=True).start()
            except RuntimeError:  # no more threads
                self._slots.release()
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            from transfer_queue._metrics_http import answer

            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SCRAPE_S)
                answer(connection, self.text)
        finally:
            self._slots.release()

    def text(self) -> bytes:
        """The page as it is now."""
        from transfer_queue._metrics_text import render

        call = _calls.Call(Op.METRICS, b"", lambda reply: reply.body, timeout=_SCRAPE_S)
        return render(_calls.run(self._session, call), self._ssd_offload)


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InvalidArgumentError(f"config: metrics.host: got {host!r}: {error.strerror or error}", "init") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_MOST_SCRAPES)
    except OSError as error:
        listener.close()
        key = "metrics.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "metrics.host"
        text = f"config: {key}: cannot listen on port {port} of {host}: {error.strerror}"
        raise InvalidArgumentError(text, "init") from error
    return listener


def _own_address(family: socket.AddressFamily) -> str:
    """An address of this host that others can reach; no packet is sent to find it."""
    target = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:  # a host without a network
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


_pages: weakref.WeakSet[Page] = weakref.WeakSet()


def _forget_pages() -> None:
    for page in list(_pages):
        page.forget()


os.register_at_fork(after_in_child=_forget_pages)


def opened(conf: Any, options: dict[str, Any], open_session: Callable[[dict[str, Any]], Session]) -> Session:
    """Open a session, with its page when the configuration asks for one and this process becomes the owner.

    The port is bound before the session is published, so nobody ever attaches to one whose endpoint is not known. When
    the port is taken, that may be by the owner of the session that this process is about to join.

    Args:
        conf: the configuration; gets ``metrics.endpoint``.
        options: of the core; the configuration in them is replaced.
        open_session: opens a session with options of the core.
    """
    metrics = conf.get("metrics") or {}
    if not metrics.get("enabled") or options["mode"] == "attach":
        return open_session(options)
    deadline = time.monotonic() + _OTHERS_S
    while True:
        try:
            page = Page(metrics.get("host") or _LOOPBACK, metrics["port"])
            break
        except InvalidArgumentError:
            if options["mode"] == "own":
                raise
            with contextlib.suppress(NotInitializedError):
                return open_session({**options, "mode": "attach"})
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        metrics["endpoint"] = page.endpoint
        session = open_session({**options, "config": packed_config(conf)})
        if session.owner:
            _start(session, page)
    except BaseException:
        page.close()
        raise
    if not session.owner:
        page.close()
    return session


def start_metrics(session: Session, port: int = 0, host: str | None = None) -> str:
    """Serve the metrics of a session that this process owns, and tell processes that attach from now on.

    Args:
        session: the session.
        port: 0 for any free one.
        host: address to listen on, by default ``metrics.host`` of the configuration.

    Returns:
        ``host:port``; that of the page that is there when the session has one.

    Raises:
        InvalidStateError: the session is another process's.
        InvalidArgumentError: host or port cannot be used (a ValueError).
    """
    if not session.owner or session.pid != os.getpid():
        raise InvalidStateError("only the process that owns the session serves its metrics", "start_metrics")
    with _starting:
        if session.page is not None:
            return session.page.endpoint
        if not isinstance(session.config.get("metrics"), Mapping):
            session.config["metrics"] = {}
        metrics = session.config["metrics"]
        page = Page(host or metrics.get("host") or _LOOPBACK, port)
        try:
            metrics.update(enabled=True, endpoint=page.endpoint)
            _calls.run(session.handle, store_config(session.config, session.timeout_s))
            _start(session, page)
        except BaseException:
            metrics.pop("endpoint", None)
            page.close()
            raise
        return page.endpoint


_starting = threading.Lock()


def _start(session: Session, page: Page) -> None:
    storage = (session.config.get("backend") or {}).get("SimpleStorage") or {}
    page.serve(session.handle, bool((storage.get("ssd_offload") or {}).get("enabled")))
    session.page = page
