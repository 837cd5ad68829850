"""Actors of the tests that run on Ray. Workers import this module, which must not import torch: see `Racer`."""

from __future__ import annotations

import os
from typing import Any


class Worker:
    """A process of a user. Its methods import what they need."""

    def put(self, key: str, rows: int) -> str:
        import torch

        import transfer_queue as tq

        tq.kv_put(key, "p", fields={"x": torch.arange(rows)})
        return tq.__name__

    def handles(self) -> tuple[str, bool, bool]:
        """The handles of this process after a call that has joined by itself."""
        import transfer_queue as tq

        partitions = list(tq.kv_list())
        controller = tq.interface._TQ_CONTROLLER
        import ray

        same = ray.get(controller.list_partitions.remote()) == partitions
        return type(controller).__name__, same, tq.interface._TQ_CLIENT is tq.get_client()

    def total(self, key: str) -> int:
        import transfer_queue as tq

        return int(tq.kv_batch_get(key, "p")["x"].values().sum())

    def join_and_leave(self, conf: Any) -> Any:
        import transfer_queue as tq

        running = tq.init(conf)
        tq.close()
        try:
            tq.get_client()
        except AssertionError:
            return running
        raise RuntimeError("there is a client after close")

    def pid(self) -> int:
        return os.getpid()


class Racer:
    """Opens the session of the cluster without importing torch, so that sixteen of them start in no time."""

    def open(self, conf: Any) -> tuple[str, bool]:
        from transfer_queue import _ray, _session, config

        session = _session.open_session(config.load(conf))
        actors = _ray.actors()
        assert actors is not None
        return session.id, actors.owner

    def create_only(self, conf: Any) -> int:
        """Create the controller and store no configuration."""
        from transfer_queue import _ray, config

        self.controller = _ray._created(config.load(conf))
        return os.getpid()

    def close(self) -> None:
        from transfer_queue import _ray, _session

        _session.close()
        _ray.close()
