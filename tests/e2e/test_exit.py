"""Programs end promptly and with the right status, whatever the queue is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import Nursery, until


def _nothing(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(1 << 18)})


def _everything(tq: Any) -> None:
    """Requests that do not end, on threads, in a loop and in the core; a callable that sleeps; results in cycles."""
    import asyncio
    import threading
    import time

    import transfer_queue
    from transfer_queue import _calls, _lib, _requests, _session

    for_ever_s = 300 if _session.current().owner else 2  # it sleeps in the owner

    def sleeps(old: Any, new: Any) -> Any:
        time.sleep(for_ever_s)

    def daemon(*arguments: Any) -> None:
        threading.Thread(target=arguments[0], args=arguments[1:], daemon=True).start()

    tq.kv_put("a", "p", {"x": torch.arange(1 << 18), "y": torch.arange(3)})
    for _ in range(3):
        daemon(tq.kv_wait, "p", ["never"], None, None, None, 300)
    daemon(tq.kv_update, "a", "p", {"y": torch.arange(3)}, sleeps, 300)

    session = _session.current()
    call = _requests.kv_wait(session, "p", ["never"], None, None, None, 300)
    queue = _calls.Queue(_lib.library())
    queue.submit(session.handle, call)

    loop = asyncio.new_event_loop()
    task = loop.create_task(tq.async_kv_wait("p", ["never"], timeout=300))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(asyncio.sleep(0.05))

    cycle: list[Any] = [tq.kv_batch_get("a", "p", copy=False), tq.kv_batch_get("a", "p"), queue, task]
    cycle.append(cycle)
    transfer_queue.kept_for_ever = cycle  # type: ignore[attr-defined]


def _closed(tq: Any) -> None:
    _everything(tq)
    tq.close()


def _status_three(tq: Any) -> None:
    _everything(tq)
    raise SystemExit(3)


def _uncaught(tq: Any) -> None:
    _everything(tq)
    raise ValueError("uncaught")


def _program(line: Any, way: Callable[[Any], None]) -> None:
    import transfer_queue as tq

    tq.init()
    line.send("begins")
    try:
        way(tq)
    finally:
        line.send("ends")


def _idle(line: Any) -> None:
    line.send("begins")
    line.send("ends")


@pytest.mark.parametrize(
    ("owner", "ways"),
    [
        (True, {_nothing: 0, _status_three: 3, _closed: 0}),
        (False, {_nothing: 0, _uncaught: 1, _closed: 0}),
    ],
    ids=["owner", "attached"],
)
def test_exit(nursery: Nursery, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: bool, ways: Any) -> None:
    """All at once, because shutting down a Python with torch takes a second."""
    import transfer_queue as tq

    if not owner:
        tq.init()
    try:
        children = {}
        for way in (*ways, _idle):
            if owner:
                folder = runtime_dir / way.__name__
                folder.mkdir()
                monkeypatch.setenv("TQ_RUNTIME_DIR", str(folder))
            arguments = (_idle,) if way is _idle else (_program, way)
            children[way] = nursery.start(*arguments, ends_as_program=True)
        for child in children.values():
            assert child.recv() == "begins"
            assert child.recv() == "ends"
        began = time.monotonic()
        children.pop(_idle).wait()
        alone = time.monotonic() - began  # beside the others, as long as a Python with torch needs
        for way, child in children.items():
            assert child.wait(40) == ways[way], f"{way.__name__}:\n{child.text()}"
            assert "Fatal Python error" not in child.text(), f"{way.__name__}:\n{child.text()}"
        assert time.monotonic() - began < 6 + 3 * alone
        if owner:
            left = {path.name for path in runtime_dir.rglob("*") if path.is_file()}
            assert left <= {"default.lock"}, "an owner that ends removes its files"
        else:
            tq.kv_clear("a", "p")
            until(lambda: all(unit.leases == 0 for unit in tq.list_units()), "views of those that left end")
            assert all(unit.memory_used_bytes == 0 for unit in tq.list_units())
    finally:
        if not owner:
            tq.close()


def _stays(line: Any) -> None:
    import transfer_queue as tq

    tq.init()
    line.send("begins")
    line.recv()


def test_sigterm_ends_an_owner_without_handlers(nursery: Nursery) -> None:
    child = nursery.start(_stays)
    child.recv()
    child.signal(15)
    assert child.wait() == -15
    import transfer_queue as tq

    with pytest.raises(AssertionError):
        tq.kv_list()
    tq.init()
    tq.close()


def test_a_thread_that_still_works_is_waited_for(nursery: Nursery) -> None:
    """The end of the main thread is not the end of a program; the session lives as long as its threads."""

    def program(line: Any) -> None:
        import threading
        import time

        import transfer_queue as tq

        tq.init()

        def works() -> None:
            threading.main_thread().join()
            for step in range(3):
                time.sleep(0.05)
                tq.kv_put(str(step), "p", {"x": torch.arange(3)})
            line.send(sorted(tq.kv_list("p")["p"]))

        threading.Thread(target=works).start()

    child = nursery.start(program, ends_as_program=True)
    assert child._next(20) == ("result", None)
    assert child.recv() == ["0", "1", "2"]
    assert child.wait() == 0
