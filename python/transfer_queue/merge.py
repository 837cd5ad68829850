"""Merges of ``kv_update`` that run in the core and need no Python where the data lies.

Each can be given as an object (``tq.merge.concat``) or by its name (``"concat"``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NativeMerge", "add", "concat", "max", "min", "replace"]


@dataclass(frozen=True, slots=True)
class NativeMerge:
    """A merge that the core knows by name."""

    name: str

    def __repr__(self) -> str:
        return f"transfer_queue.merge.{self.name}"


concat = NativeMerge("concat")
"""Joins the stored and the new value along dimension 0."""
add = NativeMerge("add")
"""Adds element by element; the shapes must be equal."""
replace = NativeMerge("replace")
"""Stores the new value, which must have the dtype of the stored one."""
max = NativeMerge("max")
"""The greater of the two, element by element; NaN wins."""
min = NativeMerge("min")
"""The lesser of the two, element by element; NaN wins."""

NAMES = frozenset({"concat", "add", "replace", "max", "min"})
