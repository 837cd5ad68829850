"""Metrics in the text format of Prometheus 0.0.4. Names and labels are those of the peer package, then ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transfer_queue._calls import decode, decode_ints

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labels = tuple[tuple[str, str], ...]
_Sample = tuple[_Labels, float]
_SECOND = 1e9  # nanoseconds


class _Requests(NamedTuple):
    """Requests of one kind: core/wire.RequestMetrics. Durations are nanoseconds."""

    op_type: str
    errors: int
    samples: int
    arrived: int
    total: int
    buckets: list[int]
    p50: int
    p99: int

    @property
    def ended(self) -> int:
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        return self.total / self.ended if self.ended else 0.0


class _Unit(NamedTuple):
    """A unit: core/wire.UnitMetrics."""

    name: str
    state: str
    memory_used: int
    memory_limit: int
    disk_used: int
    disk_limit: int
    samples: int
    sample_limit: int
    cells: int
    leases: int
    staged: int
    disk_cells: int
    disk_physical: int
    spilled_bytes: int
    promoted_bytes: int
    compacted_bytes: int
    fallback_cells: int
    disk_logical: int
    memory_cells: int
    memory_logical: int
    memory_physical: int
    written_cells: int
    written_bytes: int
    spilled_cells: int
    promoted_cells: int
    lost_cells: int
    resident: int
    requests: list[_Requests]

    @property
    def label(self) -> _Labels:
        return (("storage_unit_id", self.name),)


def _requests(rows: list[list[Any]] | None) -> list[_Requests]:
    return [_Requests._make([*row[:5], decode_ints(row[5]), *row[6:8]]) for row in rows or []]


def _unit(row: list[Any]) -> _Unit:
    (name, state, _host, *numbers), resident, requests, *_ = row
    return _Unit._make([name, state, *numbers[:_NUMBERS], resident, _requests(requests)])


_NUMBERS = _Unit._fields.index("resident") - 2  # of a unit, behind its name and state

_Counted = tuple[_Labels, _Requests]


class _Text:
    """The page as it grows."""

    def __init__(self, bounds: list[int]) -> None:
        self._lines: list[str] = []
        self._bounds = [str(bound / _SECOND) for bound in bounds] + ["+Inf"]

    def add(self, kind: str, name: str, description: str, samples: Sequence[_Sample]) -> None:
        """One family of samples."""
        self._head(kind, name, description)
        self._lines += [f"{name}{_braced(labels)} {value}" for labels, value in samples]

    def histogram(self, name: str, description: str, samples: Iterable[_Counted]) -> None:
        """A family of cumulated buckets."""
        self._head("histogram", name, description)
        for labels, requests in samples:
            below = 0
            for bound, count in zip(self._bounds, requests.buckets, strict=True):
                below += count
                self._lines.append(f"{name}_bucket{_braced((*labels, ('le', bound)))} {below}")
            self._lines.append(f"{name}_sum{_braced(labels)} {requests.total / _SECOND}")
            self._lines.append(f"{name}_count{_braced(labels)} {below}")

    def _head(self, kind: str, name: str, description: str) -> None:
        self._lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode(errors="replace")


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def _braced(labels: _Labels) -> str:
    inside = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def render(body: bytes, ssd_offload: bool = False) -> bytes:
    """The page for an answer of the core.

    Args:
        body: core/wire.MetricsReply.
        ssd_offload: whether units keep values on disk.
    """
    uptime, resident, allocated, reusable, requests, partitions, units, queues, bounds, moves, *_ = decode(body)
    text = _Text(decode_ints(bounds))
    _controller(text, uptime / _SECOND, resident, queues)
    _moves(text, moves)
    _partitions(text, partitions or [])
    text.add(
        "gauge", "tq_global_index_allocated_total", "Sample indexes in use, reserved ones included.", [((), allocated)]
    )
    text.add(
        "gauge", "tq_global_index_reusable_total", "Sample indexes that were in use and are free.", [((), reusable)]
    )
    counted: list[_Counted] = [((("op_type", one.op_type),), one) for one in _requests(requests)]
    _role(text, "controller", counted)
    listed = [_unit(row) for row in units or []]
    _units(text, listed, ssd_offload)
    each: list[_Counted] = [((("op_type", one.op_type), *unit.label), one) for unit in listed for one in unit.requests]
    _latencies(text, listed, each)
    _role(text, "storage", each)
    return text.encode()


def _controller(text: _Text, uptime: float, resident: int, queues: list[int]) -> None:
    clients, waiters, watches, writes, waiting_puts, jobs, *_ = queues
    for name, description, value in (
        ("uptime_seconds", "Time since the controller was started.", uptime),
        ("memory_rss_bytes", "Resident memory of the process of the controller.", resident),
        ("clients", "Clients that are connected.", clients),
        ("waiting_requests", "Requests that wait for samples.", waiters),
        ("watches", "Watches that are open.", watches),
        ("slow_writes", "Updates and parsed puts in progress, and writes that wait for them.", writes),
        ("waiting_puts", "Writes that wait for room on a unit.", waiting_puts),
        ("waiting_jobs", "Calls of Python functions that no thread has taken yet.", jobs),
    ):
        text.add("gauge", f"tq_controller_{name}", description, [((), value)])


def _moves(text: _Text, moves: list[int]) -> None:
    for name, description, value in zip(("samples", "cells", "bytes"), _MOVES, moves, strict=False):
        text.add("counter", f"tq_moved_{name}_total", description, [((), value)])
    text.add("gauge", "tq_drains", "Jobs that move everything off a unit.", [((), moves[3])])


_MOVES = ("Samples that have moved from one unit to another.", "Their cells.", "The payload of these.")


def _partitions(text: _Text, rows: list[list[Any]]) -> None:
    samples: list[_Sample] = []
    production: list[_Sample] = []
    consumption: list[_Sample] = []
    for name, active, produced, tasks, consumed, *_ in rows:
        partition = ("partition_id", name)
        samples.append(((partition,), active))
        progress = produced / active if active else 0.0
        production.append(((partition, ("task_name", "all")), progress))
        for task, count in zip(decode(tasks) if tasks else [], decode_ints(consumed), strict=True):
            labels = (partition, ("task_name", task))
            if task != "all":
                production.append((labels, progress))
            consumption.append((labels, count / active if active else 0.0))
    text.add("gauge", "tq_partitions_total", "Partitions.", [((), len(rows))])
    text.add("gauge", "tq_partition_samples_total", "Samples of a partition.", samples)
    text.add("gauge", "tq_partition_production_progress", "Share of the samples that have a field, 0 to 1.", production)
    text.add(
        "gauge", "tq_partition_consumption_progress", "Share of the samples a task has consumed, 0 to 1.", consumption
    )


def _role(text: _Text, role: str, counted: list[_Counted]) -> None:
    prefix = f"tq_{role}_request"
    text.add("counter", f"{prefix}_total", "Requests that have ended.", [(at, one.ended) for at, one in counted])
    text.add("counter", f"{prefix}_errors_total", "Requests that failed.", [(at, one.errors) for at, one in counted])
    with_samples = [(at, one.samples) for at, one in counted if one.samples]
    text.add("counter", f"{prefix}_samples_total", "Samples that requests have touched.", with_samples)
    text.histogram(f"{prefix}_duration_seconds", "Time until a request ended, waiting included.", counted)


# A gauge whose value is None is left out.
_OF_UNITS: tuple[tuple[str, str, Callable[[_Unit], float | None]], ...] = (
    ("capacity_total", "Most samples of a unit.", lambda u: u.sample_limit or None),
    (
        "utilization_ratio",
        "Samples of a unit by its limit.",
        lambda u: u.samples / u.sample_limit if u.sample_limit else None,
    ),
    ("active_keys_total", "Samples of a unit.", lambda u: u.samples),
    ("memory_rss_bytes", "Memory pages of the cells of a unit.", lambda u: u.resident),
    ("ssd_active_values", "Values on disk.", lambda u: u.disk_cells),
    ("ssd_active_bytes", "Bytes of values on disk.", lambda u: u.disk_logical),
    (
        "ssd_fallback_values_total",
        "Values that stayed in memory because the disk did not take them.",
        lambda u: u.fallback_cells,
    ),
    ("memory_used_bytes", "Payload of cells and reservations.", lambda u: u.memory_used),
    ("memory_limit_bytes", "Most bytes in memory.", lambda u: u.memory_limit or None),
    ("disk_used_bytes", "Payload of cells on disk.", lambda u: u.disk_used),
    ("disk_limit_bytes", "Most bytes on disk.", lambda u: u.disk_limit or None),
    ("cells", "Stored cells.", lambda u: u.cells),
    (
        "lost_cells",
        "Cells that were lost with an earlier process of a unit, until they are written or cleared.",
        lambda u: u.lost_cells,
    ),
    ("leases", "Reads in progress and zero-copy views.", lambda u: u.leases),
    ("staged_writes", "Writes in progress.", lambda u: u.staged),
)


_OF_TIERS: tuple[tuple[str, str, Callable[[_Unit], int], Callable[[_Unit], int]], ...] = (
    ("values", "Values of a tier.", lambda u: u.memory_cells, lambda u: u.disk_cells),
    (
        "logical_bytes",
        "Payload of the values of a tier; one that several cells share counts for each.",
        lambda u: u.memory_logical,
        lambda u: u.disk_logical,
    ),
    ("used_bytes", "Payload that a tier holds, reservations included.", lambda u: u.memory_used, lambda u: u.disk_used),
    ("physical_bytes", "Pages that a tier takes.", lambda u: u.memory_physical, lambda u: u.disk_physical),
)

_MOVED: tuple[tuple[str, str, Callable[[_Unit], int]], ...] = (
    ("written_values", "Values that went to disk when they were put.", lambda u: u.written_cells),
    ("written_bytes", "Their payload.", lambda u: u.written_bytes),
    ("spilled_values", "Values that were moved to disk to make room.", lambda u: u.spilled_cells),
    ("spilled_bytes", "Their payload.", lambda u: u.spilled_bytes),
    ("promoted_values", "Values that were moved back to memory.", lambda u: u.promoted_cells),
    ("promoted_bytes", "Their payload.", lambda u: u.promoted_bytes),
    ("compacted_bytes", "Payload that was copied on disk to give space back.", lambda u: u.compacted_bytes),
)


def _tiers(text: _Text, units: list[_Unit]) -> None:
    for name, description, in_memory, on_disk in _OF_TIERS:
        samples: list[_Sample] = []
        for unit in units:
            samples.append(((*unit.label, ("tier", "memory")), in_memory(unit)))
            samples.append(((*unit.label, ("tier", "disk")), on_disk(unit)))
        text.add("gauge", f"tq_storage_tier_{name}", description, samples)
    for name, description, value_of in _MOVED:
        text.add("counter", f"tq_storage_{name}_total", description, [(unit.label, value_of(unit)) for unit in units])


def _units(text: _Text, units: list[_Unit], ssd_offload: bool) -> None:
    for name, description, value_of in _OF_UNITS:
        values = [(unit.label, value_of(unit)) for unit in units]
        given = [(label, value) for label, value in values if value is not None]
        text.add("gauge", f"tq_storage_{name}", description, given)
    on_disk = [(unit.label, int(ssd_offload)) for unit in units]
    text.add("gauge", "tq_storage_ssd_offload_enabled", "Whether a unit keeps values on disk.", on_disk)
    _tiers(text, units)
    states = [((*unit.label, ("state", unit.state)), 1) for unit in units]
    text.add("gauge", "tq_storage_state", "1 for the state of a unit.", states)


_OF_REQUESTS: tuple[tuple[str, str, Callable[[_Requests], float]], ...] = (
    ("ops", "Requests to a unit that have ended.", lambda r: r.ended),
    ("latency_avg", "Average duration in seconds.", lambda r: r.mean / _SECOND),
    ("latency_p50", "Median duration in seconds, estimated from the histogram.", lambda r: r.p50 / _SECOND),
    ("latency_p99", "99th percentile of the durations in seconds, likewise.", lambda r: r.p99 / _SECOND),
)


def _latencies(text: _Text, units: list[_Unit], each: list[_Counted]) -> None:
    arrived = [(unit.label, sum(one.arrived for one in unit.requests)) for unit in units]
    text.add("gauge", "tq_storage_requests_arrived", "Requests to a unit, also those that have not ended.", arrived)
    by_op = [(at, one.arrived) for at, one in each if one.arrived]
    text.add("gauge", "tq_storage_arrivals_by_op", "The same by kind.", by_op)
    for name, description, value_of in _OF_REQUESTS:
        text.add("gauge", f"tq_storage_request_{name}", description, [(at, value_of(one)) for at, one in each])
