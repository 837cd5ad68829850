"""Identical payloads of a batch are stored once by units that are actors."""

from __future__ import annotations

from typing import Any

import pytest

import stored_once


@pytest.mark.parametrize("conf", [{"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}])
def test_payloads_are_stored_once(tq: Any) -> None:
    for numbers in (100, 40_000):
        stored_once.exercise(tq, numbers)
