"""Environment variables that concern the whole package."""

from __future__ import annotations

import logging

import pytest

from transfer_queue._environment import set_logging_level


@pytest.fixture
def logger():
    made = logging.getLogger("transfer_queue")
    before = made.level
    yield made
    made.setLevel(before)


@pytest.mark.parametrize(("given", "level"), [("info", logging.INFO), ("ERROR", logging.ERROR), ("15", 15)])
def test_the_level_of_the_loggers(logger, monkeypatch, given, level):
    monkeypatch.setenv("TQ_LOGGING_LEVEL", given)
    set_logging_level()
    assert logger.level == level


def test_a_level_that_there_is_not_changes_nothing_and_is_named(logger, monkeypatch, caplog):
    logger.setLevel(logging.WARNING)
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "loud")
    set_logging_level()
    assert logger.level == logging.WARNING
    assert "TQ_LOGGING_LEVEL='loud'" in caplog.text
