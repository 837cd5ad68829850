"""A partition as a dataset that ends when a task has consumed it."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue import _calls, _environment, _requests
from transfer_queue._whole_numbers import whole_number
from transfer_queue.client import TransferQueueClient
from transfer_queue.dataloader._chunking import chunk_batch_fn
from transfer_queue.dataloader._turns import Pause, Run, Turns, alone
from transfer_queue.errors import DeadlineExceededError, InvalidArgumentError, WrongTypeError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQServerInfo

__all__ = ["StreamingDataset", "default_fetch_batch_fn"]

_log = logging.getLogger(__name__)

# Longest wait between two looks for data, in seconds.
TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL = _environment.seconds(
    "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 0.1
)
_FIRST_WAIT_S = 0.002

Batch = tuple[TensorDict, BatchMeta]


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> Batch | None:
    """Fetch the batch of a number: its data and metadata, or None when there are not enough samples.

    Args:
        tq_client: client of the iterating process.
        data_fields: columns to read.
        batch_size: number of samples.
        partition_id: where they are.
        task_name: the consumer.
        sampling_config: arguments of the sampler: ``dp_rank`` and ``task_name``.
        batch_index: number of the batch in the stream; a sampler that remembers its answers gives all pipeline stages
            that ask for the same number the same batch.
    """
    sampling = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(
        data_fields, batch_size, partition_id, mode="fetch", task_name=task_name, sampling_config=sampling
    )
    return (tq_client.get_data(meta), meta) if meta.size else None


class StreamClient(TransferQueueClient):
    """The client of a stream: a fetch that finds too little waits a moment, and then returns an empty batch.

    Attributes:
        wait_s: how long a fetch without a timeout waits.
        on_fetch: called when samples have been fetched for a task.
        at_end: whether the sampler has said that nothing else will come.
    """

    wait_s = 0.0
    at_end = False
    on_fetch: Callable[[str | None], None] | None = None

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
        """See `AsyncTransferQueueClient.async_get_meta`."""
        fetch = mode == "fetch"
        wait = self.wait_s if fetch and timeout is None else timeout
        try:
            meta = super().get_meta(
                data_fields, batch_size, partition_id, mode, task_name, sampling_config, wait, token_budget
            )
        except DeadlineExceededError:
            if fetch:
                return BatchMeta.empty()
            raise
        self.at_end = bool(meta.extra_info.get("end_of_stream"))
        if fetch and meta.size and self.on_fetch is not None:
            self.on_fetch(task_name)
        return meta

    def progress(self, task_name: str, partition_id: str) -> tuple[int, int] | None:
        """How many samples a partition has, and how many the task has consumed; None for an unknown partition."""
        session = self._session()
        return _calls.run(session.handle, _requests.progress(session, partition_id, task_name, None))


class StreamingDataset(IterableDataset[Any]):
    """Batches of one partition in the order in which they become ready, cut into micro-batches.

    Iterating yields ``(TensorDict, BatchMeta)`` with ``micro_batch_size`` rows and waits for samples that are not there
    yet, also for a partition that does not exist yet. Every batch is kept in ``buffer`` until ``step`` is called.
    Iterating again goes on with the next batch.

    The client is made in the process that iterates, from the address in the configuration; no ``init`` is needed there.

    Args:
        config: configuration of the session as ``init`` returns it.
        batch_size: samples of a fetch. What is left at the end and is less than that is waited for until there is more.
        micro_batch_size: rows of a piece.
        data_fields: columns to read.
        partition_id: the partition to begin with.
        task_name: the consumer.
        dp_rank: rank in the data-parallel group; ranks share the samples of a task.
        should_check_consumption_status: end when the task has consumed the whole partition. How many samples it will
            have is known from the beginning when ``TQ_PRE_ALLOC_SAMPLE_NUM`` is their number; otherwise the end is when
            everything that has been put so far is consumed.
        fetch_batch_fn: gets a batch, see `default_fetch_batch_fn`.
        process_batch_fn: makes pieces of a batch, see `chunk_batch_fn`; may be a generator.

    Raises:
        ValueError: a size below 1, no fields, a negative rank, or a configuration without an address.
        TypeError: names that are no strings, or functions that are not callable.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> config = tq.init({"controller": {"polling_mode": True}})
        >>> batch = TensorDict({"x": torch.arange(6)}, batch_size=[6])
        >>> _ = tq.get_client().put(batch, partition_id="train_0")
        >>> stream = tq.StreamingDataset(
        ...     config, batch_size=3, micro_batch_size=2, data_fields=["x"], partition_id="train_0", task_name="train",
        ...     dp_rank=0, should_check_consumption_status=True,
        ... )
        >>> [data["x"].tolist() for data, meta in stream]
        [[0, 1], [2], [3, 4], [5]]
        >>> stream.reset()
        >>> [data["x"].tolist() for data, meta in stream]
        [[0, 1], [2], [3, 4], [5]]
        >>> tq.close()
    """

    buffer: list[Batch]

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Batch | None] | None = None,
        process_batch_fn: Callable[..., Iterable[Any]] | None = None,
    ) -> None:
        super().__init__()
        op = "StreamingDataset"
        self.batch_size = whole_number(batch_size, "batch_size", op)
        self.micro_batch_size = whole_number(micro_batch_size, "micro_batch_size", op)
        self.dp_rank = whole_number(dp_rank, "dp_rank", op, least=0)
        self._check(data_fields)
        for name, text in {"partition_id": partition_id, "task_name": task_name}.items():
            if not isinstance(text, str):
                raise WrongTypeError(f"{name}: got {type(text).__name__}, want a str", "StreamingDataset")
        for name, function in {"fetch_batch_fn": fetch_batch_fn, "process_batch_fn": process_batch_fn}.items():
            if function is not None and not callable(function):
                raise WrongTypeError(f"{name}: got {type(function).__name__}, want a callable", "StreamingDataset")
        self.config = config
        self.controller_info = _address(config)
        self.data_fields, self.partition_id, self.task_name = list(data_fields), partition_id, task_name
        self.sampling_config = {"dp_rank": self.dp_rank, "task_name": task_name}
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.buffer, self.batch_index = [], 0
        self._client: StreamClient | None = None
        self._turns: Turns | None = None  # set in a worker of a StreamingDataLoader
        self._steps = self._resets = 0
        self._run = self._alone()

    @staticmethod
    def _check(data_fields: Any) -> None:
        if isinstance(data_fields, str) or not isinstance(data_fields, Iterable):
            raise WrongTypeError(
                f"data_fields: got {type(data_fields).__name__}, want a list of str", "StreamingDataset"
            )
        if not all(isinstance(name, str) for name in data_fields):
            raise WrongTypeError("data_fields: want a list of str", "StreamingDataset")
        if not data_fields:
            raise InvalidArgumentError("data_fields: got none, want at least one", "StreamingDataset")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._run = self._alone()

    def reset(self) -> None:
        """Begin again: what is in ``buffer`` is replayed from memory, then fetching goes on."""
        self.batch_index = 0
        self._resets += 1

    def step(self, partition_id: str) -> None:
        """Forget the buffer and go on with another partition."""
        if not isinstance(partition_id, str):
            raise WrongTypeError(f"partition_id: got {type(partition_id).__name__}, want a str", "step")
        self.partition_id, self.buffer, self.batch_index = partition_id, [], 0
        self._steps += 1
        self._run = self._alone()

    def _alone(self, consumed: bool = False) -> Run:
        steps, parent = self._steps, os.getppid() if get_worker_info() else None
        return alone(lambda: self._steps != steps or (parent is not None and os.getppid() != parent), consumed)

    def __iter__(self) -> Iterator[Any]:
        return self._logged(self._pieces() if self._turns is None else self._batches(self._turns))

    def _logged(self, items: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from items
        except Exception:
            _log.exception(
                "stream of task %r, rank %d, partition %r failed", self.task_name, self.dp_rank, self.partition_id
            )
            raise

    def _pieces(self) -> Iterator[Any]:
        """Micro-batches in the process of the caller, or in a worker of another loader than ours."""
        self._run = self._alone(self._run.consumed)
        while True:
            steps, resets = self._steps, self._resets
            batch = self._next_batch()
            if batch is None:
                if self._steps == steps:
                    return
                continue
            for piece in self._process(batch):
                yield piece
                if (self._steps, self._resets) != (steps, resets):
                    break

    def _next_batch(self) -> Batch | None:
        run, position = self._run, self.batch_index
        if position < len(self.buffer):
            batch: Batch | None = self.buffer[position]
        else:
            worker = get_worker_info()
            first, step = (worker.id, worker.num_workers) if worker else (0, 1)
            batch = self._fetch(first + position * step, run)
            if batch is None or run is not self._run:
                return None
            self.buffer.append(batch)
        self.batch_index = position + 1
        return batch

    def _batches(self, turns: Turns) -> Iterator[tuple[list[Any], int]]:
        """Numbered batches of micro-batches, in a worker of our loader, which keeps them for a replay."""
        worker = get_worker_info()
        assert worker is not None
        self.partition_id, run = turns.current()
        number = run.first + worker.id
        while run.wait_for(number):
            try:
                batch = self._fetch(number, run)
                if batch is None:
                    return
                pieces = list(self._process(batch))
            except BaseException:
                run.end()
                raise
            yield pieces, number
            number += worker.num_workers

    def _process(self, batch: Batch) -> Iterable[Any]:
        return self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)

    def _create_client(self) -> StreamClient:
        return StreamClient(f"streaming-{uuid.uuid4().hex[:8]}", self.controller_info)

    def _fetch(self, number: int, run: Run) -> Batch | None:
        """The batch of a number; None when the stream has ended, or nobody wants it any more."""
        pause = Pause(_FIRST_WAIT_S, TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL)
        wait_s = 0.0
        while run.alive:
            began = time.monotonic()
            batch = self._try(number, run, wait_s)
            if batch is not None:
                return batch
            if self._client is not None and self._client.at_end:
                break
            if self._is_consumed(run):
                # Another stage may have fetched this number between the two looks, then the sampler remembers it.
                batch = self._try(number, run, 0.0)
                if batch is not None:
                    return batch
                break
            if wait_s:
                pause.sleep(run, began)
            wait_s = pause.seconds
        run.end()
        return None

    def _try(self, number: int, run: Run, wait_s: float) -> Batch | None:
        if self._client is None:
            self._client = self._create_client()
        client, passed = self._client, False

        def pass_on(task_name: str | None = None) -> None:
            nonlocal passed
            if not passed and task_name in (None, self.task_name):
                passed = True
                self._is_consumed(run)
                run.fetched(number)

        client.wait_s, client.on_fetch, client.at_end = wait_s, pass_on, False
        try:
            batch = self.fetch_batch_fn(
                client,
                self.data_fields,
                self.batch_size,
                self.partition_id,
                self.task_name,
                self.sampling_config,
                number,
            )
        finally:
            client.on_fetch = None
        if batch is not None:
            pass_on()
        return batch

    def _is_consumed(self, run: Run) -> bool:
        """Whether the task has consumed the whole partition, or had done so before its samples were cleared."""
        if not self.should_check_consumption_status:
            return False
        assert self._client is not None
        samples, consumed = self._client.progress(self.task_name, self.partition_id) or (0, 0)
        if samples:
            run.consumed = samples == consumed
        return run.consumed


def _address(config: Any) -> ZMQServerInfo:
    try:
        info = config["controller"]["zmq_info"]
    except (KeyError, TypeError):
        info = None
    if info is None:
        text = "config: no controller.zmq_info, want the configuration that init() returned"
        raise InvalidArgumentError(text, "StreamingDataset")
    if not isinstance(info, ZMQServerInfo):
        text = f"config: controller.zmq_info is a {type(info).__name__}, want a ZMQServerInfo"
        raise WrongTypeError(text, "StreamingDataset")
    return info
