"""What runs in the process of a controller actor: a session that others join by its address.

The methods are coroutines on one event loop, so a slow one holds up no other. They answer questions about metadata and
do not see payload, which clients exchange with the units directly. torch is imported when the first of them needs it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue import _calls, _controller_requests, _metrics, _session, config
from transfer_queue._actor_class import node_address
from transfer_queue._calls import Call
from transfer_queue.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError, UnimplementedError
from transfer_queue.storage import managers
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    import torch

    from transfer_queue._partition_snapshot import PartitionSnapshot
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.metadata import BatchMeta

_T = TypeVar("_T")


class ControllerHost:
    """The controller of a session, and the face that programs know it by.

    Args:
        sampler: sampler, its class or its name; by default the first ready samples are returned.
        polling_mode: whether a fetch without enough samples returns an empty batch at once.
        conf: complete configuration, instead of the defaults with these two.
        environment: variables of the creator, for those that are not set here.
        listen: whether other nodes of the cluster have to reach it, at the address of this one.
    """

    def __init__(
        self,
        sampler: Any = None,
        polling_mode: bool = False,
        conf: Any = None,
        environment: Mapping[str, str] | None = None,
        listen: bool = False,
    ) -> None:
        self._stored: Any = None
        self._is_stored = asyncio.Event()
        self._session: _session.Session | None = None
        self._failed: BaseException | None = None
        try:
            for name, value in (environment or {}).items():
                os.environ.setdefault(name, value)
            if conf is None:
                given = {"polling_mode": polling_mode, **({} if sampler is None else {"sampler": sampler})}
                conf = config.load({"controller": given})
            self._session = _session.own_private(conf, units_join=True, listen=node_address() if listen else "")
            if self._session.restored:
                self._stored = self._session.config
                self._is_stored.set()
        except BaseException as error:
            self._failed = error  # an error of the constructor would reach nobody as what it is

    @property
    def _open(self) -> _session.Session:
        if self._failed is not None:
            raise self._failed
        assert self._session is not None
        return self._session

    async def _client(self) -> AsyncTransferQueueClient:
        """The client of this session in this process."""
        session = self._open
        module = await asyncio.to_thread(importlib.import_module, "transfer_queue.client")
        client: AsyncTransferQueueClient = module.AsyncTransferQueueClient("TransferQueueController", session.info)
        return client

    async def _ask(self, call: Call[_T]) -> _T:
        return await _calls.run_async(self._open.handle, call)

    async def get_zmq_server_info(self) -> ZMQServerInfo:
        """The address with which clients join."""
        return self._open.info

    async def get_session_config(self) -> Any:
        """The configuration that the session has, whether or not it is stored for others."""
        return self._open.config

    async def join_units(self, units: Sequence[ZMQServerInfo]) -> None:
        """Make storage units part of the session."""
        await self._ask(_controller_requests.join_units(units, self._open.timeout_s))

    async def store_config(self, conf: Any) -> None:
        """Store the configuration that attaching processes are given; this lets them in."""
        session = self._open
        if session.workers is not None:
            await asyncio.to_thread(session.workers.prepared, session.timeout_s)
        await self._ask(_controller_requests.store_config(conf, session.timeout_s))
        self._open.config = self._stored = conf
        self._is_stored.set()

    async def get_config(self) -> Any:
        """The stored configuration, None before there is one."""
        self._open  # noqa: B018  raises when the session could not be opened
        return self._stored

    async def wait_config(self, timeout: float) -> Any:
        """The stored configuration; waits until there is one.

        Raises:
            DeadlineExceededError: nobody stored one in time (a TimeoutError).
        """
        self._open  # noqa: B018
        try:
            await asyncio.wait_for(self._is_stored.wait(), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise DeadlineExceededError(f"nobody has stored a configuration within {timeout:.1f} s") from None
        return self._stored

    async def shutdown(self) -> None:
        """End the session. Its clients get Unavailable from now on."""
        session, self._session = self._session, None
        if session is not None:
            self._failed = UnavailableError("the session was closed")
            await asyncio.to_thread(session.close)

    async def register_sampler(self, sampler_or_class: Any) -> None:
        """Replace the sampler of the session by another one, its class, or its name."""
        await self._client()
        from transfer_queue import _requests

        await self._ask(_requests.register_sampler(self._open, sampler_or_class, None))

    async def start_metrics(self, port: int = 0) -> str:
        """Serve metrics over HTTP; returns ``host:port``, of the running page when there is one."""
        return await asyncio.to_thread(_metrics.start_metrics, self._open, port)

    async def register_storage_units_for_metrics(self, storage_unit_infos: Any) -> None:
        """Make sure that the page of metrics shows these units: it shows all that have joined.

        Args:
            storage_unit_infos: the addresses, or a dict of them by name.
        """
        await self.join_units(managers.unit_addresses({"zmq_info": storage_unit_infos}))

    async def save_checkpoint(self, path: str) -> None:
        """Save what the controller knows, without values; see ``save_controller_checkpoint`` of the client."""
        await (await self._client()).async_save_controller_checkpoint(path)

    async def load_checkpoint(self, path: str) -> None:
        """Load what `save_checkpoint` has saved; see ``load_controller_checkpoint`` of the client."""
        await (await self._client()).async_load_controller_checkpoint(path)

    async def update_production_status(
        self,
        partition_id: str,
        global_indexes: Sequence[int],
        field_schema: Mapping[str, Mapping[str, Any]],
        custom_backend_meta: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> bool:
        """What backends of the user's would report; a session of this release produces by its own puts only.

        Raises:
            UnimplementedError: always (a NotImplementedError).
        """
        raise UnimplementedError(
            "the values of this session are put through its units, which tell the controller themselves",
            "update_production_status",
        )

    async def create_partition(self, partition_id: str) -> bool:
        """Create a partition; False when it exists."""
        return await self._ask(_controller_requests.create_partition(partition_id, self._open.timeout_s))

    async def list_partitions(self) -> list[str]:
        """Names of the partitions in the order of their creation."""
        return await (await self._client()).async_get_partition_list()

    async def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """All about a partition at one moment, None for one that does not exist."""
        await self._client()  # has imported torch
        from transfer_queue import _partition_snapshot

        return await self._ask(_partition_snapshot.snapshot(partition_id, self._open.timeout_s))

    async def get_partition_index_range(self, partition_id: str) -> list[int]:
        """Indexes of a partition, ascending, those included that are only reserved."""
        known = await self.get_partition_snapshot(partition_id)
        return sorted(known.global_indexes | known.pre_allocated_global_indexes) if known is not None else []

    async def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Remove a partition with all its samples; what the units store of it is freed as well."""
        await (await self._client()).async_clear_partition(partition_id)

    async def get_metadata(
        self,
        data_fields: list[str],
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        batch_size: int | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See ``get_meta`` of the client."""
        client = await self._client()
        return await client.async_get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config)

    async def generate_batch_meta(
        self, partition_id: str, batch_global_indexes: Sequence[int], data_fields: list[str], mode: str = "fetch"
    ) -> BatchMeta:
        """Metadata of samples by index, in this order. Nothing is consumed, whatever the mode.

        Raises:
            InvalidArgumentError: an index does not belong to the partition (a ValueError).
        """
        found = await self._rows(partition_id, batch_global_indexes, data_fields)
        missing = sorted(set(batch_global_indexes) - set(found.global_indexes))
        if missing:
            raise InvalidArgumentError(f"partition {partition_id!r} has no samples {missing}", "generate_batch_meta")
        return found

    async def scan_data_status(
        self, partition_id: str, data_fields: list[str], task_name: str, batch_size: int | None = None
    ) -> list[int]:
        """Samples that have all these fields and that the task has not consumed, ascending."""
        known = await self.get_partition_snapshot(partition_id)
        return known.ready(data_fields, task_name) if known is not None else []

    async def clear_meta(
        self, global_indexes: Sequence[int], partition_ids: Sequence[str], clear_consumption: bool = True
    ) -> None:
        """Remove samples; what the units store of them is freed as well. What does not exist is ignored."""
        client = await self._client()
        for partition, indexes in _grouped(global_indexes, partition_ids, "clear_meta").items():
            await client.async_clear_samples(await self._rows(partition, indexes))

    async def mark_clearing(self, global_indexes: Sequence[int], partition_ids: Sequence[str]) -> None:
        """Take all fields from samples that are about to be cleared. What does not exist is ignored."""
        for partition, indexes in _grouped(global_indexes, partition_ids, "mark_clearing").items():
            known = await self.get_partition_snapshot(partition)
            rows = await self._rows(partition, indexes)
            if known is not None and rows.size:
                from transfer_queue import _requests

                await self._ask(_requests.clear_samples(self._open, rows, list(known.field_name_mapping), None))

    async def _rows(self, partition: str, indexes: Sequence[int], fields: Sequence[str] = ()) -> BatchMeta:
        """Metadata of those samples of a partition that exist, in the given order."""
        client = await self._client()
        if partition not in await client.async_get_partition_list():
            from transfer_queue.metadata import BatchMeta

            return BatchMeta.empty()
        everything = await client.async_get_meta(list(fields), None, partition, mode="force_fetch")
        places = {index: row for row, index in enumerate(everything.global_indexes)}
        return everything.select_samples([places[index] for index in indexes if index in places])

    async def get_consumption_status(
        self, partition_id: str, task_name: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``(int64[n] sorted indexes, int8[n] consumed)``, ``(None, None)`` for an unknown partition."""
        return await (await self._client()).async_get_consumption_status(task_name, partition_id)

    async def get_production_status(
        self, partition_id: str, data_fields: list[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``(int64[n] sorted indexes, int8[n, fields] produced)``, ``(None, None)`` when something is unknown."""
        return await (await self._client()).async_get_production_status(data_fields, partition_id)

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Forget what a task, or every task, has consumed."""
        return await (await self._client()).async_reset_consumption(partition_id, task_name)

    async def set_custom_meta(self, partition_custom_meta: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
        """Replace the tags of samples: ``{partition: {index: tag}}``. What does not exist is ignored."""
        client = await self._client()
        for partition, tags in partition_custom_meta.items():
            rows = await self._rows(partition, list(tags))
            if rows.size:
                rows.custom_meta = [dict(tags[index]) for index in rows.global_indexes]
                await client.async_set_custom_meta(rows)

    async def kv_retrieve_meta(self, keys: str | list[str], partition_id: str, create: bool = False) -> BatchMeta:
        """Metadata of the samples of keys; missing ones are created with ``create``, otherwise left out."""
        return await (await self._client()).async_kv_retrieve_meta(keys, partition_id, create)

    async def kv_retrieve_keys(self, global_indexes: int | list[int], partition_id: str) -> list[str | None]:
        """The key of every index, None where there is none."""
        return await (await self._client()).async_kv_retrieve_keys(global_indexes, partition_id)

    async def kv_list(self, partition_id: str | None = None) -> dict[str, Any]:
        """Keys and tags of one or all partitions."""
        return await (await self._client()).async_kv_list(partition_id)

    async def kv_clear_fields(
        self, keys: str | list[str], partition_id: str, fields: str | list[str] | None = None
    ) -> None:
        """Remove columns of samples."""
        if fields is None:
            raise InvalidArgumentError("fields is None, want a field or a list of fields", "kv_clear_fields")
        await (await self._client()).async_kv_clear_fields(keys, partition_id, fields)


def _grouped(indexes: Sequence[int] | None, partitions: Sequence[str] | None, op: str) -> dict[str, list[int]]:
    """Indexes by partition."""
    if indexes is None or partitions is None or len(indexes) != len(partitions):
        counts = [None if given is None else len(given) for given in (indexes, partitions)]
        raise InvalidArgumentError(f"got {counts[0]} global_indexes and {counts[1]} partition_ids, want as many", op)
    out: dict[str, list[int]] = {}
    for index, partition in zip(indexes, partitions, strict=True):
        out.setdefault(partition, []).append(index)
    return out
