"""Answers one scraper: ``GET /metrics``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from transfer_queue._metrics_text import CONTENT_TYPE
from transfer_queue.errors import TransferQueueError


class _Scrape(BaseHTTPRequestHandler):
    server_version, sys_version = "TransferQueue", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._reply(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
            return
        try:
            page = cast("Callable[[], bytes]", self.server)()
        except TransferQueueError as error:
            self._reply(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="replace"))
        else:
            self._reply(HTTPStatus.OK, page, CONTENT_TYPE)

    do_HEAD = do_GET

    def _reply(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Scrapes are nothing to write home about."""


def answer(connection: socket.socket, page: Callable[[], bytes]) -> None:
    """Read a request and reply with the page. OSError when the scraper goes away or takes too long."""
    _Scrape(connection, connection.getpeername(), cast("Any", page))
