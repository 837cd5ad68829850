"""`KVBatchMeta`, which ``transfer_queue.metadata`` has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue import _tags
from transfer_queue._per_sample import chunk_slices, deep, merge_extra_info


@dataclasses.dataclass
class KVBatchMeta:
    """Samples of one partition by key, with their tags.

    Attributes:
        keys: the keys, each once.
        tags: one dict per key; copied deeply on construction.
        partition_id: partition of all keys.
        fields: names of the fields that all keys have, None when not known.
        extra_info: anything about the batch; copied deeply on construction.
        size: number of keys at construction.

    Raises:
        ValueError: keys and tags differ in length, or a key or a field is given twice.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, got {len(self.keys)} and {len(self.tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"Got duplicated keys: {_repeated(self.keys)}")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError(f"Got duplicated fields: {_repeated(self.fields)}")
        self.tags = list(map(deep, self.tags))
        self.extra_info = copy.deepcopy(self.extra_info)
        self.size: int = len(self.keys)  # no field: what ``asdict`` returns makes the same batch again

    @classmethod
    def _from_parts(
        cls,
        keys: list[str],
        tags: list[dict[str, Any]],
        partition_id: str | None,
        fields: list[str] | None,
        extra_info: dict[str, Any] | None,
    ) -> KVBatchMeta:
        """Takes parts that are known to fit and belong to nobody else, without a copy."""
        self = cls.__new__(cls)
        self.keys, self.tags, self.partition_id, self.fields = keys, tags, partition_id, fields
        self.extra_info, self.size = extra_info, len(keys)
        return self

    @classmethod
    def _with_packed_tags(
        cls, keys: list[str], tags: bytes | None, partition_id: str | None, fields: list[str] | None
    ) -> KVBatchMeta:
        """`_from_parts` with tags as `_tags.decode` takes them. They are read when somebody looks at them."""
        self = cls.__new__(cls)
        self.keys, self.partition_id, self.fields = keys, partition_id, fields
        self.extra_info, self.size = {}, len(keys)
        self.__dict__["_packed_tags"] = tags, len(keys)
        return self

    if not TYPE_CHECKING:  # else every attribute would be one

        def __getattr__(self, name: str) -> Any:
            state = self.__dict__
            packed = state.get("_packed_tags") if name == "tags" else None
            if packed is not None:
                state.setdefault("tags", _tags.decode(*packed))  # one list, whichever thread was first
                state.pop("_packed_tags", None)
            if name in state:
                return state[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        tags = self.tags  # which changes what there is
        state = {**self.__dict__, "tags": tags}
        state.pop("_packed_tags", None)
        return state

    def __len__(self) -> int:
        return len(self.keys)

    def _part(self, keys: list[str], tags: list[dict[str, Any]]) -> KVBatchMeta:
        """Some of the keys; nothing is shared with this batch but the values nobody can change."""
        fields = None if self.fields is None else list(self.fields)
        return KVBatchMeta._from_parts(
            keys, list(map(deep, tags)), self.partition_id, fields, copy.deepcopy(self.extra_info)
        )

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """A batch of these keys in this order.

        Raises:
            ValueError: a key is given twice.
            RuntimeError: a key is not in this batch.
        """
        wanted = list(keys_to_select)
        if len(set(wanted)) != len(wanted):
            raise ValueError(f"Contain duplicate keys: {_repeated(wanted)}")
        row = {key: i for i, key in enumerate(self.keys)}
        missing = [key for key in wanted if key not in row]
        if missing:
            raise RuntimeError(f"keys {missing} not found in current batch")
        return self._part(wanted, [self.tags[row[key]] for key in wanted])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Reorders keys and tags in place.

        Raises:
            ValueError: not one index per key, or an index is given twice.
            IndexError: an index is beyond the end.
        """
        rows = list(indexes)
        if len(rows) != len(self.keys):
            raise ValueError(f"number of indexes {len(rows)} does not match number of keys {len(self.keys)}")
        if len(set(rows)) != len(rows):
            raise ValueError("Contain duplicate indexes")
        self.keys, self.tags = [self.keys[row] for row in rows], [self.tags[row] for row in rows]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Splits into consecutive parts; the first ``size % chunks`` have one key more, some may be empty."""
        return [self._part(self.keys[part], self.tags[part]) for part in chunk_slices(len(self.keys), chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Joins batches of one partition; empty ones are skipped.

        Raises:
            ValueError: fields or partitions differ, `extra_info` has conflicting values, or a key occurs twice.
        """
        parts = [part for part in data if len(part)]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if part.fields is not None and set(part.fields) != set(first.fields or []):
                raise ValueError(f"Field names do not match: {part.fields} and {first.fields}")
            if part.partition_id != first.partition_id:
                raise ValueError(f"Partition do not match: {part.partition_id!r} and {first.partition_id!r}")
        extra = merge_extra_info(part.extra_info for part in parts)
        return cls(
            keys=[key for part in parts for key in part.keys],
            tags=[tags for part in parts for tags in part.tags],
            partition_id=first.partition_id,
            fields=None if first.fields is None else list(first.fields),
            extra_info=extra or None,
        )


# Where pickles look for it, those of programs that know nothing of this file included.
KVBatchMeta.__module__ = "transfer_queue.metadata"


def _repeated(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
