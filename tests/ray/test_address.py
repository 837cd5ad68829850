"""The address that a session leaves in the store of Ray, so that joining it needs no call of an actor."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from clusters import published
from processes import program
from ray_actors import Racer
from transfer_queue import _ray_address, interface
from transfer_queue.utils.zmq_utils import ZMQServerInfo

JOIN = """
    import ray, torch
    import transfer_queue as tq

    ray.init(address={address!r}, log_to_driver=False)
    conf = tq.init()
    print(type(conf).__name__, conf.controller.zmq_info.session, conf.backend.SimpleStorage.num_data_storage_units)
    print(type(tq.interface._TQ_CONTROLLER).__name__, list(tq.kv_list()))
    print("serialised:", len(ray._private.worker.global_worker.serialization_context_map))
    print(ray.get(tq.interface._TQ_CONTROLLER.list_partitions.remote()))
"""


def test_a_driver_joins_without_a_call_of_an_actor(tq: Any, ray: Any) -> None:
    tq.kv_put("a", "p", tag={"x": 1})
    code = textwrap.dedent(JOIN).format(address=ray.get_runtime_context().gcs_address)
    with program("-c", code) as running:
        output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    session = tq.init().controller.zmq_info.session
    wanted = [f"DictConfig {session} 2", "ActorHandle ['p']", "serialised: 0", "['p']"]
    assert output.splitlines()[-4:] == wanted, output


def _dead(info: ZMQServerInfo) -> ZMQServerInfo:
    out = copy.copy(info)
    out.socket += ".gone"
    return out


def _foreign(info: ZMQServerInfo) -> ZMQServerInfo:
    out = copy.copy(info)
    out.secret = bytes(len(out.secret))
    return out


@pytest.mark.parametrize("change", [_dead, _foreign])
def test_an_address_that_is_old_is_replaced_by_who_joins(
    tq: Any, ray: Any, change: Callable[[ZMQServerInfo], ZMQServerInfo]
) -> None:
    controller, info = interface._TQ_CONTROLLER, tq.init().controller.zmq_info
    _ray_address.publish(controller, change(info))
    racer = ray.remote(Racer).options(num_cpus=0).remote()
    assert ray.get(racer.open.remote({})) == (info.session, False)
    assert _ray_address.find(controller) == info
    ray.kill(racer)


def test_the_address_of_another_controller_is_not_used(tq: Any, ray: Any) -> None:
    info = tq.init().controller.zmq_info
    racer = ray.remote(Racer).options(num_cpus=0).remote()
    _ray_address.publish(racer, info)
    assert _ray_address.find(interface._TQ_CONTROLLER) is None
    assert ray.get(racer.open.remote({})) == (info.session, False)
    assert _ray_address.find(interface._TQ_CONTROLLER) == info
    ray.kill(racer)


def test_the_address_goes_with_the_session(ray: Any) -> None:
    import transfer_queue

    transfer_queue.init()
    assert published()
    transfer_queue.close()
    assert not published()
