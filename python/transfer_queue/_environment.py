"""Environment variables that concern the whole package."""

from __future__ import annotations

import logging
import os

__all__ = ["set_logging_level"]


def set_logging_level() -> None:
    """Give the loggers of the package the level of ``TQ_LOGGING_LEVEL``; without it they have that of the program."""
    level = os.environ.get("TQ_LOGGING_LEVEL")
    if not level:
        return
    logger = logging.getLogger("transfer_queue")
    try:
        logger.setLevel(int(level) if level.isdigit() else level.upper())
    except ValueError:
        logger.warning("TQ_LOGGING_LEVEL=%r: want a level of the logging module, such as INFO", level)
