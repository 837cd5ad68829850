"""A panic in the core: an Internal error for everybody, stacks once, and a process that goes on and ends well."""

from __future__ import annotations

from typing import Any

import pytest

from processes import Nursery


def _panic(line: Any, where: int, waiting: bool) -> list[str]:
    """Names of the errors that every call gives."""
    import asyncio
    import ctypes
    import threading

    import torch

    import transfer_queue as tq
    from transfer_queue import _lib, errors

    tq.init()
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    result = tq.kv_batch_get("a", "p")
    seen: list[str] = []

    def note(call: Any) -> None:
        try:
            call()
        except errors.TransferQueueError as error:
            seen.append(type(error).__name__)
        else:
            seen.append("no error")

    threads = []
    if waiting:
        threads.append(threading.Thread(target=note, args=(lambda: tq.kv_wait("p", ["never"], timeout=30),)))
        threads.append(
            threading.Thread(target=note, args=(lambda: asyncio.run(tq.async_kv_wait("p", ["never"], timeout=30)),))
        )
        for thread in threads:
            thread.start()
            thread.join(0.2)
    library, error = _lib.library(), _lib.Error()
    note(lambda: library.check(library.tq_panic_for_test(where, ctypes.byref(error)), error))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a call waits for an answer that cannot come"
    note(lambda: tq.kv_list())
    note(lambda: tq.kv_put("b", "p", {"x": torch.arange(3)}))
    note(lambda: tq.kv_batch_get("a", "p"))
    note(lambda: asyncio.run(tq.async_kv_list()))
    note(lambda: tq.list_units())
    note(lambda: tq.init())
    assert result["x"].values().tolist() == [0, 1, 2], "results live on"
    return seen


@pytest.mark.parametrize("where", [0, 1], ids=["in the call", "on a goroutine"])
def test_a_panic_poisons_the_library(nursery: Nursery, where: int) -> None:
    child = nursery.start(_panic, where, True, ends_as_program=True)
    seen = child.result()
    assert seen[-6:-1] == ["InternalError"] * 5
    assert set(seen[:3]) <= {"InternalError", "no error"}
    assert seen[:3].count("InternalError") >= 2, "those that waited"
    text = child.text()
    assert text.count("forced by tq_panic_for_test") >= 1
    assert text.count("transfer_queue: panic:") == 1
    assert text.count("guard.Poison(") == 1, "stacks are printed once"
    assert "Fatal Python error" not in text


def test_others_see_an_owner_that_panicked(nursery: Nursery) -> None:
    """Its session is as good as gone; nobody hangs."""

    def owner(line: Any) -> None:
        import ctypes

        import transfer_queue as tq
        from transfer_queue import _lib

        tq.init()
        line.send("ready")
        line.recv()
        _lib.library().tq_panic_for_test(1, ctypes.byref(_lib.Error()))
        line.send("panicked")
        line.recv()

    child = nursery.start(owner)
    child.recv()
    import transfer_queue as tq
    from transfer_queue import errors

    tq.init()
    try:
        assert tq.kv_list() == {}
        child.send("go")
        child.recv()
        with pytest.raises((errors.UnavailableError, errors.InternalError)):
            tq.kv_list(timeout=5)
    finally:
        tq.close()
