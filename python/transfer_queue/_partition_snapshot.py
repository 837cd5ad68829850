"""What a controller knows of one partition, as a value that programs inspect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from transfer_queue import _calls, _tags
from transfer_queue._arguments import checked_name
from transfer_queue._calls import Call, Reply, decode_ints
from transfer_queue._field_schema import FieldSchema
from transfer_queue._ops import Op

__all__ = ["FieldMetadata", "PartitionSnapshot", "empty", "snapshot"]


@dataclass
class FieldMetadata:
    """What the holders of a field have in common.

    Attributes:
        dtype: element type, None for Python objects.
        shape: shape of one row, None when rows differ and for objects.
        is_nested: whether rows differ in shape.
        is_non_tensor: whether the rows are Python objects.
        global_indexes: samples that have the field.
        per_sample_shapes: index -> shape, for a nested field.
    """

    dtype: torch.dtype | None
    shape: torch.Size | None
    is_nested: bool
    is_non_tensor: bool
    global_indexes: set[int]
    per_sample_shapes: dict[int, torch.Size] = field(default_factory=dict)


@dataclass
class PartitionSnapshot:
    """A partition at one moment. It is a value of its own: changing it changes nothing else.

    Attributes:
        partition_id: name of the partition.
        keys_mapping: key -> index, in the order of registration.
        revert_keys_mapping: index -> key.
        global_indexes: samples that were written.
        pre_allocated_global_indexes: indexes that are reserved for the next samples.
        custom_meta: index -> tag.
        field_name_mapping: field -> its column in ``production_status``.
        field_metadata: field -> what its holders have in common, for the fields that some sample has.
        production_status: int8[index, column], 1 for a cell that is there.
        consumption_status: task -> int8[index], 1 for a sample that the task has consumed.
    """

    partition_id: str
    keys_mapping: dict[str, int]
    revert_keys_mapping: dict[int, str]
    global_indexes: set[int]
    pre_allocated_global_indexes: set[int]
    custom_meta: dict[int, dict[str, Any]]
    field_name_mapping: dict[str, int]
    field_metadata: dict[str, FieldMetadata]
    production_status: torch.Tensor
    consumption_status: dict[str, torch.Tensor]

    @property
    def total_samples_num(self) -> int:
        """Number of samples that were written."""
        return len(self.global_indexes)

    @property
    def total_fields_num(self) -> int:
        """Number of fields that were ever written."""
        return len(self.field_name_mapping)

    @property
    def allocated_fields_num(self) -> int:
        """Columns of ``production_status``."""
        return self.production_status.shape[1]

    @property
    def allocated_samples_num(self) -> int:
        """Rows of ``production_status``."""
        return self.production_status.shape[0]

    def ready(self, fields: list[str], task: str) -> list[int]:
        """Samples that have all these fields and that the task has not consumed, ascending."""
        if any(name not in self.field_metadata for name in fields):
            return []
        indexes = set(self.global_indexes)
        for name in fields:
            indexes &= self.field_metadata[name].global_indexes
        consumed = self.consumption_status.get(task)
        return sorted(i for i in indexes if consumed is None or not consumed[i])


def snapshot(partition_id: Any, timeout: float) -> Call[PartitionSnapshot | None]:
    """The request for one partition; its result is None for one that does not exist."""
    partition = checked_name("partition_id", partition_id)

    def read(reply: Reply) -> PartitionSnapshot | None:
        known, *rest = _calls.decode(reply.body)
        return _read(partition, *rest) if known else None

    return Call(Op.SNAPSHOT, _calls.encode([partition]), read, timeout=timeout)


def empty(partition: str) -> PartitionSnapshot:
    """A partition with nothing in it, as one that was cleared."""
    return _read(partition, [b"", b""], None, b"", b"", b"", None, None)


def _read(
    partition: str,
    samples: Any,
    tags: Any,
    reserved: Any,
    keys: Any,
    key_indexes: Any,
    fields: Any,
    tasks: Any,
    *_: Any,
) -> PartitionSnapshot:
    indexes, pre_allocated = decode_ints(samples[0]), decode_ints(reserved)
    keys_mapping = dict(zip(_calls.decode(keys) if keys else [], decode_ints(key_indexes), strict=True))
    rows = max([*indexes[-1:], *pre_allocated[-1:], -1]) + 1
    produced = torch.zeros((rows, len(fields or [])), dtype=torch.int8)
    names: dict[str, int] = {}
    described: dict[str, FieldMetadata] = {}
    for column, (holders, schema) in enumerate(fields or []):
        held = decode_ints(holders)
        produced[held, column] = 1
        name, what = FieldSchema.from_wire(schema)
        names[name] = column
        if held:
            described[name] = _field(what, held)
    consumption = {}
    for task, done in tasks or []:
        consumption[task] = torch.zeros(rows, dtype=torch.int8)
        consumption[task][decode_ints(done)] = 1
    return PartitionSnapshot(
        partition_id=partition,
        keys_mapping=keys_mapping,
        revert_keys_mapping={index: key for key, index in keys_mapping.items()},
        global_indexes=set(indexes),
        pre_allocated_global_indexes=set(pre_allocated),
        custom_meta=dict(zip(indexes, _tags.decode(tags, len(indexes)), strict=True)),
        field_name_mapping=names,
        field_metadata=described,
        production_status=produced,
        consumption_status=consumption,
    )


def _field(schema: FieldSchema, holders: list[int]) -> FieldMetadata:
    shapes = dict(zip(holders, schema.shapes(len(holders)), strict=True)) if schema.is_nested else {}
    return FieldMetadata(schema.dtype, schema.shape, schema.is_nested, schema.is_non_tensor, set(holders), shapes)
