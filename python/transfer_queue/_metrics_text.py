"""Metrics in the text format of Prometheus, version 0.0.4. Names and labels are those of the peer package, then ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transfer_queue._calls import decode

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
    def count(self) -> int:
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


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
    resident: int
    requests: list[_Requests]

    @property
    def label(self) -> _Labels:
        return (("storage_unit_id", self.name),)


def _ints(raw: bytes | None) -> list[int]:
    return memoryview(raw or b"").cast("q").tolist()


def _requests(rows: list[list[Any]] | None) -> list[_Requests]:
    return [_Requests(*row[:5], _ints(row[5]), *row[6:8]) for row in rows or []]


def _unit(row: list[Any]) -> _Unit:
    (name, state, _host, *numbers), resident, requests, *_ = row
    return _Unit(name, state, *numbers[:9], resident, _requests(requests))


class _Text:
    """The page as it grows."""

    def __init__(self, bounds: list[int]) -> None:
        self._lines: list[str] = []
        self._bounds = [str(bound / _SECOND) for bound in bounds] + ["+Inf"]

    def add(self, kind: str, name: str, description: str, samples: Iterable[_Sample]) -> None:
        """One family of samples."""
        self._head(kind, name, description)
        self._lines += [f"{name}{_braced(labels)} {value}" for labels, value in samples]

    def histogram(self, name: str, description: str, samples: Iterable[tuple[_Labels, _Requests]]) -> None:
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
    uptime, resident, allocated, reusable, requests, partitions, units, queues, bounds, *_ = decode(body)
    text = _Text(_ints(bounds))
    _controller(text, uptime / _SECOND, resident, queues)
    _partitions(text, partitions or [])
    text.add(
        "gauge", "tq_global_index_allocated_total", "Sample indexes in use, reserved ones included.", [((), allocated)]
    )
    text.add(
        "gauge", "tq_global_index_reusable_total", "Sample indexes that were in use and are free.", [((), reusable)]
    )
    counted = [((("op_type", one.op_type),), one) for one in _requests(requests)]
    _role(text, "controller", counted)
    listed = [_unit(row) for row in units or []]
    _units(text, listed, ssd_offload)
    each = [((("op_type", one.op_type), *unit.label), one) for unit in listed for one in unit.requests]
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


def _partitions(text: _Text, rows: list[list[Any]]) -> None:
    samples: list[_Sample] = []
    production: list[_Sample] = []
    consumption: list[_Sample] = []
    for name, active, produced, tasks, consumed, *_ in rows:
        partition = ("partition_id", name)
        samples.append(((partition,), active))
        progress = produced / active if active else 0.0
        production.append(((partition, ("task_name", "all")), progress))
        for task, count in zip(decode(tasks) if tasks else [], _ints(consumed), strict=True):
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


def _role(text: _Text, role: str, counted: list[tuple[_Labels, _Requests]]) -> None:
    prefix = f"tq_{role}_request"
    text.add("counter", f"{prefix}_total", "Requests that have ended.", [(at, one.count) for at, one in counted])
    text.add("counter", f"{prefix}_errors_total", "Requests that failed.", [(at, one.errors) for at, one in counted])
    with_samples = [(at, one.samples) for at, one in counted if one.samples]
    text.add("counter", f"{prefix}_samples_total", "Samples that requests have touched.", with_samples)
    text.histogram(f"{prefix}_duration_seconds", "Time from a request to its reply, waiting included.", counted)


def _units(text: _Text, units: list[_Unit], ssd_offload: bool) -> None:
    limited = [unit for unit in units if unit.sample_limit]
    families: list[tuple[str, str, list[_Sample]]] = [
        ("capacity_total", "Most samples of a unit.", [(unit.label, unit.sample_limit) for unit in limited]),
        (
            "utilization_ratio",
            "Samples of a unit by its limit.",
            [(unit.label, unit.samples / unit.sample_limit) for unit in limited],
        ),
        ("active_keys_total", "Samples of a unit.", [(unit.label, unit.samples) for unit in units]),
        ("memory_rss_bytes", "Memory pages of the cells of a unit.", [(unit.label, unit.resident) for unit in units]),
        (
            "ssd_offload_enabled",
            "Whether the unit keeps values on disk.",
            [(unit.label, int(ssd_offload)) for unit in units],
        ),
        ("ssd_active_values", "Values on disk.", [(unit.label, 0) for unit in units]),
        ("ssd_active_bytes", "Bytes of values on disk.", [(unit.label, unit.disk_used) for unit in units]),
        (
            "ssd_fallback_values_total",
            "Values that could not be written to disk and stayed in memory.",
            [(unit.label, 0) for unit in units],
        ),
        ("memory_used_bytes", "Payload of cells and reservations.", [(unit.label, unit.memory_used) for unit in units]),
        (
            "memory_limit_bytes",
            "Most bytes in memory.",
            [(unit.label, unit.memory_limit) for unit in units if unit.memory_limit],
        ),
        ("disk_used_bytes", "Payload of cells on disk.", [(unit.label, unit.disk_used) for unit in units]),
        (
            "disk_limit_bytes",
            "Most bytes on disk.",
            [(unit.label, unit.disk_limit) for unit in units if unit.disk_limit],
        ),
        ("cells", "Stored cells.", [(unit.label, unit.cells) for unit in units]),
        ("leases", "Reads in progress and zero-copy views.", [(unit.label, unit.leases) for unit in units]),
        ("staged_writes", "Writes in progress.", [(unit.label, unit.staged) for unit in units]),
        ("state", "1 for the state of the unit.", [((*unit.label, ("state", unit.state)), 1) for unit in units]),
    ]
    for name, description, samples in families:
        text.add("gauge", f"tq_storage_{name}", description, samples)


def _latencies(text: _Text, units: list[_Unit], each: list[tuple[_Labels, _Requests]]) -> None:
    arrived = [(unit.label, sum(one.arrived for one in unit.requests)) for unit in units]
    text.add("gauge", "tq_storage_requests_arrived", "Requests to a unit, also those that have not ended.", arrived)
    by_op = [(at, one.arrived) for at, one in each if one.arrived]
    text.add("gauge", "tq_storage_arrivals_by_op", "The same by kind.", by_op)
    text.add(
        "gauge", "tq_storage_request_ops", "Requests to a unit that have ended.", [(at, one.count) for at, one in each]
    )
    prefix = "tq_storage_request_latency"
    for name, description, samples in (
        ("avg", "Average duration in seconds.", [(at, one.mean / _SECOND) for at, one in each]),
        (
            "p50",
            "Median duration in seconds, estimated from the histogram.",
            [(at, one.p50 / _SECOND) for at, one in each],
        ),
        ("p99", "99th percentile in seconds, likewise.", [(at, one.p99 / _SECOND) for at, one in each]),
    ):
        text.add("gauge", f"{prefix}_{name}", description, samples)
