"""Forks processes that have torch imported already, which takes seconds otherwise. Run by `processes.Nursery`.

A request is one message: a pickled `Order` and two descriptors. The forked process leaves the loop and runs the order
at the top of this script, so it can end as any program does: threads are joined, exit handlers run, the status is true.
The core is not loaded here, so the processes start with a fresh one.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Order(NamedTuple):
    """What a forked process does.

    Attributes:
        work: ``loads`` makes a function and its arguments of it.
        ends_as_program: the interpreter is shut down at the end, which takes torch a second; else the process ends.
    """

    environment: dict[str, str]
    work: bytes
    ends_as_program: bool


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _serve(control: socket.socket) -> tuple[Order, list[int]]:
    """Fork for every order and report exit statuses; returns in the forked process."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 22, 3)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            control.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            return Order(*request), list(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(pickle.dumps(pid))


def _settle(order: Order, descriptors: list[int]) -> Any:
    """Make this process what it was ordered to be; returns its line to the test."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    line, output = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return Connection(line)


if __name__ == "__main__":
    import asyncio
    import concurrent.futures.thread
    import multiprocessing.pool  # noqa: F401

    import cloudpickle
    import omegaconf  # noqa: F401
    import torch
    import yaml  # noqa: F401

    import transfer_queue as tq

    assert asyncio
    assert concurrent.futures.thread
    assert tq
    torch.set_num_threads(1)
    _die_with_parent()
    order, descriptors = _serve(socket.socket(fileno=int(sys.argv[1])))
    line = _settle(order, descriptors)
    function, arguments = cloudpickle.loads(order.work)
    try:
        line.send(("result", function(line, *arguments)))
    except BaseException:
        if order.ends_as_program:
            raise
        traceback.print_exc()
        os._exit(1)
    if not order.ends_as_program:
        os._exit(0)
