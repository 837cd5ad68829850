"""Programs end promptly and with the right status, whatever the queue is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from processes import Nursery


def _start(tq: Any) -> None:
    """Requests that never end, on daemon threads and in the core."""
    import threading

    from transfer_queue import _calls, _requests, _session

    for _ in range(3):
        threading.Thread(target=tq.kv_wait, args=("p", ["never"]), kwargs={"timeout": 300}, daemon=True).start()
    session = _session.current()
    queue = _calls.Queue(_calls._lib.library())
    call = _requests.kv_wait(session, "p", ["never"], None, None, None, 300)
    queue.submit(session.handle, call)


def _nothing(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(1 << 18)})


def _in_flight(tq: Any) -> None:
    _start(tq)


def _in_flight_and_closed(tq: Any) -> None:
    _start(tq)
    tq.close()


def _status_three(tq: Any) -> None:
    _start(tq)
    raise SystemExit(3)


def _uncaught(tq: Any) -> None:
    _start(tq)
    raise ValueError("uncaught")


def _views_and_cycles(tq: Any) -> None:
    import transfer_queue

    tq.kv_put("a", "p", {"x": torch.arange(1 << 18), "y": torch.arange(3)})
    cycle: list[Any] = [tq.kv_batch_get("a", "p", copy=False), tq.kv_batch_get("a", "p")]
    cycle.append(cycle)
    transfer_queue.kept_for_ever = cycle  # type: ignore[attr-defined]


def _pending_task(tq: Any) -> None:
    import asyncio

    loop = asyncio.new_event_loop()
    transfer_task = loop.create_task(tq.async_kv_wait("p", ["never"], timeout=300))
    loop.run_until_complete(asyncio.sleep(0.05))
    transfer_task._log_destroy_pending = False  # type: ignore[attr-defined]


def _busy_callable(tq: Any) -> None:
    import threading
    import time

    def sleeps(old: Any, new: Any) -> Any:
        time.sleep(300)

    tq.kv_put("a", "p", {"x": torch.arange(3)})
    update = threading.Thread(target=tq.kv_update, args=("a", "p", {"x": torch.arange(3)}, sleeps, 300), daemon=True)
    update.start()
    update.join(0.2)


_WAYS = {
    "nothing": (_nothing, 0),
    "in flight": (_in_flight, 0),
    "in flight and closed": (_in_flight_and_closed, 0),
    "status 3": (_status_three, 3),
    "uncaught": (_uncaught, 1),
    "views and cycles": (_views_and_cycles, 0),
    "pending task": (_pending_task, 0),
    "busy callable": (_busy_callable, 0),
}


_ATTACHED = {"nothing", "in flight", "uncaught", "views and cycles"}


def _program(line: Any, way: Callable[[Any], None]) -> None:
    import transfer_queue as tq

    tq.init()
    line.send("begins")
    try:
        way(tq)
    finally:
        line.send("ends")


def _idle(line: Any) -> None:
    import torch  # noqa: F401

    line.send("begins")
    line.send("ends")


def _ends(nursery: Nursery, function: Any, *arguments: Any) -> Any:
    child = nursery.start(function, *arguments, ends_as_program=True)
    child.recv()
    return child


@pytest.mark.parametrize("owner", [True, False], ids=["owner", "attached"])
def test_exit(nursery: Nursery, runtime_dir: Any, monkeypatch: pytest.MonkeyPatch, owner: bool) -> None:
    """All at once, because shutting down a Python with torch takes a second."""
    import transfer_queue as tq

    if not owner:
        tq.init()
    try:
        children = {}
        ways = {name: way for name, way in _WAYS.items() if owner or name in _ATTACHED}
        for number, (name, (way, _)) in enumerate(ways.items()):
            if owner:
                folder = runtime_dir / str(number)
                folder.mkdir()
                monkeypatch.setenv("TQ_RUNTIME_DIR", str(folder))
            children[name] = _ends(nursery, _program, way)
        idle = _ends(nursery, _idle)
        for child in children.values():
            assert child.recv() == "ends"
        began = time.monotonic()
        idle.wait()
        for name, (_, status) in ways.items():
            assert children[name].wait(20) == status, f"{name}:\n{children[name].text()}"
        assert time.monotonic() - began < 15, "prompt, for nine interpreters with torch on two processors"
        for name, child in children.items():
            if name != "uncaught":
                assert "Fatal" not in child.text(), f"{name}:\n{child.text()}"
        if owner:
            left = {path.name for path in runtime_dir.rglob("*") if path.is_file()}
            assert left <= {"default.lock"}, "an owner that ends removes its files"
        else:
            tq.kv_clear("a", "p")
            assert {(u.memory_used_bytes, u.leases) for u in tq.list_units()} == {(0, 0)}
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
