"""A session of Ray in a program that ends things in the wrong order, and a placement on several nodes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from clusters import assert_nothing_left, hosts
from processes import program, until

WRONG_ORDER = """
    import ray, torch
    import transfer_queue as tq

    def start():
        ray.init(address="local", num_cpus=2, include_dashboard=False)

    def use():
        assert tq.kv_list() == {}
        tq.kv_put("a", "p", fields={"x": torch.arange(3)})
        assert tq.kv_batch_get("a", "p")["x"].values().tolist() == [0, 1, 2]

    try:
        tq.init({"runtime": "ray"})
    except RuntimeError as error:
        assert "ray.init()" in str(error), error
    start()
    try:
        tq.kv_list()
    except AssertionError as error:
        assert "TransferQueueController" in str(error), error
    tq.init()
    use()
    ray.shutdown()
    tq.close()
    start()
    tq.init()
    use()
    ray.shutdown()
    start()
    tq.init()
    use()
    print("done")
"""


def test_ray_is_shut_down_first_and_started_again_and_the_program_ends_without_close() -> None:
    with program("-c", textwrap.dedent(WRONG_ORDER)) as running:
        output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert "done" in output.splitlines(), output
    assert "Deprecat" not in output, "the actors warn of nothing that a user could change"
    until(lambda: not hosts(), f"the processes of the actors end: {hosts()}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Ray with three nodes, two of which have the resource "disk"."""
    from ray.cluster_utils import Cluster

    import ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"disk": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def _nodes_of_units(ray: Any) -> list[str]:
    from transfer_queue import interface

    known = ray._private.state.actors()
    return [known[unit._actor_id.hex()]["Address"]["NodeID"] for unit in interface._TQ_STORAGE.values()]


def test_units_are_spread_in_the_order_of_the_nodes(nodes: Any) -> None:
    import torch

    import transfer_queue as tq

    every = sorted(node["NodeID"] for node in nodes.nodes())
    disks = sorted(node["NodeID"] for node in nodes.nodes() if "disk" in node["Resources"])
    for resource, units, want in [(None, 4, [*every, every[0]]), ("disk", 3, [*disks, disks[0]])]:
        section = {"num_data_storage_units": units, "required_node_resource": resource}
        tq.init({"backend": {"SimpleStorage": section}})
        assert _nodes_of_units(nodes) == want
        for key in "abcd":
            tq.kv_put(key, "p", fields={"x": torch.arange(100_000)})
        assert [tq.kv_batch_get(key, "p")["x"].values()[-1] for key in "abcd"] == [99_999] * 4
        assert nodes.available_resources()["CPU"] == 3
        assert nodes.util.placement_group_table() == {}
        tq.close()
        assert_nothing_left(nodes)


def test_a_placement_group_for_programs_that_want_one(nodes: Any) -> None:
    import transfer_queue as tq

    group = tq.get_placement_group(2)
    assert [bundle["CPU"] for bundle in group.bundle_specs] == [1, 1]
    nodes.util.remove_placement_group(group)
    with pytest.raises(ValueError, match="got 0 actors"):
        tq.get_placement_group(0)
