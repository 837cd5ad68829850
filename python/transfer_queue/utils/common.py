"""Placement of Ray actors, under the names that programs of the peer package use."""

from __future__ import annotations

from typing import Any

from transfer_queue._actor_class import ray_module
from transfer_queue.errors import InvalidArgumentError, InvalidStateError, UnavailableError

__all__ = ["get_node_round_robin_scheduling_strategies", "get_placement_group"]

_PLACEMENT_S = 60.0


def get_node_round_robin_scheduling_strategies(num_actors: int, required_node_resource: str | None = None) -> list[Any]:
    """Where to start actors so that they are spread evenly: on the live nodes in turn, in the order of their ids.

    Args:
        num_actors: number of actors.
        required_node_resource: only nodes that have this Ray resource.

    Returns:
        A hard ``NodeAffinitySchedulingStrategy`` for every actor.

    Raises:
        InvalidStateError: no node is alive (a RuntimeError).
        InvalidArgumentError: no live node has the resource (a ValueError).
    """
    ray = ray_module()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    if not nodes:
        raise InvalidStateError("No alive Ray nodes found")
    if required_node_resource is not None:
        nodes = [node for node in nodes if node["Resources"].get(required_node_resource, 0) > 0]
        if not nodes:
            raise InvalidArgumentError(f"No alive Ray nodes provide custom resource '{required_node_resource}'")
    return [
        NodeAffinitySchedulingStrategy(node_id=nodes[i % len(nodes)]["NodeID"], soft=False) for i in range(num_actors)
    ]


def get_placement_group(num_ray_actors: int, num_cpus_per_actor: int = 1) -> Any:
    """A placement group with a bundle per actor, spread over the nodes. Actors of this package need none.

    Raises:
        UnavailableError: the cluster has no room for it within a minute; nothing stays reserved (a ConnectionError).
    """
    ray = ray_module()
    from ray.util.placement_group import placement_group, remove_placement_group

    if num_ray_actors < 1 or num_cpus_per_actor < 1:
        text = f"got {num_ray_actors} actors with {num_cpus_per_actor} CPUs, want at least 1 of both"
        raise InvalidArgumentError(text, "get_placement_group")
    group = placement_group([{"CPU": num_cpus_per_actor}] * num_ray_actors, strategy="SPREAD")
    done, _ = ray.wait([group.ready()], timeout=_PLACEMENT_S)
    if not done:
        remove_placement_group(group)
        text = f"no room for {num_ray_actors} bundles of {num_cpus_per_actor} CPUs within {_PLACEMENT_S:.0f} s"
        raise UnavailableError(text, "get_placement_group")
    return group
