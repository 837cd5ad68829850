"""Descriptions of samples that travel between processes instead of the samples.

`BatchMeta` names rows by global index, `KVBatchMeta` by key. Both are plain values: they hold no connection, pickle
well, and every selection is a new object.

A `BatchMeta` looks like a list of per-sample dictionaries but is stored by column, because a batch of 100,000 samples
must be split in milliseconds. What differs per sample and is rarely looked at (shapes of ragged fields, tags) is built
when it is asked for.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from transfer_queue._field_schema import FieldSchema, Pick
from transfer_queue._kv_metadata import KVBatchMeta
from transfer_queue._per_sample import (
    chunk_slices,
    deep,
    difference,
    equal,
    int64s,
    listed,
    merge_extra_info,
    per_sample_dicts,
    positions,
    union_dicts,
    wrong_length,
)
from transfer_queue._sample_view import Samples, SampleView

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["BatchMeta", "FieldSchema", "KVBatchMeta", "SampleView"]

_log = logging.getLogger(__name__)

_SHOWN = 8  # indexes in the text of a batch


class BatchMeta:
    """Samples of a batch by global index: what they hold, whether they are ready, and the user's tags.

    Args:
        global_indexes: index of every sample.
        partition_ids: partition of every sample.
        field_schema: name -> ``{dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}``; the shape of a number
            is ``()``.
        production_status: int8[samples], 1 where all fields are ready; zeros when not given.
        extra_info: anything about the batch as a whole.
        custom_meta: a dict of tags per sample.

    Raises:
        ValueError: arguments disagree in length.

    All arguments are copied (dicts one level deep). The length is the number of samples, so an empty one is falsy.
    """

    __slots__ = (
        "_backend_meta",
        "_fields",
        "_generations",
        "_ready",
        "_tags",
        "_tags_out",
        "_tags_shared",
        "extra_info",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    global_indexes: list[int]
    partition_ids: list[str]
    production_status: np.ndarray[Any, np.dtype[np.int8]]
    extra_info: dict[str, Any]
    # Tells a sample from an earlier one with the same index. int64[samples].
    _generations: np.ndarray[Any, np.dtype[np.int64]]
    _fields: dict[str, FieldSchema]
    # Tags are copied late. None: no sample has any. Shared: another batch may hold the same dicts, so they are copied
    # before the user gets to see them. Out: the user has seen them, so another batch gets copies at once.
    _tags: list[dict[str, Any]] | None
    _tags_shared: bool
    _tags_out: bool
    _backend_meta: list[dict[str, Any]] | None
    _ready: bool

    def __init__(
        self,
        global_indexes: Sequence[int] | None = None,
        partition_ids: Sequence[str] | None = None,
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = listed(global_indexes)
        self.partition_ids = listed(partition_ids)
        size = len(self.global_indexes)
        if len(self.partition_ids) != size:
            raise wrong_length("partition_ids", len(self.partition_ids), size)
        if production_status is None:
            self.production_status = np.zeros(size, dtype=np.int8)
        else:
            self.production_status = np.array(production_status, dtype=np.int8).reshape(-1)
            if len(self.production_status) != size:
                raise wrong_length("production_status", len(self.production_status), size)
        self._fields = {}
        self._set_fields({name: FieldSchema.from_dict(one) for name, one in (field_schema or {}).items()})
        self.extra_info = dict(extra_info or {})
        self._generations = np.zeros(size, dtype=np.int64)
        self._tags = per_sample_dicts("custom_meta", custom_meta, size)
        self._tags_shared, self._tags_out = False, False
        self._backend_meta = per_sample_dicts("_custom_backend_meta", _custom_backend_meta, size)
        self._refresh_ready()

    @classmethod
    def _make(
        cls,
        indexes: list[int],
        partition_ids: list[str],
        generations: np.ndarray[Any, np.dtype[np.int64]],
        fields: dict[str, FieldSchema],
        status: np.ndarray[Any, np.dtype[np.int8]],
        extra_info: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Takes ready parts without a copy or a check; tags are set by the caller."""
        self = cls.__new__(cls)
        self.global_indexes, self.partition_ids, self._generations = indexes, partition_ids, generations
        self._fields, self.production_status = fields, status
        self.extra_info = {} if extra_info is None else extra_info
        self._tags, self._tags_shared, self._tags_out, self._backend_meta = None, False, False, None
        self._refresh_ready()
        return self

    @classmethod
    def _from_reply(
        cls,
        indexes: Any,
        generations: Any,
        partition_id: str,
        columns: Iterable[tuple[str, FieldSchema]],
        status: Any,
        tags: list[dict[str, Any]] | None = None,
    ) -> BatchMeta:
        """Batch from a server's reply.

        Args:
            indexes: list, array or bytes of int64[samples].
            generations: the same.
            partition_id: partition of all samples.
            columns: (field, schema) pairs.
            status: bytes or array of int8[samples]; None when all are ready.
            tags: one dict per sample, which now belong to this batch; None when there are none.
        """
        numbers = int64s(indexes)
        size = len(numbers)
        if status is None:
            ready = np.ones(size, dtype=np.int8)
        elif isinstance(status, bytes | bytearray | memoryview):
            ready = np.frombuffer(status, dtype=np.int8).copy()
        else:
            ready = np.array(status, dtype=np.int8)
        made = cls._make(
            indexes if type(indexes) is list else numbers.tolist(),
            [partition_id] * size,
            int64s(generations),
            dict(columns),
            ready,
        )
        made._tags = tags if tags and any(tags) else None
        return made

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Names of the fields, sorted."""
        return sorted(self._fields)

    @property
    def field_schema(self) -> dict[str, dict[str, Any]]:
        """Field -> ``{dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}``, built on every access."""
        return {name: field.to_dict(self.size) for name, field in self._fields.items()}

    @field_schema.setter
    def field_schema(self, schema: Mapping[str, Mapping[str, Any]]) -> None:
        fields = {name: FieldSchema.from_dict(one) for name, one in schema.items()}
        self._check_fields(fields)
        self._fields = fields

    @property
    def is_ready(self) -> bool:
        """True when there are samples and all are ready. Not computed again after `production_status` was edited."""
        return self._ready

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """The tags of every sample; dicts and list may be edited."""
        if self._tags is None:
            self._tags = [{} for _ in self.global_indexes]
        elif self._tags_shared:
            self._tags = list(map(dict.copy, self._tags))
        self._tags_shared, self._tags_out = False, True
        return self._tags

    @custom_meta.setter
    def custom_meta(self, tags: list[dict[str, Any]]) -> None:
        self._tags, self._tags_shared, self._tags_out = tags, False, True

    @property
    def _custom_backend_meta(self) -> list[dict[str, Any]]:
        if self._backend_meta is None:
            self._backend_meta = [{} for _ in self.global_indexes]
        return self._backend_meta

    @_custom_backend_meta.setter
    def _custom_backend_meta(self, meta: list[dict[str, Any]]) -> None:
        self._backend_meta = meta

    @property
    def samples(self) -> Sequence[SampleView]:
        """Read-only views of the samples."""
        return Samples(self)

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        """The dtype of every sample in a field.

        Raises:
            KeyError: there is no such field.
        """
        return [self._field(field_name).dtype] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of every sample in a field.

        Raises:
            KeyError: there is no such field.
        """
        return self._field(field_name).shapes(self.size)

    def _field(self, name: str) -> FieldSchema:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"field {name!r} not found in field_schema, which has {self.field_names}") from None

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.global_indexes[:_SHOWN])) + (", ..." if self.size > _SHOWN else "")
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self._ready}, "
            f"global_indexes=[{shown}], extra_info={self.extra_info})"
        )

    def add_fields(self, tensor_dict: TensorDictBase, set_all_ready: bool = True) -> BatchMeta:
        """Adds the fields of a TensorDict in place, described by its values.

        Args:
            tensor_dict: one row per sample.
            set_all_ready: mark every sample as ready.

        Returns:
            This object.

        Raises:
            ValueError: the number of rows is not the number of samples, or a value cannot be stored.
        """
        rows = tensor_dict.batch_size[0] if tensor_dict.batch_size else 0
        if rows == 0:
            _log.warning("add_fields: the data has no rows, nothing was added")
            return self
        if rows != self.size:
            raise ValueError(f"add_fields: batch size mismatch: {rows} rows of data for {self.size} samples")
        from transfer_queue._columns import pack_table

        return self._apply_columns(pack_table(tensor_dict).schemas(), set_all_ready)

    def apply_field_schema(self, schema: Mapping[str, Mapping[str, Any]], set_all_ready: bool = True) -> BatchMeta:
        """Adds or replaces fields in place, given as in the constructor.

        Raises:
            ValueError: per-sample shapes that are not one per sample.
        """
        return self._apply_columns([(name, FieldSchema.from_dict(one)) for name, one in schema.items()], set_all_ready)

    def _apply_columns(self, columns: Iterable[tuple[str, FieldSchema]], set_all_ready: bool = True) -> BatchMeta:
        self._set_fields(dict(columns))
        if set_all_ready:
            self.production_status[:] = 1
        self._refresh_ready()
        return self

    def _set_fields(self, fields: dict[str, FieldSchema]) -> None:
        self._check_fields(fields)
        self._fields = {**self._fields, **fields}

    def _check_fields(self, fields: Mapping[str, FieldSchema]) -> None:
        for name, field in fields.items():
            if field.rows is not None and field.rows != self.size:
                raise wrong_length(f"field {name!r}: per_sample_shapes", field.rows, self.size)

    def _refresh_ready(self) -> None:
        self._ready = bool(self.global_indexes) and bool((self.production_status == 1).all())

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default``."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Sets one value."""
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Sets several values."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Removes and returns a value; None when there was none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Removes all values."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """True when there is a value for ``key``."""
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of all values."""
        return copy.deepcopy(self.extra_info)

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of all tags, in row order."""
        if self._tags is None:
            return [{} for _ in self.global_indexes]
        return list(map(deep, self._tags))

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merges tags into those of each sample.

        Raises:
            ValueError: not one dict per sample.
        """
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"update_custom_meta: {len(custom_meta)} dicts must match the batch size: {self.size}")
        for tags, more in zip(self.custom_meta, custom_meta, strict=True):
            tags.update(more)

    def clear_custom_meta(self) -> None:
        """Removes the tags of all samples."""
        self.custom_meta = [{} for _ in self.global_indexes]

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """A batch of the samples at these positions, in this order; repeats are allowed.

        Raises:
            ValueError: a position is negative or beyond the end.
        """
        return self._take(Pick(positions(sample_indices, self.size, "select_samples"), self.size))

    def select_fields(self, field_names: Sequence[str] | str) -> BatchMeta:
        """A batch with only these fields; unknown names are ignored."""
        wanted = {field_names} if isinstance(field_names, str) else set(field_names)
        out = self._take(Pick(slice(None), self.size))
        out._fields = {name: field for name, field in self._fields.items() if name in wanted}
        if out._backend_meta is not None:
            out._backend_meta = [
                {name: info for name, info in one.items() if name in wanted or name.startswith("_")}
                for one in out._backend_meta
            ]
        return out

    @overload
    def __getitem__(self, item: int) -> BatchMeta: ...
    @overload
    def __getitem__(self, item: slice) -> BatchMeta: ...
    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self._take(Pick(item, self.size))
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise TypeError(f"batch meta: indexing with {type(item)} is not supported, want int or slice")
        row = int(item) + self.size if item < 0 else int(item)
        if not 0 <= row < self.size:
            raise IndexError(f"BatchMeta index out of range: {item} for {self.size} samples")
        return self._take(Pick(slice(row, row + 1), self.size))

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Splits into consecutive parts; the first ``size % chunks`` have one sample more, some may be empty."""
        return [self._take(Pick(part, self.size)) for part in chunk_slices(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Splits by partition, in the order in which the partitions first appear."""
        rows: dict[str, list[int]] = {}
        for row, partition_id in enumerate(self.partition_ids):
            rows.setdefault(partition_id, []).append(row)
        return [self._take(Pick(picked, self.size)) for picked in rows.values()]

    def _take(self, pick: Pick) -> BatchMeta:
        out = BatchMeta._make(
            pick.ints(self.global_indexes),
            pick.list(self.partition_ids),
            pick.array(self._generations),
            {name: field.take(pick) for name, field in self._fields.items()},
            pick.array(self.production_status).copy(),
            dict(self.extra_info),
        )
        if self._tags is not None:
            out._tags = pick.list(self._tags)
            if self._tags_out:
                out._tags = list(map(dict.copy, out._tags))
            else:
                self._tags_shared = out._tags_shared = True
        if self._backend_meta is not None:
            out._backend_meta = list(map(dict.copy, pick.list(self._backend_meta)))
        return out

    def union(self, other: BatchMeta) -> BatchMeta:
        """Fields of both batches of the same samples; where both have something, ``other`` wins.

        A sample is ready when it is ready in both. An empty batch gives a copy of the other one.

        Raises:
            ValueError: the samples or their partitions differ.
        """
        if not self or not other:
            return (other if other else self).copy()
        if self.global_indexes != other.global_indexes:
            raise ValueError(
                f"union: global_indexes do not match{difference(self.global_indexes, other.global_indexes)}"
            )
        if self.partition_ids != other.partition_ids:
            raise ValueError(f"union: partition_ids do not match{difference(self.partition_ids, other.partition_ids)}")
        out = self._take(Pick(slice(None), self.size))
        out._fields = {**self._fields, **other._fields}
        out.production_status &= other.production_status
        out.extra_info.update(other.extra_info)
        # Of an index that was reused between the two, the sample that lives now.
        out._generations = np.maximum(self._generations, other._generations)
        if self._tags is None and other._tags is not None:
            out._tags, out._tags_shared = list(other._lend_tags()), True
        elif other._tags is not None and not equal(self._tags, other._tags):
            out._tags, out._tags_shared = union_dicts(self._tags, other._tags), False
        out._backend_meta = union_dicts(self._backend_meta, other._backend_meta)
        out._refresh_ready()
        return out

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Joins batches one after another; empty ones are skipped.

        Args:
            data: the batches.
            validate: check that all have the same fields with the same dtypes. Without it, the fields are those of the
                first batch, also for rows that may not have them.

        Raises:
            ValueError: fields or dtypes differ, or `extra_info` has conflicting values.
        """
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        if validate:
            _check_same_fields(parts)
        fields = {}
        for name, first in parts[0]._fields.items():
            missing = FieldSchema(
                first.dtype, first.shape, is_nested=first.is_nested, is_non_tensor=first.is_non_tensor
            )
            fields[name] = FieldSchema.concat([(part._fields.get(name, missing), part.size) for part in parts])
        out = cls._make(
            list(chain.from_iterable(part.global_indexes for part in parts)),
            list(chain.from_iterable(part.partition_ids for part in parts)),
            np.concatenate([part._generations for part in parts]),
            fields,
            np.concatenate([part.production_status for part in parts]),
            merge_extra_info(part.extra_info for part in parts),
        )
        if any(part._tags is not None for part in parts):
            out._tags = []
            for part in parts:
                out._tags += part._lend_tags()
            out._tags_shared = True
        if any(part._backend_meta is not None for part in parts):
            out._backend_meta = [dict(one) for part in parts for one in part._custom_backend_meta]
        return out

    def _lend_tags(self) -> list[dict[str, Any]]:
        """Tags for another batch that will treat them as shared."""
        if self._tags is None:
            return [{} for _ in self.global_indexes]
        if self._tags_out:
            return list(map(dict.copy, self._tags))
        self._tags_shared = True
        return self._tags

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorders the samples in place.

        Raises:
            ValueError: ``indices`` is not a permutation of all positions.
        """
        rows = positions(indices, self.size, "reorder")
        if len(rows) != self.size:
            raise ValueError(f"reorder: indices length {len(rows)} mismatch batch size {self.size}")
        if np.bincount(rows, minlength=self.size).max(initial=0) > 1:
            raise ValueError("reorder: Indices contain duplicates")
        pick = Pick(rows, self.size)
        self.global_indexes = pick.ints(self.global_indexes)
        if not self._in_one_partition():
            self.partition_ids = pick.list(self.partition_ids)
        self._generations = pick.array(self._generations)
        self.production_status = pick.array(self.production_status)
        self._fields = {name: field.take(pick) for name, field in self._fields.items()}
        if self._tags is not None:
            self._tags = pick.list(self._tags)
        if self._backend_meta is not None:
            self._backend_meta = pick.list(self._backend_meta)

    def _in_one_partition(self) -> bool:
        return not self.partition_ids or self.partition_ids.count(self.partition_ids[0]) == len(self.partition_ids)

    def copy(self) -> BatchMeta:
        """A deep copy."""
        out = self._take(Pick(slice(None), self.size))
        out._generations = self._generations.copy()
        out.extra_info = copy.deepcopy(self.extra_info)
        out._tags = None if self._tags is None else list(map(deep, self._tags))
        out._tags_shared = False
        out._backend_meta = copy.deepcopy(self._backend_meta)
        out._ready = self._ready
        return out

    def __copy__(self) -> BatchMeta:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchMeta:
        return self.copy()

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """A batch without samples."""
        return cls([], [], extra_info=extra_info)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "global_indexes": np.array(self.global_indexes, dtype=np.int64),
            "partition_ids": self.partition_ids[0] if self.size and self._in_one_partition() else self.partition_ids,
            "generations": np.ascontiguousarray(self._generations),
            "fields": self._fields,
            "production_status": np.ascontiguousarray(self.production_status),
            "extra_info": self.extra_info,
            "tags": self._tags,
            "backend_meta": self._backend_meta,
            "ready": self._ready,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.global_indexes = state["global_indexes"].tolist()
        partitions = state["partition_ids"]
        self.partition_ids = [partitions] * len(self.global_indexes) if isinstance(partitions, str) else partitions
        self._generations, self._fields = state["generations"], state["fields"]
        # An array that came out of band may be read-only.
        self.production_status = np.array(state["production_status"], dtype=np.int8)
        self.extra_info, self._tags, self._backend_meta = state["extra_info"], state["tags"], state["backend_meta"]
        self._tags_shared, self._tags_out, self._ready = False, False, state["ready"]


def _check_same_fields(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.field_names != first.field_names:
            raise ValueError(f"concat: field_names mismatch: {part.field_names} and {first.field_names}")
        for name, field in part._fields.items():
            want = first._fields[name]
            if field.dtype != want.dtype:
                raise ValueError(f"concat: field {name!r}: dtype mismatch: {field.dtype} and {want.dtype}")
