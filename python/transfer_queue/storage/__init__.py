"""Where programs written for the peer package import storage from: units, and what backends of their own build on."""

from __future__ import annotations

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers import (
    AsyncSimpleStorageManager,
    KVStorageManager,
    StorageManager,
    StorageManagerFactory,
)
from transfer_queue.storage.simple_storage import SimpleStorageUnit

__all__ = [
    "AsyncSimpleStorageManager",
    "KVStorageManager",
    "SimpleStorageUnit",
    "StorageBootstrapProvider",
    "StorageClientFactory",
    "StorageKVClient",
    "StorageKeyNotFoundError",
    "StorageManager",
    "StorageManagerFactory",
]
