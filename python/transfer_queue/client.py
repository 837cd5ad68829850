"""The low-level client: batches of samples by index, and what is produced and consumed."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDict

from transfer_queue import _arguments, _calls, _checkpoints, _put_requests, _requests, _session
from transfer_queue._calls import Call
from transfer_queue._whole_numbers import whole_number
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage import managers
from transfer_queue.utils.zmq_utils import ZMQServerInfo

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient", "UnitInfo"]


class UnitInfo(NamedTuple):
    """A storage unit. Sizes are bytes; a limit of 0 means none.

    Attributes:
        unit_id: name of the unit.
        state: ``"ACTIVE"``; ``"DRAINING"`` while `drain` moves everything off it, ``"DRAINED"`` when it holds nothing,
            ``"CORDONED"`` when a drain has ended before that; ``"UNAVAILABLE"`` when it cannot be reached.
        host: name of the host it runs on.
        memory_used_bytes: payload of cells and reservations, also of cleared cells that a reader still holds, and of
            values on their way to and from disk.
        disk_used_bytes: payload of values on disk and of reservations there.
        samples: samples placed on the unit.
        cells: stored cells.
        leases: reads in progress and zero-copy views.
        staged: writes in progress.
        disk_cells: cells that lie on disk.
        disk_physical_bytes: space that their files take, with small values that were cleared until they are compacted.
        spilled_bytes: moved to disk so far to make room in memory.
        promoted_bytes: moved back to memory so far.
        compacted_bytes: copied on disk so far to give space back.
        fallback_cells: belonged on disk so far but stayed in memory, because they could not be written.
        disk_logical_bytes: payload of the cells on disk; one that several share (``dedup``) counts for each.
        memory_cells: cells that lie in memory.
        memory_logical_bytes: likewise, their payload.
        memory_physical_bytes: pages of memory that hold cells or are kept for the next.
        written_cells: went to disk so far when they were put.
        written_bytes: their payload.
        spilled_cells: see ``spilled_bytes``.
        promoted_cells: see ``promoted_bytes``.
        lost_cells: were lost with an earlier process of the unit, see ``list_lost``.
    """

    unit_id: str
    state: str
    host: str
    memory_used_bytes: int
    memory_limit_bytes: int
    disk_used_bytes: int
    disk_limit_bytes: int
    samples: int
    sample_limit: int
    cells: int
    leases: int
    staged: int
    disk_cells: int = 0
    disk_physical_bytes: int = 0
    spilled_bytes: int = 0
    promoted_bytes: int = 0
    compacted_bytes: int = 0
    fallback_cells: int = 0
    disk_logical_bytes: int = 0
    memory_cells: int = 0
    memory_logical_bytes: int = 0
    memory_physical_bytes: int = 0
    written_cells: int = 0
    written_bytes: int = 0
    spilled_cells: int = 0
    promoted_cells: int = 0
    lost_cells: int = 0


_T = TypeVar("_T")


def _by_partition(metadata: BatchMeta) -> list[BatchMeta]:
    """Batches of one partition each; most often the batch itself."""
    return [metadata] if len(set(metadata.partition_ids)) <= 1 else metadata.chunk_by_partition()


class AsyncTransferQueueClient:
    """Client with coroutines. It keeps no state of its own: any thread and any event loop may use it.

    A client made by hand needs no ``init`` in its process: it joins the session at the address by itself.

    Args:
        client_id: name of the client.
        controller_info: address of the controller, ``controller.zmq_info`` of the session's configuration.
        zmq_io_threads: accepted for programs of the peer package, without effect; at least 1.
        zmq_max_sockets: likewise.

    Raises:
        ValueError: no address, or a number below 1.
        TypeError: the address is something else.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        if controller_info is None:
            raise InvalidArgumentError("controller_info cannot be None, want controller.zmq_info of the configuration")
        if not isinstance(controller_info, ZMQServerInfo):
            raise WrongTypeError(f"controller_info: got {type(controller_info).__name__}, want a ZMQServerInfo")
        for name, number in (("zmq_io_threads", zmq_io_threads), ("zmq_max_sockets", zmq_max_sockets)):
            if number is not None:
                whole_number(number, name)
        self.client_id, self.controller_info = client_id, controller_info
        self.storage_manager: Any = None

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Make ``storage_manager``. Any process may do it, any number of times.

        Args:
            manager_type: name of the backend, ``"SimpleStorage"``.
            config: its section of the configuration. The units in ``zmq_info`` join the session if they have not yet.

        Raises:
            UnknownManagerError: no storage manager has that name (an AssertionError and a ValueError).
            UnimplementedError: it is one of the user's own, for another store (a NotImplementedError).
            InvalidArgumentError: the section has no addresses of units (a ValueError).
        """
        self.storage_manager = managers.initialized(self._session(), manager_type, config)

    def _session(self, timeout: float | None = None) -> _session.Session:
        return _session.join(self.controller_info, timeout)

    async def _await(self, call: Call[_T]) -> _T:
        return await _calls.run_async(self._session().handle, call)

    async def async_get_meta(
        self,
        data_fields: list[str],
        batch_size: int | None,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        timeout: float | None = None,
        token_budget: float | None = None,
    ) -> BatchMeta:
        """Describe samples: new ones (``insert``), unconsumed ready ones (``fetch``), or all (``force_fetch``).

        Args:
            data_fields: fields that the samples have, or will have.
            batch_size: number of samples; ignored by ``force_fetch``.
            partition_id: the partition; ``insert`` creates it.
            mode: ``"insert"``, ``"fetch"`` or ``"force_fetch"``.
            task_name: the consumer; a fetch marks what it returns as consumed by this task.
            sampling_config: further arguments of the sampler.
            timeout: seconds that a fetch waits for enough samples, by default ``TQ_CONTROLLER_GET_METADATA_TIMEOUT``.
            token_budget: the most tokens of a batch of a stream, instead of ``batch_size``; see
                `StreamingTokenBudgetSampler`.

        Raises:
            InvalidArgumentError: an argument makes no sense (a ValueError).
            DeadlineExceededError: there were not enough samples in time; nothing was consumed (a TimeoutError).
        """
        return await self._await(
            _requests.get_meta(
                self._session(timeout),
                data_fields,
                batch_size,
                partition_id,
                mode,
                task_name,
                sampling_config,
                timeout,
                token_budget,
            )
        )

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Any = None,
        timeout: float | None = None,
        custom_meta: list[dict[str, Any]] | None = None,
        is_last: bool = False,
    ) -> BatchMeta:
        """Write columns of samples: those of ``metadata``, or new ones without keys in ``partition_id``.

        Args:
            data: the columns.
            metadata: the samples.
            partition_id: the partition of new samples.
            data_parser: see `kv_batch_put`.
            timeout: seconds.
            custom_meta: a tag per row, merged onto those of the samples with the same write.
            is_last: with this write the production of the partition is complete; see `StreamingTokenBudgetSampler`. It
                is open again when samples are made after the last one was cleared.

        Returns:
            ``metadata`` itself with the new fields, all ready; or new metadata.

        Raises:
            StorageKeyNotFoundError: a sample was cleared meanwhile (a KeyError). Nothing was written.
            SchemaMismatchError: other samples hold a column with another dtype (a ValueError). Nothing was written.
        """
        return await self._await(
            _put_requests.put(
                self._session(timeout),
                data,
                metadata,
                partition_id,
                data_parser,
                timeout,
                custom_meta,
                is_last,
            )
        )

    async def async_update(
        self, metadata: BatchMeta, values: TensorDict, merge_fn: Any, timeout: float | None = None
    ) -> BatchMeta:
        """Store ``merge_fn(stored, new)`` in every cell of the samples; see ``kv_batch_update``."""
        return await self._await(_put_requests.update(self._session(timeout), metadata, values, merge_fn, timeout))

    async def async_get_data(
        self, metadata: BatchMeta | None, layout: str | None = None, copy: bool = True, timeout: float | None = None
    ) -> TensorDict:
        """Read the fields of the samples; see ``kv_batch_get`` for ``layout`` and ``copy``.

        Raises:
            StorageKeyNotFoundError: a sample was cleared meanwhile (a KeyError).
        """
        if metadata is None:  # as programs of the peer package have it on ranks that read nothing
            metadata = BatchMeta.empty()
        if not _arguments.batch_meta(metadata, "get_data").size or not metadata.field_names:
            return TensorDict({}, batch_size=[0])
        parts = [
            await self._await(_requests.get_data(self._session(timeout), part, layout, copy, timeout))
            for part in _by_partition(metadata)
        ]
        return _joined(parts, metadata)

    async def async_clear_samples(self, metadata: BatchMeta, timeout: float | None = None) -> None:
        """Remove the samples. Those that are gone already are ignored."""
        if _arguments.batch_meta(metadata, "clear_samples").size:
            for part in _by_partition(metadata):
                await self._await(_requests.clear_samples(self._session(timeout), part, None, timeout))

    async def async_clear_partition(self, partition_id: str, timeout: float | None = None) -> None:
        """Remove a partition with all its samples; one that does not exist is ignored."""
        await self._await(_requests.clear_partition(self._session(timeout), partition_id, timeout))

    async def async_kv_retrieve_meta(
        self, keys: str | list[str], partition_id: str, create: bool = False, timeout: float | None = None
    ) -> BatchMeta:
        """Describe the samples of keys; missing ones are created with ``create``, otherwise left out."""
        return await self._await(
            _requests.kv_retrieve_meta(self._session(timeout), keys, partition_id, create, timeout)
        )

    async def async_kv_retrieve_keys(
        self, global_indexes: int | list[int], partition_id: str, timeout: float | None = None
    ) -> list[str | None]:
        """The key of every index, None where there is none."""
        return await self._await(
            _requests.kv_retrieve_keys(self._session(timeout), global_indexes, partition_id, timeout)
        )

    async def async_kv_list(self, partition_id: str | None = None, timeout: float | None = None) -> dict[str, Any]:
        """Keys and tags of one or all partitions."""
        return await self._await(
            _requests.kv_list(self._session(timeout), partition_id, None, None, None, None, timeout)
        )

    async def async_kv_clear_fields(
        self, keys: str | list[str], partition_id: str, fields: str | list[str], timeout: float | None = None
    ) -> None:
        """Remove columns of samples; see ``kv_clear``."""
        await self._await(_requests.kv_clear(self._session(timeout), keys, partition_id, fields, timeout))

    async def async_set_custom_meta(self, metadata: BatchMeta, timeout: float | None = None) -> None:
        """Store the tags of the metadata as those of its samples."""
        if _arguments.batch_meta(metadata, "set_custom_meta").size:
            for part in _by_partition(metadata):
                await self._await(_requests.set_custom_meta(self._session(timeout), part, timeout))

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``(int64[n] sorted indexes, int8[n] consumed)`` of a task, ``(None, None)`` for an unknown partition."""
        known = await self._await(_requests.consumption(self._session(timeout), task_name, partition_id, timeout))
        return (None, None) if known is None else _table_of(known, flat=True)

    async def async_get_production_status(
        self, data_fields: list[str], partition_id: str, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``(int64[n] sorted indexes, int8[n, fields] produced)``; ``(None, None)`` when something is unknown."""
        if not data_fields:
            return None, None
        known = await self._await(_requests.production(self._session(timeout), data_fields, partition_id, timeout))
        return (None, None) if known is None else _table_of(known, flat=False)

    async def async_check_consumption_status(
        self, task_name: str, partition_id: str, timeout: float | None = None
    ) -> bool:
        """Whether the task has consumed every sample; False for an unknown or empty partition."""
        known = await self._await(_requests.progress(self._session(timeout), partition_id, task_name, timeout))
        return known is not None and known[0] > 0 and known[0] == known[1]

    async def async_check_production_status(
        self, data_fields: list[str], partition_id: str, timeout: float | None = None
    ) -> bool:
        """Whether every sample has all these fields; False when something is unknown."""
        _, produced = await self.async_get_production_status(data_fields, partition_id, timeout)
        return produced is not None and bool(produced.all())

    async def async_check_production_completed(self, partition_id: str, timeout: float | None = None) -> bool:
        """Whether a ``put(..., is_last=True)`` has declared the production of a partition complete."""
        return await self._await(_requests.production_completed(self._session(timeout), partition_id, timeout))

    async def async_check_stream_drained(self, task_name: str, partition_id: str, timeout: float | None = None) -> bool:
        """Whether production is complete and the task has consumed every sample; False for an unknown partition.

        Raises:
            WrongTypeError: no task is named (a TypeError): a wait for the end of nobody would have none.
        """
        return await self._await(_requests.stream_drained(self._session(timeout), task_name, partition_id, timeout))

    async def async_reset_consumption(
        self, partition_id: str, task_name: str | None = None, timeout: float | None = None
    ) -> bool:
        """Forget what a task, or every task, has consumed."""
        await self._await(_requests.reset_consumption(self._session(timeout), partition_id, task_name, timeout))
        return True

    async def async_get_partition_list(self, timeout: float | None = None) -> list[str]:
        """Names of the partitions in the order of their creation."""
        return await self._await(_requests.partitions(self._session(timeout), timeout))

    async def async_list_units(self, timeout: float | None = None) -> list[UnitInfo]:
        """The storage units of the session."""
        return unit_infos(await self._await(_requests.units(self._session(timeout), timeout)))

    async def async_save_controller_checkpoint(self, path: Any, timeout: float | None = None) -> None:
        """Save partitions, keys, tags, consumption and sampler to a file, without values; see ``save_checkpoint``."""
        await self._await(_checkpoints.save_part("state", path, "save_controller_checkpoint", timeout))

    async def async_load_controller_checkpoint(self, path: Any, timeout: float | None = None) -> None:
        """Replace everything by a saved file and the values that ``load_storage_checkpoint`` has named before.

        Raises:
            InvalidStateError: the samples have values, and none were named. Nothing has changed.
            CorruptionError: the values are not those of these samples (a RuntimeError). Nothing has changed.
        """
        await self._await(_checkpoints.load("state", path, "load_controller_checkpoint", timeout))

    async def async_save_storage_checkpoint(self, directory: Any, timeout: float | None = None) -> None:
        """Save the values of all samples to a folder; see ``save_checkpoint``."""
        await self._await(_checkpoints.save_part("values", directory, "save_storage_checkpoint", timeout))

    async def async_load_storage_checkpoint(self, directory: Any, timeout: float | None = None) -> None:
        """Check a folder of values and name it for the ``load_controller_checkpoint`` that must follow."""
        await self._await(_checkpoints.load("values", directory, "load_storage_checkpoint", timeout))

    def close(self) -> None:
        """Leave a session that this process has joined only by clients made by hand.

        The session that ``init`` opened or joined is left by ``transfer_queue.close()``.
        """
        _session.leave(self.controller_info)


def unit_infos(rows: list[list[Any]]) -> list[UnitInfo]:
    """The units of an answer to a request for them."""
    return [UnitInfo(*row[: len(UnitInfo._fields)]) for row in rows]


def _joined(parts: list[TensorDict], metadata: BatchMeta) -> TensorDict:
    """Rows of several partitions in the order of the metadata."""
    if len(parts) == 1:
        return parts[0]
    seen: dict[str, list[int]] = {}
    for row, partition in enumerate(metadata.partition_ids):
        seen.setdefault(partition, []).append(row)
    order = [row for rows in seen.values() for row in rows]
    joined: TensorDict = TensorDict.cat(parts)
    return joined[sorted(range(len(order)), key=order.__getitem__)]


def _table_of(known: tuple[list[int], int, bytes], flat: bool) -> tuple[torch.Tensor, torch.Tensor]:
    indexes, width, table = known
    status = torch.tensor(list(table), dtype=torch.int8)
    return torch.tensor(indexes, dtype=torch.int64), status if flat else status.reshape(len(indexes), width)


class _Waiting(AsyncTransferQueueClient):
    """The same coroutines with calls that wait, so that they run to their end when they are started."""

    async def _await(self, call: Call[_T]) -> _T:
        return _calls.run(self._session().handle, call)


def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("a call that waits was suspended")


class TransferQueueClient(AsyncTransferQueueClient):
    """Client whose methods wait, beside the coroutines; the documentation of ``async_x`` is that of ``x``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> client = tq.get_client()
        >>> batch = TensorDict({"prompt": torch.arange(8).reshape(4, 2)}, batch_size=[4])
        >>> _ = client.put(batch, partition_id="train")
        >>> meta = client.get_meta(["prompt"], batch_size=3, partition_id="train", task_name="rollout")
        >>> client.get_data(meta)["prompt"].unbind()[2]
        tensor([4, 5])
        >>> client.check_consumption_status("rollout", "train")
        False
        >>> tq.close()
    """

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        super().__init__(client_id, controller_info, zmq_io_threads, zmq_max_sockets)
        self._sync = _Waiting(client_id, controller_info)

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int | None,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        timeout: float | None = None,
        token_budget: float | None = None,
    ) -> BatchMeta:
        """See `async_get_meta`."""
        return _finished(
            self._sync.async_get_meta(
                data_fields, batch_size, partition_id, mode, task_name, sampling_config, timeout, token_budget
            )
        )

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Any = None,
        timeout: float | None = None,
        custom_meta: list[dict[str, Any]] | None = None,
        is_last: bool = False,
    ) -> BatchMeta:
        """See `async_put`."""
        return _finished(self._sync.async_put(data, metadata, partition_id, data_parser, timeout, custom_meta, is_last))

    def update(self, metadata: BatchMeta, values: TensorDict, merge_fn: Any, timeout: float | None = None) -> BatchMeta:
        """See `async_update`."""
        return _finished(self._sync.async_update(metadata, values, merge_fn, timeout))

    def get_data(
        self,
        metadata: BatchMeta | None,
        layout: str | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> TensorDict:
        """See `async_get_data`."""
        return _finished(self._sync.async_get_data(metadata, layout, copy, timeout))

    def clear_samples(self, metadata: BatchMeta, timeout: float | None = None) -> None:
        """See `async_clear_samples`."""
        return _finished(self._sync.async_clear_samples(metadata, timeout))

    def clear_partition(self, partition_id: str, timeout: float | None = None) -> None:
        """See `async_clear_partition`."""
        return _finished(self._sync.async_clear_partition(partition_id, timeout))

    def kv_retrieve_meta(
        self,
        keys: str | list[str],
        partition_id: str,
        create: bool = False,
        timeout: float | None = None,
    ) -> BatchMeta:
        """See `async_kv_retrieve_meta`."""
        return _finished(self._sync.async_kv_retrieve_meta(keys, partition_id, create, timeout))

    def kv_retrieve_keys(
        self,
        global_indexes: int | list[int],
        partition_id: str,
        timeout: float | None = None,
    ) -> list[str | None]:
        """See `async_kv_retrieve_keys`."""
        return _finished(self._sync.async_kv_retrieve_keys(global_indexes, partition_id, timeout))

    def kv_list(self, partition_id: str | None = None, timeout: float | None = None) -> dict[str, Any]:
        """See `async_kv_list`."""
        return _finished(self._sync.async_kv_list(partition_id, timeout))

    def kv_clear_fields(
        self,
        keys: str | list[str],
        partition_id: str,
        fields: str | list[str],
        timeout: float | None = None,
    ) -> None:
        """See `async_kv_clear_fields`."""
        return _finished(self._sync.async_kv_clear_fields(keys, partition_id, fields, timeout))

    def set_custom_meta(self, metadata: BatchMeta, timeout: float | None = None) -> None:
        """See `async_set_custom_meta`."""
        return _finished(self._sync.async_set_custom_meta(metadata, timeout))

    def get_consumption_status(
        self,
        task_name: str,
        partition_id: str,
        timeout: float | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `async_get_consumption_status`."""
        return _finished(self._sync.async_get_consumption_status(task_name, partition_id, timeout))

    def get_production_status(
        self,
        data_fields: list[str],
        partition_id: str,
        timeout: float | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `async_get_production_status`."""
        return _finished(self._sync.async_get_production_status(data_fields, partition_id, timeout))

    def check_consumption_status(self, task_name: str, partition_id: str, timeout: float | None = None) -> bool:
        """See `async_check_consumption_status`."""
        return _finished(self._sync.async_check_consumption_status(task_name, partition_id, timeout))

    def check_production_completed(self, partition_id: str, timeout: float | None = None) -> bool:
        """See `async_check_production_completed`."""
        return _finished(self._sync.async_check_production_completed(partition_id, timeout))

    def check_stream_drained(self, task_name: str, partition_id: str, timeout: float | None = None) -> bool:
        """See `async_check_stream_drained`."""
        return _finished(self._sync.async_check_stream_drained(task_name, partition_id, timeout))

    def check_production_status(self, data_fields: list[str], partition_id: str, timeout: float | None = None) -> bool:
        """See `async_check_production_status`."""
        return _finished(self._sync.async_check_production_status(data_fields, partition_id, timeout))

    def reset_consumption(self, partition_id: str, task_name: str | None = None, timeout: float | None = None) -> bool:
        """See `async_reset_consumption`."""
        return _finished(self._sync.async_reset_consumption(partition_id, task_name, timeout))

    def get_partition_list(self, timeout: float | None = None) -> list[str]:
        """See `async_get_partition_list`."""
        return _finished(self._sync.async_get_partition_list(timeout))

    def list_units(self, timeout: float | None = None) -> list[UnitInfo]:
        """See `async_list_units`."""
        return _finished(self._sync.async_list_units(timeout))

    def save_controller_checkpoint(self, path: Any, timeout: float | None = None) -> None:
        """See `async_save_controller_checkpoint`."""
        return _finished(self._sync.async_save_controller_checkpoint(path, timeout))

    def load_controller_checkpoint(self, path: Any, timeout: float | None = None) -> None:
        """See `async_load_controller_checkpoint`."""
        return _finished(self._sync.async_load_controller_checkpoint(path, timeout))

    def save_storage_checkpoint(self, directory: Any, timeout: float | None = None) -> None:
        """See `async_save_storage_checkpoint`."""
        return _finished(self._sync.async_save_storage_checkpoint(directory, timeout))

    def load_storage_checkpoint(self, directory: Any, timeout: float | None = None) -> None:
        """See `async_load_storage_checkpoint`."""
        return _finished(self._sync.async_load_storage_checkpoint(directory, timeout))
