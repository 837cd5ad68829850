"""A data loader over a stream, with workers that share its batches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, get_worker_info

from transfer_queue.dataloader._packing import Packed, pack
from transfer_queue.dataloader._turns import Run, Turns
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import WrongTypeError
from transfer_queue.metadata import BatchMeta

__all__ = ["StreamingDataLoader"]

_log = logging.getLogger(__name__)


def _identity(piece: Any) -> Any:
    return piece


class _Attach:
    """Gives the dataset of a worker what it shares with the others."""

    def __init__(self, turns: Turns, worker_init_fn: Callable[[int], None] | None) -> None:
        self._turns, self._worker_init_fn = turns, worker_init_fn

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        assert isinstance(worker.dataset, StreamingDataset)
        worker.dataset._turns = self._turns
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


class _Collate:
    """Applies a function to every micro-batch of a batch, in a worker, and packs the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, batch: tuple[list[Any], int]) -> Packed:
        pieces, number = batch
        return pack(([self._collate_fn(piece) for piece in pieces], number))


class StreamingDataLoader(DataLoader[Any]):
    """Loads the micro-batches of a `StreamingDataset`, here or in workers.

    Workers share the batches: each batch is fetched by one of them, read and processed there, and comes out in the
    order of its number. The stream is the same for any number of workers, with all micro-batches of a batch together.
    With workers, an iteration that is left early is taken up by the next one.

    What was yielded is kept until ``step``: ``reset`` replays it from memory, then the stream goes on. Both take effect
    with the next micro-batch, also in an iteration that is in progress; what workers have prefetched of the old
    partition is dropped. After an error the next iteration tries the batch again that has failed.

    Args:
        dataset: the stream. It is not copied, and its own ``reset`` and ``step`` reach the workers too.
        num_workers: processes that load; 0: the calling one.
        collate_fn: applied to every micro-batch where it is loaded.
        pin_memory: copy tensors to pinned memory; without an accelerator nothing is pinned.
        worker_init_fn: called in every worker with its number.
        multiprocessing_context: how workers start: ``"fork"``, ``"spawn"``, ``"forkserver"``.
        prefetch_factor: batches that each worker loads ahead, by default 2.
        persistent_workers: keep the workers when the stream ends, for the next partition.
        pin_memory_device: as torch takes it.

    Raises:
        TypeError: the dataset is no `StreamingDataset`.
        ValueError: what torch's ``DataLoader`` refuses.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> config = tq.init({"controller": {"polling_mode": True}})
        >>> batch = TensorDict({"x": torch.arange(8)}, batch_size=[8])
        >>> _ = tq.get_client().put(batch, partition_id="train_0")
        >>> stream = tq.StreamingDataset(
        ...     config, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id="train_0", task_name="train",
        ...     dp_rank=0, should_check_consumption_status=True,
        ... )
        >>> loader = tq.StreamingDataLoader(stream, num_workers=2)
        >>> [data["x"].tolist() for data, meta in loader]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> tq.close()
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        if not isinstance(dataset, StreamingDataset):
            raise WrongTypeError(
                f"dataset: got {type(dataset).__name__}, want a StreamingDataset", "StreamingDataLoader"
            )
        collate: Callable[[Any], Any] = collate_fn or _identity
        attach: Callable[[int], None] | None = worker_init_fn
        self._turns: Turns | None = None
        if num_workers > 0:
            self._turns = Turns()
            collate, attach = _Collate(collate), _Attach(self._turns, worker_init_fn)
            weakref.finalize(self, self._turns.end)  # before torch ends the workers, so that none is waited for
        if pin_memory and not torch.accelerator.is_available():
            _log.info("pin_memory: there is no accelerator, nothing is pinned")
            pin_memory = False
        self._loaded: list[list[Any]] = []
        self._position = (0, 0)  # of the next micro-batch in what is loaded
        self._numbers = dataset.batch_index  # the first that is not loaded
        self._running: Iterator[Any] | None = None
        self._run: Run | None = None
        self._seen = (dataset._steps, dataset._resets)
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            worker_init_fn=attach,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def reset(self) -> None:
        """Begin again; see `StreamingDataset.reset`."""
        self._stream.reset()

    def step(self, partition_id: str) -> None:
        """Go on with another partition; see `StreamingDataset.step`."""
        self._stream.step(partition_id)
        self._follow()

    def get_buffer(self) -> list[Any]:
        """What a reset would replay: batches when the calling process loads, micro-batches when workers do."""
        if self._turns is None:
            return self._stream.buffer
        self._follow()
        return [piece for pieces in self._loaded for piece in pieces]

    @property
    def _stream(self) -> StreamingDataset:
        stream = self.dataset
        assert isinstance(stream, StreamingDataset)
        return stream

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator class
        return super().__iter__() if self._turns is None else self._micro_batches(self._turns)

    def _micro_batches(self, turns: Turns) -> Iterator[Any]:
        if any(worker.exitcode for worker in getattr(self._running, "_workers", ())):
            self._retire(broken=True)  # torch has raised it wherever the program was
        while True:
            self._follow()
            batch, piece = self._position
            if batch == len(self._loaded):
                if not self._load(turns):
                    return
            elif piece == len(self._loaded[batch]):
                self._position = (batch + 1, 0)
            else:
                self._position = (batch, piece + 1)
                yield _own(self._loaded[batch][piece])

    def _follow(self) -> None:
        """Do what the dataset was told since."""
        stream = self._stream
        (steps, resets), self._seen = self._seen, (stream._steps, stream._resets)
        if steps != stream._steps:
            self._retire(broken=False)
            self._loaded, self._numbers, self._run = [], 0, None
        if (steps, resets) != self._seen:
            self._position = (0, 0)

    def _load(self, turns: Turns) -> bool:
        """Take the next batch from the workers; returns whether there is one."""
        try:
            if self._running is None:
                consumed = self._run is not None and self._run.consumed
                self._run = turns.begin(self._stream.partition_id, self._numbers, consumed)
                self._running = super().__iter__()
            pieces, number = next(self._running)
        except StopIteration:
            self._running = None
            return False
        except BaseException:
            self._retire(broken=True)
            raise
        self._loaded.append(pieces)
        self._numbers = number + 1
        return True

    def _retire(self, broken: bool) -> None:
        """End what the workers do; broken ones are not used again."""
        running, self._running = self._running, None
        if self._turns is not None:
            self._turns.end()
        if broken or not self.persistent_workers:
            self._iterator = None
            # It would also happen when nobody holds the iterator any more, but the traceback of an error does.
            getattr(running, "_shutdown_workers", bool)()


def _own(piece: Any) -> Any:
    """A micro-batch whose columns and tags its user may replace without changing what a reset replays."""
    if isinstance(piece, tuple) and len(piece) == 2:
        data, meta = piece
        if isinstance(data, TensorDict) and isinstance(meta, BatchMeta):
            return data.copy(), meta.copy()
    return piece
