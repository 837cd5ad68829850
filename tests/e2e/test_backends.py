"""Backends of the user's own: what may be registered, and that no value goes elsewhere than where it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.storage import (
    AsyncSimpleStorageManager,
    KVStorageManager,
    StorageClientFactory,
    StorageKVClient,
    StorageManagerFactory,
)

CALLS: list[str] = []


class Recorder(StorageKVClient):
    def put(self, keys: list[str], values: list[Any]) -> None:
        CALLS.append("put")

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        CALLS.append("get")
        return []

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        CALLS.append("clear")


class Keyed(KVStorageManager):
    pass


class Louder(AsyncSimpleStorageManager):
    async def get_data(self, metadata: Any) -> Any:
        CALLS.append("get_data")
        return await super().get_data(metadata)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    CALLS.clear()
    StorageClientFactory.register("Recorder")(Recorder)
    StorageManagerFactory.register("Keyed")(Keyed)
    StorageManagerFactory.register("Louder")(Louder)
    yield
    del StorageClientFactory._known["Recorder"]
    del StorageManagerFactory._known["Keyed"], StorageManagerFactory._known["Louder"]


@pytest.mark.parametrize("name", ["Keyed", "Louder"])
def test_a_client_refuses_a_manager_that_it_would_go_past(tq: Any, name: str) -> None:
    client, conf = tq.get_client(), tq.init()
    before = client.storage_manager
    section = {"client_name": "Recorder", "zmq_info": conf.backend.SimpleStorage.zmq_info}
    with pytest.raises(NotImplementedError, match=rf"initialize_storage_manager: storage manager '{name}' \({name}\)"):
        client.initialize_storage_manager(name, section)
    assert client.storage_manager is before
    with pytest.raises(AssertionError, match="'NoSuchStore'"):
        client.initialize_storage_manager("NoSuchStore", section)
    client.initialize_storage_manager("SimpleStorage", section)
    assert type(client.storage_manager) is AsyncSimpleStorageManager
    assert CALLS == []


def test_a_manager_of_a_store_can_be_made_and_says_what_it_cannot_do(tq: Any) -> None:
    client = tq.get_client()
    rows = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    meta = client.put(rows, partition_id="p")
    manager = StorageManagerFactory.create("Keyed", tq.init().controller.zmq_info, {"client_name": "Recorder"})
    assert isinstance(manager, Keyed)
    assert isinstance(manager.storage_client, Recorder)
    assert manager.storage_keys(meta) == [f"{index}@x" for index in meta.global_indexes]
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: manager.put_data(rows, meta),
        "get_data": lambda: manager.get_data(meta),
        "clear": lambda: manager.clear_data(meta, ["x"]),
        "kv_update": lambda: manager.update_data(meta, rows, "add"),
        "cells outside of the session's own units": lambda: manager.notify_data_update("p", [0], {}),
    }
    for what, call in calls.items():
        with pytest.raises(
            NotImplementedError, match=f"{what} is not supported by Keyed; it requires the SimpleStorage"
        ):
            asyncio.run(call())
    assert CALLS == []
    assert client.get_data(meta)["x"].tolist() == [0, 1]


def test_init_refuses_a_registered_backend_by_name(runtime_dir: Any) -> None:
    import transfer_queue

    with pytest.raises(NotImplementedError, match=r"backend\.storage_backend: Keyed"):
        transfer_queue.init({"backend": {"storage_backend": "Keyed", "Keyed": {"client_name": "Recorder"}}})
    with pytest.raises(AssertionError):
        transfer_queue.get_client()
