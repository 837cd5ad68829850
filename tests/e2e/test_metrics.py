"""The metrics page: names and labels of the peer package, values that follow from what was done, and where it lives."""

from __future__ import annotations

import http.client
import importlib
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

from disks import offload
from processes import Nursery, program, until
from transfer_queue import _metrics, _session, config, errors

METRICS = {"metrics": {"enabled": True}}


class Samples(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """A page as another library reads it: value by name and labels."""

    def of(self, name: str, **labels: str) -> float:
        return self[name, frozenset(labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        """Over all series that have these labels, and maybe others."""
        return sum(value for (got, at), value in self.items() if got == name and labels.items() <= dict(at).items())

    def labels(self, name: str, label: str) -> set[str]:
        return {dict(at)[label] for got, at in self if got == name}


def fetch(endpoint: str | None, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=20) as reply:
        text: str = reply.read().decode()
        return text


def scrape(endpoint: str | None) -> Samples:
    samples = Samples()
    for family in text_string_to_metric_families(fetch(endpoint)):
        for one in family.samples:
            at = (one.name, frozenset(one.labels.items()))
            assert at not in samples, f"twice on the page: {at}"
            samples[at] = one.value
    return samples


def table(rows: int, *names: str, width: int = 2) -> TensorDict:
    return TensorDict({name: torch.ones(rows, width) for name in names}, batch_size=[rows])


def keys(rows: int) -> list[str]:
    return [f"k{i}" for i in range(rows)]


@pytest.fixture
def conf() -> dict[str, Any]:
    return {**METRICS, "backend": {"SimpleStorage": {"total_storage_size": 100, "memory_limit_bytes": 1 << 24}}}


def test_values_follow_from_what_was_done(tq: Any) -> None:
    endpoint, client = tq.get_metrics_endpoint(), tq.get_client()
    tq.kv_batch_put(keys(8), "p", table(8, "x", "y"))
    tq.kv_batch_put(keys(3), "p", table(3, "big", width=1 << 16))
    tq.kv_batch_get(keys(4), "p", ["x"])
    tq.kv_update("k0", "p", {"x": torch.ones(2)}, "add")
    tq.kv_clear(["k6", "k7"], "p")
    tq.kv_clear(["k1"], "p", fields=["y"])
    tq.kv_list("p")
    with pytest.raises(ValueError, match="dtype"):
        tq.kv_put("k9", "p", {"x": torch.tensor([1, 2])})
    client.get_meta(["x"], 3, "p", task_name="train")
    client.get_meta(["x"], 6, "p", task_name="all")
    tq.kv_put("tagged", "q", tag={})
    got = scrape(endpoint)

    def requests(name: str, role: str = "controller", **labels: str) -> list[float]:
        return [
            got.sum(f"tq_{role}_request_{kind}total", op_type=name, **labels) for kind in ("", "errors_", "samples_")
        ]

    # Puts of 8 and 3 rows, an update of one, a refused put, and a tag; the wide put also reserves memory.
    assert requests("NOTIFY_DATA_UPDATE") == [5, 1, 13]
    assert requests("RESERVE_DATA") == [1, 0, 0]
    assert requests("GET_DATA") == [1, 0, 4]
    assert requests("CLEAR_META") == [1, 0, 2]
    assert requests("KV_CLEAR_FIELDS") == [1, 0, 1]
    assert requests("KV_LIST") == [1, 0, 0]
    assert requests("GET_META") == [2, 0, 0]
    assert got.of("tq_controller_request_duration_seconds_count", op_type="KV_LIST") == 1
    assert got.of("tq_controller_request_duration_seconds_bucket", op_type="KV_LIST", le="+Inf") == 1
    bounds = got.labels("tq_controller_request_duration_seconds_bucket", "le")
    assert sorted(map(float, bounds)) == [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, float("inf")]

    assert requests("PUT_DATA", "storage")[2] == 11
    assert requests("GET_DATA", "storage")[2] == 4
    assert requests("UPDATE_DATA", "storage") == [1, 0, 1]
    assert requests("CLEAR_DATA", "storage")[2] == 3
    assert got.labels("tq_storage_request_ops", "op_type") == {"PUT_DATA", "GET_DATA", "CLEAR_DATA", "UPDATE_DATA"}
    for unit in ("unit-0", "unit-1"):
        for quantile in ("avg", "p50", "p99"):
            assert 0 <= got.of(f"tq_storage_request_latency_{quantile}", op_type="PUT_DATA", storage_unit_id=unit) < 5

    assert got.of("tq_partition_samples_total", partition_id="p") == 6
    assert got.of("tq_partition_production_progress", partition_id="p", task_name="all") == 1
    assert got.of("tq_partition_production_progress", partition_id="p", task_name="train") == 1
    assert got.of("tq_partition_production_progress", partition_id="q", task_name="all") == 0
    assert got.of("tq_partition_consumption_progress", partition_id="p", task_name="train") == 0.5
    assert got.of("tq_partition_consumption_progress", partition_id="p", task_name="all") == 1
    assert (got.of("tq_partitions_total"), got.of("tq_global_index_allocated_total")) == (2, 7)
    assert got.of("tq_global_index_reusable_total") == 1

    units = tq.list_units()
    for unit in units:
        at = {"storage_unit_id": unit.unit_id}
        assert got.of("tq_storage_capacity_total", **at) == 50
        assert got.of("tq_storage_active_keys_total", **at) == unit.samples
        assert got.of("tq_storage_utilization_ratio", **at) == unit.samples / 50
        assert got.of("tq_storage_memory_used_bytes", **at) == unit.memory_used_bytes
        assert got.of("tq_storage_memory_limit_bytes", **at) == 1 << 24
        assert got.of("tq_storage_memory_rss_bytes", **at) >= unit.memory_used_bytes
        assert got.of("tq_storage_cells", **at) == unit.cells
        assert got.of("tq_storage_lost_cells", **at) == unit.lost_cells == 0
        assert got.of("tq_storage_state", state="ACTIVE", **at) == 1
        for name in ("offload_enabled", "active_values", "active_bytes", "fallback_values_total"):
            assert got.of(f"tq_storage_ssd_{name}", **at) == 0
    assert sum(unit.memory_used_bytes for unit in units) == (6 * 2 - 1) * 8 + 3 * (4 << 16)
    assert 0 < got.of("tq_controller_uptime_seconds") < 60
    assert got.of("tq_controller_memory_rss_bytes") > 1 << 24
    assert got.of("tq_controller_clients") == 1


class TestTiers:
    """One unit with a disk and little memory."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return {**METRICS, **offload(tmp_path, 100_000, memory_limit_bytes=1 << 20, put_wait_s=20)}

    def test_both_tiers_are_counted_as_list_units_does(self, tq: Any) -> None:
        """The names of the peer for the disk, ours for each tier and for what has moved."""
        shared = torch.zeros(1, 50_000).expand(4, -1)
        tq.kv_batch_put(keys(4), "p", TensorDict({"large": shared}, batch_size=[4]), dedup=["large"])
        for n in range(30):
            tq.kv_put(f"s{n}", "p", fields={"small": torch.zeros(12_000)})
        for _ in range(3):
            tq.kv_batch_get("s0", "p")
        tq.kv_clear([f"s{n}" for n in range(1, 25)], "p")
        unit, got = at_rest(tq)
        at = {"storage_unit_id": unit.unit_id}
        assert unit.spilled_cells > 0
        assert unit.written_cells == 4
        assert unit.disk_logical_bytes >= unit.disk_used_bytes + 3 * 200_000
        assert got.of("tq_storage_ssd_offload_enabled", **at) == 1
        assert got.of("tq_storage_ssd_active_values", **at) == unit.disk_cells
        assert got.of("tq_storage_ssd_active_bytes", **at) == unit.disk_logical_bytes
        assert got.of("tq_storage_ssd_fallback_values_total", **at) == 0
        for tier in ("memory", "disk"):
            each = {name: got.of(f"tq_storage_tier_{name}", tier=tier, **at) for name in ("values", "used_bytes")}
            assert each == {
                "values": getattr(unit, f"{tier}_cells"),
                "used_bytes": getattr(unit, f"{tier}_used_bytes"),
            }
            for name in ("logical_bytes", "physical_bytes"):
                assert got.of(f"tq_storage_tier_{name}", tier=tier, **at) == getattr(unit, f"{tier}_{name}")
        for moved in ("written", "spilled", "promoted"):
            assert got.of(f"tq_storage_{moved}_values_total", **at) == getattr(unit, f"{moved}_cells")
            assert got.of(f"tq_storage_{moved}_bytes_total", **at) == getattr(unit, f"{moved}_bytes")
        assert got.of("tq_storage_compacted_bytes_total", **at) == unit.compacted_bytes


def at_rest(tq: Any) -> tuple[Any, Samples]:
    """The only unit and the page, between which nothing has moved."""
    while True:
        (before,), page, (after,) = tq.list_units(), scrape(tq.get_metrics_endpoint()), tq.list_units()
        if before == after:
            return after, page


@pytest.mark.parametrize("conf", [METRICS])
def test_units_without_limits_have_none_on_the_page(tq: Any, conf: Any) -> None:
    names = {name for name, _ in scrape(tq.get_metrics_endpoint())}
    assert "tq_storage_active_keys_total" in names
    assert not names & {
        "tq_storage_capacity_total",
        "tq_storage_utilization_ratio",
        "tq_storage_memory_limit_bytes",
        "tq_storage_disk_limit_bytes",
    }


def test_any_name_survives_and_leaves_with_its_partition(tq: Any) -> None:
    names = ["plain", 'say "hi"', "back\\slash\\", "two\nlines", "日本 語", "", "a,b}=1 {", "tab\tand\rreturn"]
    for name in names:
        tq.kv_put("k", name, {"x": torch.ones(2)})
        tq.get_client().get_meta(["x"], 1, name, task_name=name + " task")
    got = scrape(tq.get_metrics_endpoint())
    assert got.labels("tq_partition_samples_total", "partition_id") == set(names)
    for name in names:
        assert got.of("tq_partition_consumption_progress", partition_id=name, task_name=name + " task") == 1
    for name in names[1:]:
        tq.get_client().clear_partition(name)
    got = scrape(tq.get_metrics_endpoint())
    for family in ("samples_total", "production_progress", "consumption_progress"):
        assert got.labels(f"tq_partition_{family}", "partition_id") == {"plain"}


def test_every_family_has_help_and_a_type(tq: Any) -> None:
    tq.kv_put("k", "p", {"x": torch.ones(2)})
    families = list(text_string_to_metric_families(fetch(tq.get_metrics_endpoint())))
    kinds = {family.name: family.type for family in families}
    assert "unknown" not in kinds.values()
    assert all(family.documentation for family in families)
    assert kinds["tq_controller_request"] == kinds["tq_storage_request"] == "counter"
    assert kinds["tq_controller_request_duration_seconds"] == "histogram"
    assert kinds["tq_storage_request_latency_p99"] == kinds["tq_partitions_total"] == "gauge"


def test_scrapes_while_eight_threads_put_and_get(tq: Any) -> None:
    endpoint, rounds, failures = tq.get_metrics_endpoint(), 40, list[BaseException]()

    def work(number: int) -> None:
        try:
            for _ in range(rounds):
                tq.kv_put(f"t{number}", "p", {"x": torch.ones(4)})
                tq.kv_batch_get(f"t{number}", "p")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(scrape(endpoint).sum("tq_controller_request_total", op_type="GET_DATA"))
    for thread in threads:
        thread.join()
    assert not failures
    assert seen == sorted(seen), "a counter never falls"
    got = scrape(endpoint)
    for op in ("NOTIFY_DATA_UPDATE", "GET_DATA"):
        for kind in ("total", "samples_total", "duration_seconds_count"):
            assert got.of(f"tq_controller_request_{kind}", op_type=op) == 8 * rounds
    assert got.sum("tq_storage_request_total", op_type="PUT_DATA") == 8 * rounds


def _connect(endpoint: str) -> socket.socket:
    host, port = endpoint.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def _half_a_request(line: Any, endpoint: str) -> None:
    connection = _connect(endpoint)
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
    line.send("sent")
    line.recv()


def test_scrapers_that_are_killed_or_hang(tq: Any, nursery: Nursery) -> None:
    endpoint = tq.get_metrics_endpoint()
    child = nursery.start(_half_a_request, endpoint)
    child.recv()
    child.signal(signal.SIGKILL)
    for _ in range(5):
        with _connect(endpoint) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")  # and go away without reading
    hanging = [_connect(endpoint) for _ in range(40)]
    tq.kv_put("k", "p", {"x": torch.ones(2)})
    assert tq.kv_list("p") == {"p": {"k": {}}}
    for connection in hanging:
        connection.close()

    def works() -> bool:
        try:
            return bool(scrape(endpoint).of("tq_partitions_total") == 1)
        except OSError:
            return False

    until(works, "the page is back when they have gone")


def test_other_paths_and_methods(tq: Any) -> None:
    endpoint = tq.get_metrics_endpoint()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(endpoint, "/")
    assert "tq_partitions_total 0" in fetch(endpoint, "/metrics?name=x")
    connection = http.client.HTTPConnection(endpoint, timeout=20)
    connection.request("HEAD", "/metrics")
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (200, b"")
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    connection.close()
    connection.request("POST", "/metrics", body="x")
    assert connection.getresponse().status == 501
    connection.close()


def _endpoints(line: Any, conf: Any = None) -> list[Any]:
    import transfer_queue as tq

    line.send("ready")
    line.recv()
    if conf is None:
        return [tq.get_metrics_endpoint()]
    returned = tq.init(conf)
    told = [returned.metrics.endpoint, tq.get_metrics_endpoint()]
    line.send(told)
    line.recv()
    tq.close()
    return told


def test_attached_processes_know_it(tq: Any, nursery: Nursery) -> None:
    endpoint = tq.get_metrics_endpoint()
    assert endpoint == tq.init().metrics.endpoint
    first, second = nursery.start(_endpoints), nursery.start(_endpoints, {})
    for child in (first, second):
        child.recv()
        child.send("go")
    assert first.result() == [endpoint]
    assert second.recv() == [endpoint, endpoint]
    second.send("end")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("fixed", [True, False])
def test_processes_that_race_agree(nursery: Nursery, runtime_dir: Path, fixed: bool) -> None:
    port = _free_port() if fixed else 0
    children = [nursery.start(_endpoints, {"metrics": {"enabled": True, "port": port}}) for _ in range(6)]
    for child in children:
        child.recv()
    for child in children:
        child.send("go")
    told = {endpoint for child in children for endpoint in child.recv()}
    assert len(told) == 1
    assert not fixed or told == {f"127.0.0.1:{port}"}
    assert scrape(told.pop()).of("tq_controller_clients") == 6
    for child in children:
        child.send("end")
    for child in children:
        child.result()


def test_a_process_without_a_session_and_one_without_metrics(runtime_dir: Path) -> None:
    import transfer_queue as tq

    assert tq.get_metrics_endpoint() is None
    stale = tq.init({"metrics": {"endpoint": "gone:1"}})
    try:
        assert (tq.get_metrics_endpoint(), stale.metrics.get("endpoint")) == (None, None)
    finally:
        tq.close()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("runtime", ["auto", "embedded"])
def test_a_taken_port_is_named_and_nothing_is_left(runtime_dir: Path, taken: int, runtime: str) -> None:
    import transfer_queue as tq

    conf = {"runtime": runtime, "metrics": {"enabled": True, "port": taken}}
    with pytest.raises(ValueError, match=rf"metrics\.port: cannot listen on port {taken} of 127\.0\.0\.1: .*in use"):
        tq.init(conf)
    assert not _session.has_session()
    assert {path.suffix for path in runtime_dir.iterdir()} <= {".lock"}
    with pytest.raises(AssertionError):
        tq.kv_list()


def test_a_host_that_is_none(runtime_dir: Path) -> None:
    import transfer_queue as tq

    for host in ("192.0.2.77", "no.such.host.invalid"):
        with pytest.raises(ValueError, match=r"metrics\.host"):
            tq.init({"runtime": "embedded", "metrics": {"enabled": True, "host": host}})


def test_open_to_other_hosts_the_endpoint_is_an_address_that_they_reach(runtime_dir: Path) -> None:
    import transfer_queue as tq

    tq.init({"metrics": {"enabled": True, "host": "0.0.0.0"}})
    try:
        endpoint = tq.get_metrics_endpoint()
        assert endpoint is not None
        assert not endpoint.startswith("0.0.0.0")
        assert scrape(endpoint).of("tq_partitions_total") == 0
    finally:
        tq.close()


def test_it_ends_with_the_session_and_comes_back_on_the_same_port(runtime_dir: Path) -> None:
    import transfer_queue as tq

    port = _free_port()
    for _ in range(3):
        tq.init({"metrics": {"enabled": True, "port": port}})
        assert scrape(f"127.0.0.1:{port}").of("tq_partitions_total") == 0
        tq.close()
        with pytest.raises(OSError, match=r"refused|reset"):
            fetch(f"127.0.0.1:{port}")
    assert tq.get_metrics_endpoint() is None


def test_a_forked_child_does_not_serve(runtime_dir: Path) -> None:
    import transfer_queue as tq

    tq.init(METRICS)
    endpoint = tq.get_metrics_endpoint()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        signal.alarm(40)
        ours.close()
        theirs.sendall(str(tq.get_metrics_endpoint()).encode())
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        assert ours.recv(100).decode() == endpoint
        assert scrape(endpoint).of("tq_controller_clients") == 2
        tq.close()
        with pytest.raises(OSError, match=r"refused|reset"):
            fetch(endpoint)
    finally:
        ours.close()
        assert os.waitpid(pid, 0)[1] == 0


def test_two_sessions_in_one_process(tq: Any, nursery: Nursery) -> None:
    other = _session.own_private(config.load({"backend": {"SimpleStorage": {"num_data_storage_units": 3}}}))
    try:
        endpoint = _metrics.start_metrics(other)
        assert endpoint == _metrics.start_metrics(other, 1), "idempotent"
        assert endpoint == other.config.metrics.endpoint != tq.get_metrics_endpoint()
        tq.kv_put("k", "first", {"x": torch.ones(2)})
        client = tq.TransferQueueClient("by hand", other.info)
        client.put(table(2, "x"), partition_id="second")
        first, second = scrape(tq.get_metrics_endpoint()), scrape(endpoint)
        assert first.labels("tq_partition_samples_total", "partition_id") == {"first"}
        assert second.labels("tq_partition_samples_total", "partition_id") == {"second"}
        assert len(second.labels("tq_storage_cells", "storage_unit_id")) == 3
        told = nursery.start(lambda line, info: _session.join(info).config.metrics.endpoint, other.info)
        assert told.result() == endpoint, "processes that attach later are told"
    finally:
        _session._others.pop(other.id).close()
    with pytest.raises(OSError, match=r"refused|reset"):
        fetch(endpoint)


def test_only_the_owner_serves(tq: Any, nursery: Nursery) -> None:
    def start(line: Any) -> str:
        import transfer_queue as tq
        from transfer_queue import _metrics, _session

        tq.init()
        try:
            _metrics.start_metrics(_session.current())
        except errors.InvalidStateError as error:
            return str(error)
        return ""

    assert "only the process that owns" in nursery.start(start).result()


def test_a_page_whose_session_has_gone_says_so(runtime_dir: Path) -> None:
    page = _metrics.Page("127.0.0.1", 0)
    page.serve(12345)
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fetch(page.endpoint)
    finally:
        page.close()


def test_the_daemon_serves_them(runtime_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text("metrics: {enabled: true}\n")
    with program("-m", "transfer_queue", "serve", "--config", str(path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving session")
        import transfer_queue as tq

        endpoint = tq.get_metrics_endpoint()
        try:
            assert scrape(endpoint).of("tq_controller_clients") == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            with pytest.raises(OSError, match=r"refused|reset"):
                fetch(endpoint)
        finally:
            tq.close()


SAMPLER = """
from transfer_queue import BaseSampler


class Local(BaseSampler):
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return ready_indexes[:batch_size], ready_indexes[:batch_size]
"""


@pytest.mark.parametrize("when", ["at init", "later"])
def test_processes_attach_without_the_module_of_the_sampler(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The page changes the configuration that they are given, sampler included."""
    import transfer_queue as tq

    (tmp_path / "local_sampler_of_a_test.py").write_text(SAMPLER)
    monkeypatch.syspath_prepend(tmp_path)
    sampler = importlib.import_module("local_sampler_of_a_test").Local()
    tq.init({"controller": {"sampler": sampler}, "metrics": {"enabled": when == "at init"}})
    try:
        if when == "later":
            _metrics.start_metrics(_session.current())
        text = "import transfer_queue as tq; print(tq.init({'runtime': 'attach'}).metrics.endpoint); tq.close()"
        with program("-c", text) as process:
            assert process.communicate(timeout=60)[0].strip() == tq.get_metrics_endpoint()
    finally:
        tq.close()
        sys.modules.pop("local_sampler_of_a_test")
