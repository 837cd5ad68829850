"""A session whose home is Ray: who creates it, who joins, who ends it, and what happens when somebody dies."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue
from clusters import assert_nothing_left
from processes import until
from ray_actors import Racer, Worker
from transfer_queue import _session


@pytest.fixture
def worker(ray: Any) -> Any:
    """Function: start an actor of a class; all of them end with the test."""
    made = []

    def make(cls: type = Worker) -> Any:
        made.append(ray.remote(cls).options(num_cpus=0).remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def test_actors_and_tasks_join_by_themselves_and_exchange_data(tq: Any, ray: Any, worker: Any) -> None:
    @ray.remote(num_cpus=0)
    def read(key: str) -> int:
        import transfer_queue as tq

        return int(tq.kv_batch_get(key, "p")["x"].values().sum())

    one = worker()
    ray.get(one.put.remote("a", 300_000))
    assert int(tq.kv_batch_get("a", "p")["x"].values().sum()) == sum(range(300_000))
    tq.kv_put("b", "p", fields={"x": torch.arange(11)})
    assert ray.get(one.total.remote("b")) == 55
    assert ray.get(read.remote("a")) == sum(range(300_000))
    assert list(tq.kv_list("p")["p"]) == ["a", "b"]


def test_who_joins_by_a_call_has_the_handle_of_the_controller(tq: Any, ray: Any, worker: Any) -> None:
    tq.kv_put("a", "p", tag={"x": 1})
    assert ray.get(worker().handles.remote()) == ("ActorHandle", True, True)


def test_the_actors_reserve_nothing_and_have_the_names_that_programs_look_for(tq: Any, ray: Any) -> None:
    names = {(actor["namespace"], actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert ("transfer_queue", "TransferQueueController") in names
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] == 4
    assert ray.util.placement_group_table() == {}
    assert transfer_queue.interface._TQ_CONTROLLER is not None
    assert _session.current().owner is False, "payload and metadata stay out of the driver"


def test_a_worker_only_leaves_and_is_told_what_runs(tq: Any, ray: Any, worker: Any) -> None:
    tq.kv_put("a", "p", fields={"x": torch.arange(3)})
    other = {"backend": {"SimpleStorage": {"num_data_storage_units": 7}}}
    running = ray.get(worker().join_and_leave.remote(other))
    assert running.backend.SimpleStorage.num_data_storage_units == 2
    assert running.controller.zmq_info == tq.init().controller.zmq_info
    assert tq.kv_list() == {"p": {"a": {}}}


def test_of_sixteen_that_call_init_at_once_one_creates(ray: Any, worker: Any) -> None:
    racers = [worker(Racer) for _ in range(16)]
    opened = ray.get([racer.open.remote({"runtime": "ray"}) for racer in racers])
    assert len({session for session, _ in opened}) == 1
    assert sum(owner for _, owner in opened) == 1
    ray.get([racer.close.remote() for (_, owner), racer in zip(opened, racers, strict=True) if not owner])
    ray.get([racer.close.remote() for (_, owner), racer in zip(opened, racers, strict=True) if owner])
    assert_nothing_left(ray)


def test_init_says_what_it_waits_for_and_gives_up(ray: Any, worker: Any) -> None:
    idle = worker(Racer)
    ray.get(idle.create_only.remote({}))
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"waited 1\.0 s for actor TransferQueueController of Ray namespace"):
        transfer_queue.init({"client": {"timeout_s": 1}})
    assert 1 <= time.monotonic() - started < 5
    assert not _session.has_session()


def test_when_the_creator_dies_before_it_is_done_another_takes_over(ray: Any, worker: Any) -> None:
    creator, waiting = worker(Racer), worker(Racer)
    pid = ray.get(creator.create_only.remote({}))
    opening = waiting.open.remote({"runtime": "ray", "client": {"timeout_s": 30}})
    doomed = worker(Racer)
    killed = doomed.open.remote({"runtime": "ray"})
    assert ray.wait([opening], timeout=0.5) == ([], [opening])
    ray.kill(doomed)
    os.kill(pid, 9)
    _, owner = ray.get(opening)
    assert owner
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(killed)
    ray.get(waiting.close.remote())
    assert_nothing_left(ray)


def test_a_session_whose_controller_is_killed_is_unavailable_and_can_be_replaced(ray: Any) -> None:
    transfer_queue.init()
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    transfer_queue.kv_put("a", "p", fields={"x": torch.arange(3)})
    ray.kill(controller)

    def gone() -> bool:
        try:
            transfer_queue.kv_list()
        except ConnectionError:
            return True
        return False

    until(gone, "calls fail with Unavailable")
    transfer_queue.close()
    transfer_queue.init()
    assert transfer_queue.kv_list() == {}
    transfer_queue.close()
    assert_nothing_left(ray)


def test_init_replaces_a_session_whose_controller_was_killed(ray: Any) -> None:
    before = transfer_queue.init()
    os.kill(before.controller.zmq_info.pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{before.controller.zmq_info.pid}"), "the controller is dead")
    after = transfer_queue.init()
    assert after.controller.zmq_info.session != before.controller.zmq_info.session
    transfer_queue.kv_put("a", "p", fields={"x": torch.arange(3)})
    assert transfer_queue.kv_list() == {"p": {"a": {}}}
    transfer_queue.close()
    assert_nothing_left(ray)


def test_what_fails_before_anything_is_started_leaves_no_actor(ray: Any) -> None:
    for conf, what in [
        ({"controller": {"sampler": "NoSuchSampler"}}, "could not find sampler 'NoSuchSampler'"),
        ({"backend": {"storage_backend": "NoSuchStore"}}, "backend.storage_backend: got 'NoSuchStore'"),
        ({"backend": {"SimpleStorage": {"num_data_storage_units": 0}}}, "num_data_storage_units: got 0"),
        (
            {"backend": {"SimpleStorage": {"required_node_resource": "tpu"}}},
            "No alive Ray nodes provide custom resource 'tpu'",
        ),
    ]:
        with pytest.raises(ValueError, match=what):
            transfer_queue.init(conf)
        assert_nothing_left(ray)


def test_a_forked_child_goes_on_without_ray(tq: Any) -> None:
    tq.kv_put("a", "p", fields={"x": torch.arange(3)})
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            got = tq.kv_batch_get("a", "p")["x"].values().tolist()
            tq.kv_put("b", "p", tag={"got": got})
            tq.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tq.kv_list("p") == {"p": {"a": {}, "b": {"got": [0, 1, 2]}}}


def test_a_client_by_hand_from_the_configuration_needs_no_ray(tq: Any) -> None:
    conf = tq.init()
    client = tq.TransferQueueClient("by hand", conf.controller.zmq_info)
    client.initialize_storage_manager("SimpleStorage", conf.backend.SimpleStorage)
    table = TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2])
    meta = client.put(table, partition_id="p")
    assert client.get_data(meta)["x"].unbind()[1].tolist() == [3, 4, 5]


def test_metrics_and_a_sampler_of_the_user_come_with_the_configuration(ray: Any) -> None:
    class Last(transfer_queue.BaseSampler):
        """The last ready samples."""

        def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    conf = transfer_queue.init({"metrics": {"enabled": True}, "controller": {"sampler": Last()}})
    try:
        maps = Path(f"/proc/{conf.controller.zmq_info.pid}/maps").read_text()
        assert "libtorch_cpu" in maps, "the first fetch would have to wait for imports of the sampler"
        assert conf.metrics.endpoint == transfer_queue.get_metrics_endpoint() is not None
        with urllib.request.urlopen(f"http://{conf.metrics.endpoint}/metrics", timeout=10) as page:
            assert b"tq_partitions_total 0" in page.read()
        table = TensorDict({"x": torch.arange(3)}, batch_size=[3])
        transfer_queue.kv_batch_put(["a", "b", "c"], "p", table)
        client = transfer_queue.get_client()
        assert client.get_meta(["x"], 1, "p", task_name="train", timeout=30).global_indexes == [2]
    finally:
        transfer_queue.close()
    assert_nothing_left(ray)
