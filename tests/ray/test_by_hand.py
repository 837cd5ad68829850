"""Controllers and units that a program makes by hand, each queue on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from clusters import hosts
from processes import until
from transfer_queue import AsyncTransferQueueClient, SimpleStorageUnit, TransferQueueController, config
from transfer_queue.storage import simple_storage
from transfer_queue.utils.zmq_utils import process_zmq_server_info


class Queue:
    """A controller, its units and a client, as a program of the peer package puts them together."""

    def __init__(self, namespace: str, units: list[Any]) -> None:
        place = {"name": "TransferQueueController", "namespace": namespace}
        self.controller = TransferQueueController.options(**place).remote(polling_mode=True)
        self.units = {f"{namespace}-{i}": unit for i, unit in enumerate(units)}
        self.info = process_zmq_server_info(self.controller)
        self.conf = config.load()
        self.conf.controller.zmq_info = self.info
        self.conf.backend.SimpleStorage.zmq_info = process_zmq_server_info(self.units)
        self.client = AsyncTransferQueueClient(f"client of {namespace}", self.info)
        self.client.initialize_storage_manager("SimpleStorage", self.conf.backend.SimpleStorage)

    def close(self, ray: Any) -> None:
        self.client.close()
        for actor in (*self.units.values(), self.controller):
            ray.get(actor.shutdown.remote())
            ray.kill(actor)


@pytest.fixture
def queues(ray: Any) -> Iterator[list[Queue]]:
    """Two queues, whose units are made in the two known ways."""
    sized = [SimpleStorageUnit.options(num_cpus=1).remote(storage_unit_size=3)]
    configured = [SimpleStorageUnit.remote({"total_storage_size": None, "num_data_storage_units": 2}) for _ in range(2)]
    made = [Queue("one", sized), Queue("two", configured)]
    yield made
    for queue in made:
        queue.close(ray)
    until(lambda: not hosts(), f"the processes of the actors end: {hosts()}")


def test_two_queues_driven_from_one_loop_have_nothing_in_common(ray: Any, queues: list[Queue]) -> None:
    async def use(queue: Queue, start: int) -> Any:
        table = TensorDict({"x": torch.arange(start, start + 6).reshape(3, 2)}, batch_size=[3])
        await queue.client.async_put(table, partition_id="train/rollout.0")
        meta = await queue.client.async_get_meta(["x"], 3, "train/rollout.0", task_name="train")
        return await queue.client.async_get_data(meta), await queue.client.async_list_units()

    async def both() -> Any:
        return await asyncio.gather(*(use(queue, 100 * i) for i, queue in enumerate(queues)))

    for i, (data, units) in enumerate(asyncio.run(both())):
        assert data["x"].values().tolist() == list(range(100 * i, 100 * i + 6))
        assert len(units) == (1, 2)[i]
        assert sum(unit.samples for unit in units) == 3
        listed = ray.get(queues[i].controller.list_partitions.remote())
        assert listed == ["train/rollout.0"]
        snapshot = ray.get(queues[i].controller.get_partition_snapshot.remote("train/rollout.0"))
        assert snapshot.consumption_status["train"].sum() == 3


def test_the_size_of_a_unit_is_a_limit(queues: list[Queue]) -> None:
    four = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    with pytest.raises(RuntimeError, match="Storage capacity exceeded"):
        asyncio.run(queues[0].client.async_put(four, partition_id="p"))
    asyncio.run(queues[1].client.async_put(four, partition_id="p"))


def test_another_process_uses_a_queue_by_its_addresses(ray: Any, queues: list[Queue]) -> None:
    @ray.remote(num_cpus=0)
    def put(conf: Any) -> list[str]:
        import torch
        from tensordict import TensorDict

        from transfer_queue import TransferQueueClient

        client = TransferQueueClient("elsewhere", conf.controller.zmq_info)
        client.initialize_storage_manager("AsyncSimpleStorageManager", conf.backend.SimpleStorage)
        client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
        return client.get_partition_list()

    assert ray.get(put.remote(queues[1].conf)) == ["p"]
    assert asyncio.run(queues[0].client.async_get_partition_list()) == []


def test_a_controller_without_units_refuses_data_and_says_why(ray: Any) -> None:
    controller = TransferQueueController.remote()
    client = AsyncTransferQueueClient("client", process_zmq_server_info(controller))
    with pytest.raises(RuntimeError, match="unit"):
        asyncio.run(client.async_put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p"))
    with pytest.raises(ValueError, match="no zmq_info"):
        client.initialize_storage_manager("SimpleStorage", {})
    with pytest.raises(AssertionError, match="'NoSuchStore'"):
        client.initialize_storage_manager("NoSuchStore", {})
    client.close()
    ray.get(controller.shutdown.remote())
    ray.kill(controller)


def test_options_that_a_program_adds_reach_the_actors_of_init(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transfer_queue

    seen: list[str] = []
    for cls in (transfer_queue.controller.TransferQueueController, simple_storage.SimpleStorageUnit):

        def options(*, _name: str = cls.__name__, _inner: Any = cls.options, **given: Any) -> Any:
            seen.append(_name)
            return _inner(**{"runtime_env": {"env_vars": {"MARK": _name}}, **given})

        monkeypatch.setattr(cls, "options", options)
    transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    transfer_queue.close()
    assert seen == ["TransferQueueController", "SimpleStorageUnit"]


def test_a_bad_argument_of_a_unit_is_told_as_what_it_is(ray: Any) -> None:
    unit = SimpleStorageUnit.remote(storage_unit_size=-1)
    with pytest.raises(ValueError, match="storage_unit_size: got -1"):
        ray.get(unit.get_zmq_server_info.remote())
    ray.kill(unit)
    with pytest.raises(TypeError, match=r"SimpleStorageUnit\.remote"):
        SimpleStorageUnit(3)
