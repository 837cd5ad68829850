"""Whole numbers that a caller gives."""

from __future__ import annotations

import operator
from typing import Any

from transfer_queue.errors import InvalidArgumentError

__all__ = ["MOST", "positive", "whole_number"]

MOST = 2**63 - 1


def whole_number(value: Any, what: str, op: str = "", least: int = 1) -> int:
    """The value as an int; numbers of numpy and torch count.

    Raises:
        InvalidArgumentError: it is no whole number, too small, or needs more than 64 bits (a ValueError).

    Example:
        >>> import numpy as np
        >>> whole_number(np.int32(3), "batch_size")
        3
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number > MOST:
        raise InvalidArgumentError(f"{what} {value!r}: does not fit into 64 bits", op)
    if number < least:
        raise InvalidArgumentError(f"{what} {value!r}: want a whole number of at least {least}", op)
    return number


def positive(value: Any, what: str) -> int:
    """The number of a sampler's constructor as an int.

    Raises:
        InvalidArgumentError: it is no whole number of at least 1 (a ValueError).
    """
    try:
        return whole_number(value, what)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"{what} must be positive and whole, got {value!r}") from None
