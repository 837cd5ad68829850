"""Loggers for programs, under the name that those of the peer package import."""

from __future__ import annotations

import logging

from transfer_queue._environment import set_logging_level

__all__ = ["get_logger"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """A logger that is heard also where nobody has set up logging, as in the process of a Ray actor.

    Args:
        name: its name, None for the root of all.
        default_level: its level unless ``TQ_LOGGING_LEVEL`` has one.

    Returns:
        The logger. It writes to stderr when neither it nor a logger above it has a handler.
    """
    logger = logging.getLogger(name)
    set_logging_level(logger, default_level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger
