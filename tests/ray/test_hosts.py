"""A Ray cluster whose nodes are different hosts, as far as the package can tell."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clusters import assert_nothing_left
from processes import until

HOSTS = ("host-a", "host-b", "host-c")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with a node on each host; this process is on that of the first."""
    from ray.cluster_utils import Cluster

    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_HOST_ID", HOSTS[0])
        head = {"num_cpus": 2, "include_dashboard": False, "resources": {HOSTS[0]: 8}}
        running = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=running.address, log_to_driver=False)  # while no other node could be this process's
            for host in HOSTS[1:]:
                running.add_node(num_cpus=2, resources={host: 8}, env_vars={"TQ_HOST_ID": host})
            yield ray
        finally:
            ray.shutdown()
            running.shutdown()


class Worker:
    """Puts and gets on the host where it runs."""

    def host(self) -> tuple[str, str]:
        import os

        from transfer_queue import _session

        return os.environ["TQ_HOST_ID"], _session.current().info.to_addr("requests")

    def put(self, key: str, width: int, value: float) -> None:
        import transfer_queue as tq

        tq.kv_put(key, "p", fields={"x": torch.full((width,), value)})

    def total(self, key: str) -> float:
        import transfer_queue as tq

        return float(tq.kv_batch_get(key, "p")["x"].unbind()[0].double().sum())

    def add(self, key: str, width: int) -> None:
        import transfer_queue as tq

        tq.kv_update(key, "p", {"x": torch.ones(width)}, lambda old, new: old + new)

    def maps_units(self) -> bool:
        with open("/proc/self/maps") as maps:
            return any("memfd" in line for line in maps)

    def unit_of(self, key: str) -> list[str]:
        import transfer_queue as tq

        return [unit.unit_id for unit in tq.list_units() if unit.memory_used_bytes]


def test_units_and_clients_of_all_hosts(cluster: Any) -> None:
    import transfer_queue as tq

    conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    try:
        units = {unit.unit_id: unit.state for unit in tq.list_units()}
        assert units == {"unit-0": "ACTIVE", "unit-1": "ACTIVE", "unit-2": "ACTIVE"}
        remote = cluster.remote(Worker)
        workers = {host: remote.options(num_cpus=0, resources={host: 1}).remote() for host in HOSTS}
        at = {host: cluster.get(worker.host.remote()) for host, worker in workers.items()}
        assert [found for found, _ in at.values()] == list(HOSTS)
        home = conf.controller.zmq_info.machine  # nodes that are new may not know that of the program yet
        for host, address in at.values():
            assert address.startswith("ipc://" if host == home else "tcp://")
        homes = {}
        for width in (3, 300_000):
            for host, worker in workers.items():
                cluster.get(worker.put.remote(host, width, 2.0))
                holding = cluster.get(worker.unit_of.remote(host))
                assert len(holding) == 1
                homes[host] = holding[0]
                for reader in workers.values():
                    assert cluster.get(reader.total.remote(host)) == 2.0 * width
                cluster.get(workers["host-b"].add.remote(host, width))
                assert float(tq.kv_batch_get(host, "p")["x"].unbind()[0].double().sum()) == 3.0 * width
                tq.kv_clear(host, "p")
                assert cluster.get(worker.unit_of.remote(host)) == []
        assert len(set(homes.values())) == 3, "everybody's samples are on the unit of his host"
        assert all(cluster.get([worker.maps_units.remote() for worker in workers.values()])), "and are mapped there"
        for worker in workers.values():
            cluster.kill(worker)
    finally:
        tq.close()
    assert_nothing_left(cluster)


def _mechanism(address: str) -> str:
    """How connections to a port of ZeroMQ authenticate, as the greeting of ZMTP 3 says."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock, sock.makefile("rb") as answer:
        sock.sendall(b"\xff" + bytes(7) + b"\x01\x7f\x03")
        return answer.read(64)[12:32].rstrip(b"\0").decode()


def test_everything_between_hosts_is_encrypted(cluster: Any) -> None:
    import transfer_queue as tq

    conf = tq.init({"security": "curve", "backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    try:
        remote = cluster.remote(Worker)
        workers = {host: remote.options(num_cpus=0, resources={host: 1}).remote() for host in HOSTS}
        served = [conf.controller.zmq_info, *conf.backend.SimpleStorage.zmq_info.values()]
        assert [_mechanism(info.to_addr("requests")) for info in served] == ["CURVE"] * 4
        for width in (3, 300_000):
            for host, worker in workers.items():
                cluster.get(worker.put.remote(host, width, 2.0))
                for reader in workers.values():
                    assert cluster.get(reader.total.remote(host)) == 2.0 * width
            cluster.get(workers["host-b"].add.remote("host-c", width))
            assert float(tq.kv_batch_get("host-c", "p")["x"].unbind()[0].double().sum()) == 3.0 * width
        for worker in workers.values():
            cluster.kill(worker)
    finally:
        tq.close()
    assert_nothing_left(cluster)


def test_a_unit_of_another_host_that_dies_is_named(cluster: Any) -> None:
    import transfer_queue as tq

    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    try:
        worker = cluster.remote(Worker).options(num_cpus=0, resources={"host-c": 1}).remote()
        cluster.get(worker.put.remote("k", 100_000, 1.0))
        (home,) = cluster.get(worker.unit_of.remote("k"))
        cluster.kill(tq.interface._TQ_STORAGE[home])
        until(lambda: {u.state for u in tq.list_units() if u.unit_id == home} == {"UNAVAILABLE"}, "its end is seen", 6)
        with pytest.raises(ConnectionError, match=home):
            tq.kv_batch_get("k", "p")
        tq.kv_put("l", "p", fields={"x": torch.ones(100_000)})
        assert tq.kv_batch_get("l", "p")["x"].unbind()[0].sum() == 100_000
        cluster.kill(worker)
    finally:
        tq.close()
    for left in Path(os.environ["TQ_RUNTIME_DIR"]).glob("*.u*.sock"):
        left.unlink()  # of the unit that was killed; the next unit of the host would do it
    assert_nothing_left(cluster)
