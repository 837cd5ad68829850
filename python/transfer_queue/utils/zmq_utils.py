"""Addresses of the parts of a session, under the names that programs of the peer package use.

A session of this package speaks its own protocol; `ZMQMessage` and `ZMQRequestType` exist for programs that name them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transfer_queue.utils.enum_utils import Role

__all__ = ["Role", "ZMQMessage", "ZMQRequestType", "ZMQServerInfo", "process_zmq_server_info"]


class ZMQServerInfo:
    """Address of a controller or a unit. It is a plain value that pickles, and whoever has it may join the session.

    Args:
        role: what listens there.
        id: its name.
        ip: host.
        ports: name of a port -> number; empty for an address on this host.
        socket: path of its unix socket.
        secret: what a client must show.
        session: identity of the session.
        pid: process that listens.
        machine: where the socket can be reached; see ``TQ_HOST_ID`` in docs/environment.md.
        token: what a client of another host must show at a port.
        key: public key of what listens there, when it encrypts.
    """

    def __init__(
        self,
        role: Role,
        id: str,
        ip: str = "",
        ports: Mapping[str, int] | None = None,
        socket: str = "",
        secret: bytes = b"",
        session: str = "",
        pid: int = 0,
        machine: str = "",
        token: bytes = b"",
        key: bytes = b"",
    ) -> None:
        self.role, self.id, self.ip, self.ports = role, id, ip, dict(ports or {})
        self.socket, self.secret, self.session, self.pid = socket, secret, session, pid
        self.machine, self.token, self.key = machine, token, key

    def to_addr(self, port_name: str = "") -> str:
        """The address as text: ``tcp://ip:port`` of a named port, ``ipc://path`` on this host."""
        if port_name in self.ports:
            ip = f"[{self.ip}]" if ":" in self.ip else self.ip
            return f"tcp://{ip}:{self.ports[port_name]}"
        return f"ipc://{self.socket}"

    def to_dict(self) -> dict[str, Any]:
        """Name, role, host and ports; the secret is left out."""
        return {"role": self.role, "id": self.id, "ip": self.ip, "ports": dict(self.ports), "socket": self.socket}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZMQServerInfo) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.id, self.socket, self.session))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.machine, self.token, self.key = "", b"", b""  # addresses of earlier releases have none
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ZMQServerInfo({self.role.value} {self.id!r} at {self.to_addr()})"


def process_zmq_server_info(handlers: Any) -> Any:
    """The addresses of controllers and units that were made by hand.

    Args:
        handlers: a Ray actor handle of a controller or a unit, or a dict or a list of them.

    Returns:
        One ``ZMQServerInfo``, or a dict or a list of them with the same keys.
    """
    import ray

    if isinstance(handlers, Mapping):
        return dict(zip(handlers, process_zmq_server_info(list(handlers.values())), strict=True))
    if isinstance(handlers, list | tuple):
        return ray.get([handler.get_zmq_server_info.remote() for handler in handlers])
    return ray.get(handlers.get_zmq_server_info.remote())


class ZMQRequestType(Enum):
    """Names of the peer package's requests."""

    HANDSHAKE = "HANDSHAKE"
    HANDSHAKE_ACK = "HANDSHAKE_ACK"
    REQUEST_ERROR = "REQUEST_ERROR"
    GET_DATA = "GET_DATA"
    PUT_DATA = "PUT_DATA"
    GET_DATA_RESPONSE = "GET_DATA_RESPONSE"
    PUT_DATA_RESPONSE = "PUT_DATA_RESPONSE"
    CLEAR_DATA = "CLEAR_DATA"
    CLEAR_DATA_RESPONSE = "CLEAR_DATA_RESPONSE"
    UPDATE_DATA = "UPDATE_DATA"
    UPDATE_DATA_RESPONSE = "UPDATE_DATA_RESPONSE"
    GET_META = "GET_META"
    GET_META_RESPONSE = "GET_META_RESPONSE"
    GET_PARTITION_META = "GET_PARTITION_META"
    SET_CUSTOM_META = "SET_CUSTOM_META"
    MARK_CLEARING = "MARK_CLEARING"
    CLEAR_META = "CLEAR_META"
    CLEAR_PARTITION = "CLEAR_PARTITION"
    GET_CONSUMPTION = "GET_CONSUMPTION"
    RESET_CONSUMPTION = "RESET_CONSUMPTION"
    GET_PRODUCTION = "GET_PRODUCTION"
    GET_LIST_PARTITIONS = "GET_LIST_PARTITIONS"
    NOTIFY_DATA_UPDATE = "NOTIFY_DATA_UPDATE"
    NOTIFY_DATA_UPDATE_ACK = "NOTIFY_DATA_UPDATE_ACK"
    NOTIFY_DATA_UPDATE_ERROR = "NOTIFY_DATA_UPDATE_ERROR"
    KV_RETRIEVE_META = "KV_RETRIEVE_META"
    KV_RETRIEVE_KEYS = "KV_RETRIEVE_KEYS"
    KV_LIST = "KV_LIST"
    KV_CLEAR_FIELDS = "KV_CLEAR_FIELDS"


@dataclass
class ZMQMessage:
    """An envelope as programs of the peer package build it."""

    request_type: ZMQRequestType
    sender_id: str
    receiver_id: str | None
    body: dict[str, Any]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    timestamp: float = field(default_factory=time.time)

    @classmethod
    def create(
        cls, request_type: ZMQRequestType, sender_id: str, body: dict[str, Any], receiver_id: str | None = None
    ) -> ZMQMessage:
        """An envelope with a fresh ``request_id``."""
        return cls(request_type, sender_id, receiver_id, body)
