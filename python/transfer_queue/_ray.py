"""Ray as the home of a session: controller and units are actors, all other processes of the cluster attach.

The controller is a named actor, so of many processes that call ``init`` at once exactly one creates it. It owns the
session: its actors end with it, as Ray ends what the owner of actors leaves behind. The others wait until the owner has
stored the complete configuration in the controller; when it dies before that, one of them takes over.

Ray only starts and ends processes here and hands out addresses. Everything else goes through the session itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import sys
import time
from typing import Any

from transfer_queue import _ray_address, _ray_units, _remote, _session
from transfer_queue._actor_class import ray_module
from transfer_queue.errors import InvalidStateError, NotInitializedError, TransferQueueError, UnavailableError
from transfer_queue.utils.zmq_utils import ZMQServerInfo

__all__ = ["actors", "close", "join_session", "open_session", "usable"]

NAME, NAMESPACE = "TransferQueueController", "transfer_queue"
_CONTROLLER = f"actor {NAME} of Ray namespace {NAMESPACE}"
_RETRY_S = 0.05
_DIRECT_S = 2.0  # how long a published address may take to answer before the controller is asked
_LOUD_S = 5.0  # who waits longer says so
_END_S = 5.0  # how long an actor may take to end by itself


class Actors:
    """The actors of the session of this process.

    Attributes:
        controller: handle of the controller.
        units: name -> handle of the units that this process has created.
        owner: whether this process has created them and ends them.
        connection: what Ray calls this process; something else after Ray was started anew.
    """

    def __init__(self, controller: Any, owner: bool) -> None:
        self.controller, self.owner = controller, owner
        self.units: dict[str, Any] = {}
        self.connection, self.pid = _connection(), os.getpid()
        self._processes: list[int] = []  # pidfds

    def watch(self, info: ZMQServerInfo) -> None:
        """Remember the process of an actor, to see its end if it is one of this host."""
        if info.machine == _remote.machine():
            with contextlib.suppress(OSError):
                self._processes.append(os.pidfd_open(info.pid))

    def end(self) -> None:
        """End all of them, and return when they are gone."""
        ray = ray_module()
        units = list(self.units.values())
        _ray_address.withdraw(self.controller)
        _shut_down([self.controller])  # it tells durable units to drop what only this session knows
        _shut_down(units)
        for handle in [*units, self.controller]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            select.select([process], [], [], max(0.0, deadline - time.monotonic()))
            os.close(process)
        self._processes.clear()
        with contextlib.suppress(ray_module().exceptions.RayError):
            while self._named() and time.monotonic() < deadline:
                time.sleep(_RETRY_S)

    def _named(self) -> bool:
        """Whether Ray still knows the name of one of them, which would keep the next session from having it."""
        units = {_ray_units.actor_name(rank) for rank in range(len(self.units))}
        return _named() is not None or not units.isdisjoint(ray_module().util.list_named_actors())


def _shut_down(handles: list[Any]) -> None:
    """Ask actors to end by themselves, and wait a little."""
    ray, endings = ray_module(), []
    for handle in handles:
        with contextlib.suppress(ray.exceptions.RayError):  # it is gone already, or the cluster is
            endings.append(handle.shutdown.remote())
    if endings:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(endings, num_returns=len(endings), timeout=_END_S)


_actors: Actors | None = None
_inherited = ""  # what Ray calls the process that this one was forked from


def _connection() -> str:
    """What Ray calls this process and its node. A driver has the same name in every cluster, a node never has."""
    here = ray_module().get_runtime_context()
    return f"{here.get_node_id()}/{here.get_worker_id()}"


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def usable() -> bool:
    """Whether Ray is imported and initialised in this process. A connection does not survive a fork."""
    return _connected() and (not _inherited or _connection() != _inherited)


def actors() -> Actors | None:
    """The actors of the session of this process, None when Ray is not its home."""
    return _actors if _actors is not None and _actors.pid == os.getpid() else None


def forget_stale() -> None:
    """Drop a session whose Ray was shut down meanwhile, so that a new one can be opened."""
    global _actors
    known = actors()
    if known is None or (_connected() and known.connection == _connection()):
        return
    _actors = None
    with contextlib.suppress(TransferQueueError):
        _session.close()


def open_session(conf: Any) -> _session.Session:
    """Join the session of this Ray cluster, or create it.

    Raises:
        InvalidStateError: Ray is not initialised in this process.
        UnavailableError: somebody else creates the session and does not finish in time.
    """
    if not usable():
        ray_module("init")
        raise InvalidStateError("runtime ray: Ray is not initialised in this process, call ray.init() first", "init")
    patience = _Patience(float((conf.get("client") or {}).get("timeout_s") or 60.0))
    while True:
        controller = _named()
        if controller is None:
            controller = _created(conf)
            if controller is not None:
                return _settled(controller, conf, patience)
            continue
        session = _joined(controller, patience)
        if session is not None:
            return session


def join_session(timeout: float) -> _session.Session:
    """Join the session of this Ray cluster.

    Raises:
        NotInitializedError: there is none (an AssertionError).
    """
    patience = _Patience(timeout)
    while True:
        controller = _named()
        if controller is None:
            raise NotInitializedError(f"no session is running (looked for {_CONTROLLER}), call init() first")
        session = _joined(controller, patience)
        if session is not None:
            return session


def close() -> None:
    """End the actors when this process has created them. The session has been left already."""
    global _actors
    known, _actors = actors(), None
    if known is not None and known.owner and usable() and known.connection == _connection():
        known.end()


class _Patience:
    """The time that an opening may take."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._started, self._loud = seconds, time.monotonic(), False

    def left(self) -> float:
        return max(0.0, self._started + self.seconds - time.monotonic())

    def spend(self, what: str) -> None:
        """Say that ``what`` is waited for, and raise when the time is over."""
        if not self.left():
            raise UnavailableError(f"waited {self.seconds:.1f} s for {what}", "init")
        if not self._loud and time.monotonic() - self._started > _LOUD_S:
            self._loud = True
            logging.getLogger(__name__).warning("init: still waiting for %s", what)


def _named() -> Any:
    try:
        return ray_module().get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _ask(method: Any, patience: _Patience, what: str) -> Any:
    """The answer of an actor.

    Raises:
        UnavailableError: the actor is gone, or does not answer in time.
    """
    ray = ray_module()
    try:
        answer = method()
        while True:
            done, _ = ray.wait([answer], timeout=min(1.0, patience.left()))
            if done:
                return ray.get(answer)
            patience.spend(what)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, Exception) else error) from None
    except ray.exceptions.RayActorError as error:
        raise _Gone(f"{what}: it is gone: {str(error).splitlines()[0]}", "init") from None


class _Gone(UnavailableError):
    """An actor that died."""


def _joined(controller: Any, patience: _Patience) -> _session.Session | None:
    """The session of a controller, None when that dies before there is one."""
    global _actors
    session = _direct(controller, patience) or _asked(controller, patience)
    if session is not None:
        _actors = Actors(controller, owner=False)
    return session


def _direct(controller: Any, patience: _Patience) -> _session.Session | None:
    """The session at the published address of a controller, None when there is none or nobody answers."""
    info = _ray_address.find(controller)
    with contextlib.suppress(TransferQueueError):
        return _session.enter(info, min(_DIRECT_S, patience.left())) if info is not None else None
    return None


def _asked(controller: Any, patience: _Patience) -> _session.Session | None:
    """The session at the address that a controller gives once it lets others in, None when it dies before."""
    what = f"{_CONTROLLER}, whose creator has not stored a configuration yet"
    try:
        _ask(lambda: controller.wait_config.remote(2 * patience.seconds), patience, what)
        what = f"the session of {_CONTROLLER}"
        info = _ask(controller.get_zmq_server_info.remote, patience, what)
        session = _session.enter(info, max(1.0, patience.left()))
    except UnavailableError as error:
        known = error.message if error.message.startswith(what) else f"{what} ({error.message})"
        patience.spend(known if patience.left() else what)
        time.sleep(_RETRY_S)
        return None
    _ray_address.publish(controller, info)
    return session


def _created(conf: Any) -> Any:
    """A new controller, None when somebody else was faster."""
    ray = ray_module()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transfer_queue import controller

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    place = {"name": NAME, "namespace": NAMESPACE, "scheduling_strategy": here}
    section = conf["controller"]
    if (section.get("journal") or {}).get("durability", "none") != "none":
        place["max_restarts"] = -1  # it goes on from its journal
    try:
        return controller.TransferQueueController.options(**place).remote(
            sampler=section.get("sampler"),
            polling_mode=bool(section.get("polling_mode")),
            conf=conf,
            environment=_ray_units.environment(),
            listen=_ray_units.several_nodes(),
        )
    except ValueError as error:
        if _named() is None and "already" not in str(error):
            raise
        return None


def _settled(controller: Any, conf: Any, patience: _Patience) -> _session.Session:
    """Start the units of a new controller and let everybody in."""
    global _actors
    made = Actors(controller, owner=True)
    try:
        made.units = _ray_units.start(conf)
        info = _ask(controller.get_zmq_server_info.remote, patience, _CONTROLLER)
        made.watch(info)
        units = {}
        for name, unit in made.units.items():
            units[name] = _ask(unit.get_zmq_server_info.remote, patience, f"storage unit {name!r}")
            made.watch(units[name])
        _ask(lambda: controller.join_units.remote(list(units.values())), patience, _CONTROLLER)
        if (conf.get("metrics") or {}).get("enabled"):
            port = int(conf["metrics"].get("port") or 0)
            _ask(lambda: controller.start_metrics.remote(port), patience, _CONTROLLER)
        complete = _ask(controller.get_session_config.remote, patience, _CONTROLLER)
        complete["backend"]["SimpleStorage"]["zmq_info"] = units
        _ask(lambda: controller.store_config.remote(complete), patience, _CONTROLLER)
        session = _session.enter(info, max(1.0, patience.left()))
        _ray_address.publish(controller, info)
    except BaseException:
        made.end()
        raise
    _actors = made
    # Registered after Ray's own, so that it runs before.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    return session


def _at_exit() -> None:
    """End the actors of a program that did not."""
    if actors() is not None:
        with contextlib.suppress(TransferQueueError):
            _session.close(join_s=0)
        close()


# In a forked child a handle must not die: Ray would speak of that over the connections of the parent.
_kept: list[Actors | None] = []


def _after_fork() -> None:
    global _inherited
    _kept.append(_actors)
    with contextlib.suppress(AssertionError):  # Ray is just starting in another thread
        if _connected():
            _inherited = _connection()


os.register_at_fork(after_in_child=_after_fork)
