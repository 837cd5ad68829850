"""Storage units of this host in a session of another one: ``python -m transfer_queue serve --join``."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Collection
from typing import Any

from transfer_queue import _calls, _controller_requests, _remote, _session
from transfer_queue._unit import UnitHost, limits
from transfer_queue.errors import AlreadyExistsError, TransferQueueError, UnavailableError

_LOOK_S = 2.0  # how often the units look whether they still are in the session


class JoinedUnits:
    """Units that this process hosts and that are part of a session elsewhere for as long as it lives.

    They listen at the address of this host that faces the controller, unless another one is given. A controller that is
    started again, or has given a unit up because the network was away, is joined again.

    Args:
        address: ``tcp://HOST:PORT`` of the session.
        count: number of units.
        name: what their names begin with; by default that of this host.
        conf: complete configuration; limits and disk are its own, or those of the session where ``given`` has none.
        given: the section ``backend.SimpleStorage`` that was given for these units.
        listen: ``tcp://HOST:PORT`` of the first unit; the others take free ports.

    Raises:
        UnavailableError: the session is not there (a ConnectionError).
        AlreadyExistsError: a port is taken, or a name.
    """

    def __init__(
        self,
        address: str,
        count: int,
        name: str,
        conf: Any,
        given: dict[str, Any],
        listen: str = "",
        payload_port: int = 0,
    ) -> None:
        self.hosts: list[UnitHost] = []
        facing = _remote.facing(address)
        listen = listen or _at(facing)
        os.environ["TQ_ADDRESS"] = address
        self._session = _session.open_session(conf, "attach")
        self._failed = ""
        storage = {**(self._session.config.get("backend") or {}).get("SimpleStorage", {}), **given}
        memory, samples = limits(storage)
        security = "curve" if b" " in _remote.token(conf["namespace"]) else ""  # it has a key
        try:
            for rank in range(count):
                at, port = (listen, payload_port) if rank == 0 else (_at(_host(listen)), 0)
                unit = f"{name or socket.gethostname()}-{rank}"
                host = UnitHost(unit, memory, samples, conf["namespace"], storage, at, port, security)
                self.hosts.append(host)
                if host.address.ip in ("0.0.0.0", "::"):
                    host.address.ip = facing
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> str:
        """Identity of the session."""
        return self._session.id

    def _join(self) -> None:
        units = [host.address for host in self.hosts]
        _calls.run(self._session.handle, _controller_requests.join_units(units, self._session.timeout_s))

    def keep(self, until: Collection[signal.Signals]) -> None:
        """Stay in the session until one of these signals, which must be blocked, arrives."""
        while signal.sigtimedwait(until, _LOOK_S) is None:
            try:
                self._join()
                self._tell("", "the units are part of the session again")
            except (UnavailableError, AlreadyExistsError) as error:
                self._tell(str(error), f"the units are not part of the session: {error}")

    def _tell(self, failed: str, text: str) -> None:
        if failed != self._failed:
            self._failed = failed
            logging.getLogger(__name__).warning("%s", text)

    def close(self) -> None:
        """End the units. What they hold is lost."""
        for host in self.hosts:
            try:
                host.close()
            except TransferQueueError as error:
                logging.getLogger(__name__).warning("%s: %s", host.address.id, error)
        _session.close()


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _at(host: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
