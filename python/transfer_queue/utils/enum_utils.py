"""Names of the peer package's enumerations."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """Part of a session that an address belongs to."""

    CONTROLLER = "TransferQueueController"
    STORAGE = "TransferQueueStorage"
    CLIENT = "TransferQueueClient"


class ProductionStatus(Enum):
    """State of a cell in a production table."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1
