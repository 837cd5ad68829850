"""Errors of the queue. Each has the code of the core, and also derives from the built-in class that callers catch."""

from __future__ import annotations

from typing import ClassVar

from transfer_queue._codes import Code

__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "CapacityExceededError",
    "CorruptionError",
    "DataLostError",
    "DeadlineExceededError",
    "FailedError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidStateError",
    "NotFoundError",
    "NotInitializedError",
    "ResourceExhaustedError",
    "SchemaMismatchError",
    "StorageFileExistsError",
    "StorageFileNotFoundError",
    "StorageIOError",
    "StorageKeyNotFoundError",
    "TransferQueueError",
    "UnavailableError",
    "UnimplementedError",
    "VersionMismatchError",
    "WrongTypeError",
]


class TransferQueueError(RuntimeError):
    """Base of all errors of the queue.

    Attributes:
        code: the code of the core.
        op: the operation that failed, e.g. ``"put"``, or an empty string.
        retryable: whether the same call may succeed later without any change.
    """

    code: ClassVar[Code] = Code.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, op: str = "") -> None:
        super().__init__(message, op)
        self.message, self.op = message, op

    def __str__(self) -> str:
        return f"{self.op}: {self.message}" if self.op else self.message


class InvalidArgumentError(TransferQueueError, ValueError):
    """An argument has a wrong value."""

    code = Code.INVALID_ARGUMENT


class InvalidStateError(TransferQueueError):
    """The call does not fit the state of the session."""

    code = Code.INVALID_STATE


class NotFoundError(TransferQueueError, KeyError, ValueError):
    """A key, partition or unit does not exist."""

    code = Code.NOT_FOUND


class AlreadyExistsError(TransferQueueError):
    """Something of that name is there already."""

    code = Code.ALREADY_EXISTS


class SchemaMismatchError(TransferQueueError, ValueError):
    """Other samples hold this column with another dtype or kind."""

    code = Code.SCHEMA_MISMATCH


class ResourceExhaustedError(TransferQueueError, MemoryError):
    """A memory limit is reached."""

    code = Code.RESOURCE_EXHAUSTED
    retryable = True


class DeadlineExceededError(TransferQueueError, TimeoutError):
    """The call's time was over. It changed nothing."""

    code = Code.DEADLINE_EXCEEDED
    retryable = True


class CancelledError(TransferQueueError):
    """The call was cancelled."""

    code = Code.CANCELLED


class UnavailableError(TransferQueueError, ConnectionError):
    """The session, or a part of it, is gone."""

    code = Code.UNAVAILABLE
    retryable = True


class StorageIOError(TransferQueueError, OSError):
    """An operation of the file system failed."""

    code = Code.IO


class CorruptionError(TransferQueueError):
    """Data does not have the form it must have."""

    code = Code.CORRUPTION


class VersionMismatchError(TransferQueueError):
    """The other side speaks another version."""

    code = Code.VERSION_MISMATCH


class StorageFileNotFoundError(TransferQueueError, FileNotFoundError):
    """A file or folder does not exist."""

    code = Code.FILE_NOT_FOUND


class StorageFileExistsError(TransferQueueError, FileExistsError):
    """A file or folder is there already."""

    code = Code.FILE_EXISTS


class UnimplementedError(TransferQueueError, NotImplementedError):
    """The session does not know this request."""

    code = Code.UNIMPLEMENTED


class InternalError(TransferQueueError):
    """A fault of the queue itself."""

    code = Code.INTERNAL


class FailedError(TransferQueueError):
    """A callable of the user failed: a merge function, a data parser, or a sampler."""

    code = Code.FAILED


class NotInitializedError(TransferQueueError, AssertionError):
    """This process has no session: call ``init()`` first."""

    code = Code.NOT_INITIALIZED


class StorageKeyNotFoundError(TransferQueueError, KeyError):
    """A sample was cleared before it was read."""

    code = Code.SAMPLE_GONE


class WrongTypeError(TransferQueueError, TypeError):
    """An argument has a wrong type."""

    code = Code.WRONG_TYPE


class DataLostError(TransferQueueError):
    """Values were lost with the storage unit that held them. Writing them again, or clearing them, ends that."""

    code = Code.DATA_LOST


class CapacityExceededError(TransferQueueError):
    """The limit on the number of samples is reached."""

    code = Code.CAPACITY_EXCEEDED


_CLASSES = {cls.code: cls for cls in TransferQueueError.__subclasses__()}


def from_code(code: int, message: str, op: str = "") -> TransferQueueError:
    """Return the error for a code of the core."""
    return _CLASSES.get(Code(code), InternalError)(message, op)
