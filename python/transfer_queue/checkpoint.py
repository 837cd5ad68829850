"""Checkpoints of a whole session, and dumps of chosen rows. The files are described in docs/checkpoint.md.

They are written and read by the process that owns the session; on several hosts it needs to see the same path. Without
``timeout`` a call may take an hour.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue import _calls, _checkpoints, _session
from transfer_queue._calls import Call
from transfer_queue._session import Session
from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import NotInitializedError, TransferQueueError, WrongTypeError

__all__ = [
    "async_dump_data_by_key",
    "async_load_checkpoint",
    "async_load_data_by_key",
    "async_read_row_index",
    "async_save_checkpoint",
    "dump_data_by_key",
    "load_checkpoint",
    "load_data_by_key",
    "read_row_index",
    "save_checkpoint",
]

Path = str | os.PathLike[str]


def _current(op: str, timeout: float | None) -> Session:
    try:
        return _session.current(op, timeout)
    except NotInitializedError as error:
        raise NotInitializedError(f"TransferQueue is not initialized: {error.message}", op) from error


def _beginning(
    op: str, checkpoint_dir: Path, include_storage: bool, metadata: Mapping[str, Any] | None, timeout: float | None
) -> tuple[Session, int, Call[_checkpoints.Parts]]:
    """Everything that can be wrong with the arguments, before anything is written."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise WrongTypeError(f"metadata: got {type(metadata).__name__}, want a dict", op)
    try:
        text = json.dumps({} if metadata is None else dict(metadata))
    except (TypeError, ValueError) as error:
        raise WrongTypeError(f"metadata: {error}, want what JSON can hold", op) from error
    path = _checkpoints.absolute(checkpoint_dir, op)
    session = _current(op, timeout)
    if not include_storage:
        logging.getLogger(__name__).warning(
            "include_storage=False is overridden: the values are only in memory, so they are saved too"
        )
    number = _checkpoints.new_number()
    return session, number, _checkpoints.save_begin(number, path, text, timeout)


def save_checkpoint(
    checkpoint_dir: Path,
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> None:
    """Save everything the session holds: values, keys, tags, consumption, the state of the sampler.

    What is saved is one moment; writers and clears may go on meanwhile. The checkpoint appears, or replaces an older
    one, as a whole when it is complete; when the call fails the older one is still there.

    Args:
        checkpoint_dir: folder of the checkpoint. One that has other things in it is refused.
        include_storage: False is overridden, with a warning in the log.
        metadata: a dict that JSON can hold, kept as ``user_metadata`` in ``metadata.json``.
        timeout: seconds for each of the four steps.

    Raises:
        NotInitializedError: there is no session (a RuntimeError).
        WrongTypeError: metadata is no JSON (a TypeError).
        StorageFileExistsError: checkpoint_dir is something else than a checkpoint (a FileExistsError).
        StorageIOError: a file could not be written (an OSError).
        DeadlineExceededError: it took longer, or another save to the same place did (a TimeoutError).

    Example:
        >>> import tempfile, torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> _ = tq.kv_put("a", "train", {"ids": torch.arange(3)}, tag={"step": 1})
        >>> path = tempfile.mkdtemp()
        >>> tq.save_checkpoint(path, metadata={"step": 1})
        >>> tq.kv_clear("a", "train")
        >>> tq.load_checkpoint(path)
        >>> tq.kv_list("train"), tq.kv_batch_get("a", "train")["ids"].unbind()
        ({'train': {'a': {'step': 1}}}, (tensor([0, 1, 2]),))
        >>> tq.close()
    """
    session, number, begin = _beginning("save_checkpoint", checkpoint_dir, include_storage, metadata, timeout)
    client = TransferQueueClient(f"TransferQueueClient_{session.pid}", session.info)
    try:
        parts = _calls.run(session.handle, begin)
        client.save_controller_checkpoint(parts.state, timeout)
        client.save_storage_checkpoint(parts.values, timeout)
        _calls.run(session.handle, _checkpoints.save_commit(number, timeout))
    except BaseException:
        with contextlib.suppress(TransferQueueError):  # a session that is gone has given it up
            _calls.run(session.handle, _checkpoints.save_abort(number, session.timeout_s))
        raise


async def async_save_checkpoint(
    checkpoint_dir: Path,
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> None:
    """Async twin of `save_checkpoint`."""
    session, number, begin = _beginning("save_checkpoint", checkpoint_dir, include_storage, metadata, timeout)
    client = TransferQueueClient(f"TransferQueueClient_{session.pid}", session.info)
    try:
        parts = await _calls.run_async(session.handle, begin)
        await client.async_save_controller_checkpoint(parts.state, timeout)
        await client.async_save_storage_checkpoint(parts.values, timeout)
        await _calls.run_async(session.handle, _checkpoints.save_commit(number, timeout))
    except BaseException:
        with contextlib.suppress(TransferQueueError):
            await _calls.run_async(session.handle, _checkpoints.save_abort(number, session.timeout_s))
        raise


def load_checkpoint(checkpoint_dir: Path, timeout: float | None = None) -> None:
    """Replace everything the session holds by a checkpoint.

    All files are read and checked first; then old and new change places at once, and a call that fails has changed
    nothing. The session may have another number of units than the one that saved. While it loads, units hold both the
    old and the new values. Indexes are those that were saved. Code in stored objects does not run.

    Args:
        checkpoint_dir: folder of the checkpoint.
        timeout: seconds.

    Raises:
        NotInitializedError: there is no session (a RuntimeError).
        StorageFileNotFoundError: the folder or a file in it is missing (a FileNotFoundError).
        CorruptionError: a file is not as it was written, or no file of a checkpoint (a RuntimeError).
        VersionMismatchError: a newer release wrote it (a RuntimeError).
        ResourceExhaustedError: the units have no room for it (a MemoryError).
    """
    session = _current("load_checkpoint", timeout)
    _calls.run(session.handle, _checkpoints.load("all", checkpoint_dir, "load_checkpoint", timeout))


async def async_load_checkpoint(checkpoint_dir: Path, timeout: float | None = None) -> None:
    """Async twin of `load_checkpoint`."""
    session = _current("load_checkpoint", timeout)
    await _calls.run_async(session.handle, _checkpoints.load("all", checkpoint_dir, "load_checkpoint", timeout))


def dump_data_by_key(
    dump_dir: Path, keys: str | Sequence[str], partition_id: str, timeout: float | None = None
) -> dict[str, Any]:
    """Write chosen samples with their fields and tags to a new folder.

    Args:
        dump_dir: folder that does not exist yet.
        keys: the samples, of one moment.
        partition_id: their partition.
        timeout: seconds.

    Returns:
        ``keys`` that were dumped, ``rows_with_data`` of them that have a field, ``shards`` (files) and ``bytes``.

    Raises:
        NotFoundError: a key does not exist; nothing was written (a RuntimeError).
        StorageFileExistsError: the folder exists (a FileExistsError).

    Example:
        >>> import tempfile, torch
        >>> import transfer_queue as tq
        >>> _ = tq.init()
        >>> _ = tq.kv_put("a", "train", {"ids": torch.arange(3)}, tag={"step": 1})
        >>> path = tempfile.mkdtemp() + "/dump"
        >>> tq.dump_data_by_key(path, ["a"], "train")
        {'keys': ['a'], 'rows_with_data': 1, 'shards': 1, 'bytes': 24}
        >>> tq.kv_clear("a", "train")
        >>> tq.load_data_by_key(path)
        {'a': {'step': 1}}
        >>> tq.close()
    """
    session = _current("dump_data_by_key", timeout)
    return _calls.run(session.handle, _checkpoints.dump(dump_dir, keys, partition_id, timeout))


async def async_dump_data_by_key(
    dump_dir: Path, keys: str | Sequence[str], partition_id: str, timeout: float | None = None
) -> dict[str, Any]:
    """Async twin of `dump_data_by_key`."""
    session = _current("dump_data_by_key", timeout)
    return await _calls.run_async(session.handle, _checkpoints.dump(dump_dir, keys, partition_id, timeout))


def load_data_by_key(dump_dir: Path, timeout: float | None = None) -> dict[str, dict[str, Any]]:
    """Write the samples of a dump into the session, by key: all of them at once, or none.

    Keys that exist get the dumped fields and tags beside what else they have, others are created. The partition is the
    one that was dumped.

    Args:
        dump_dir: folder of the dump.
        timeout: seconds.

    Returns:
        The tag of every key as it is stored now. A value in it that was pickled stays a ``msgspec.msgpack.Ext`` here,
        since nothing of a file may run; ``kv_list`` shows it as it is.

    Raises:
        StorageFileNotFoundError: the folder or a file in it is missing (a FileNotFoundError).
        CorruptionError: a file is not as it was written (a RuntimeError).
        SchemaMismatchError: other samples hold a dumped field with another dtype or kind (a ValueError).
        ResourceExhaustedError: the units have no room for it (a MemoryError).
    """
    session = _current("load_data_by_key", timeout)
    return _calls.run(session.handle, _checkpoints.load_rows(dump_dir, timeout))


async def async_load_data_by_key(dump_dir: Path, timeout: float | None = None) -> dict[str, dict[str, Any]]:
    """Async twin of `load_data_by_key`."""
    session = _current("load_data_by_key", timeout)
    return await _calls.run_async(session.handle, _checkpoints.load_rows(dump_dir, timeout))


def read_row_index(dump_dir: Path, timeout: float | None = None) -> dict[str, dict[str, Any]]:
    """What a dump has: ``{key: {"partition_id", "global_index", "fields", "tag"}}``. Nothing is loaded.

    Raises:
        StorageFileNotFoundError: the folder or its index is missing (a FileNotFoundError).
        CorruptionError: the index is not as it was written (a RuntimeError).
    """
    session = _current("read_row_index", timeout)
    return _calls.run(session.handle, _checkpoints.row_index(dump_dir, timeout))


async def async_read_row_index(dump_dir: Path, timeout: float | None = None) -> dict[str, dict[str, Any]]:
    """Async twin of `read_row_index`."""
    session = _current("read_row_index", timeout)
    return await _calls.run_async(session.handle, _checkpoints.row_index(dump_dir, timeout))
