"""Environment variables that concern the whole package."""

from __future__ import annotations

import logging
import math
import os

from transfer_queue.errors import InvalidArgumentError

__all__ = ["MOST_SECONDS", "seconds", "set_logging_level"]

MOST_SECONDS = 1e9  # a longer time is as good as for ever, and its milliseconds might not fit into 64 bits


def seconds(variable: str, default: float) -> float:
    """The seconds that a variable has, or the default.

    Raises:
        InvalidArgumentError: it is no number of at least 0 (a ValueError).
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidArgumentError(f"{variable}={text!r}: want a number of seconds, at least 0")
    return min(value, MOST_SECONDS)


def set_logging_level(logger: logging.Logger, default: str = "") -> None:
    """Give a logger the level of ``TQ_LOGGING_LEVEL``, else the default, else leave it that of the program."""
    level = os.environ.get("TQ_LOGGING_LEVEL") or default
    if not level:
        return
    try:
        logger.setLevel(int(level) if level.isdigit() else level.upper())
    except ValueError:
        logger.warning("TQ_LOGGING_LEVEL=%r: want a level of the logging module, such as INFO", level)
