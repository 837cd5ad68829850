"""Environment variables that concern the whole package."""

from __future__ import annotations

import logging

import pytest

from transfer_queue._environment import seconds, set_logging_level
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.utils.logging_utils import get_logger


@pytest.fixture
def logger():
    made = logging.getLogger("transfer_queue")
    before = made.level
    yield made
    made.setLevel(before)


@pytest.mark.parametrize(("given", "level"), [("info", logging.INFO), ("ERROR", logging.ERROR), ("15", 15)])
def test_the_level_of_the_loggers(logger, monkeypatch, given, level):
    monkeypatch.setenv("TQ_LOGGING_LEVEL", given)
    set_logging_level(logger)
    assert logger.level == level


def test_a_level_that_there_is_not_changes_nothing_and_is_named(logger, monkeypatch, caplog):
    logger.setLevel(logging.WARNING)
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "loud")
    set_logging_level(logger)
    assert logger.level == logging.WARNING
    assert "TQ_LOGGING_LEVEL='loud'" in caplog.text


def test_a_logger_of_a_program_is_heard_also_where_nothing_is_set_up(logger, monkeypatch, capsys):
    monkeypatch.delenv("TQ_LOGGING_LEVEL", raising=False)
    alone = logger.getChild("alone")
    alone.propagate = False  # pytest has set up those above
    assert get_logger(alone.name, "INFO") is get_logger(alone.name, "INFO") is alone
    alone.info("said once")
    assert capsys.readouterr().err.count("said once") == 1
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "error")
    assert get_logger(alone.name).level == logging.ERROR
    alone.handlers.clear()
    assert get_logger(logger.getChild("heard above").name).level == logging.ERROR
    assert not logger.getChild("heard above").handlers


@pytest.mark.parametrize(("given", "want"), [(None, 7.0), ("0", 0.0), ("2.5", 2.5)])
def test_seconds(monkeypatch, given, want):
    monkeypatch.delenv("TQ_SOME_TIME", raising=False)
    if given is not None:
        monkeypatch.setenv("TQ_SOME_TIME", given)
    assert seconds("TQ_SOME_TIME", 7.0) == want


@pytest.mark.parametrize("given", ["", "soon", "-1", "nan", "inf"])
def test_seconds_that_make_no_sense_are_named(monkeypatch, given):
    monkeypatch.setenv("TQ_SOME_TIME", given)
    with pytest.raises(InvalidArgumentError, match=f"TQ_SOME_TIME='{given}'"):
        seconds("TQ_SOME_TIME", 7.0)
