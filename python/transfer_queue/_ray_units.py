"""The unit actors that `init` starts under Ray."""

from __future__ import annotations

import os
from typing import Any

from transfer_queue._actor_class import ray_module
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

__all__ = ["actor_name", "environment", "several_nodes", "start"]


def actor_name(rank: int) -> str:
    """Name of the actor of a unit, in the Ray namespace of who calls ``init``."""
    return f"TransferQueueStorageUnit#{rank}"


def environment() -> dict[str, str]:
    """Variables of this process that its actors get, but for what is of its host alone."""
    return {name: value for name, value in os.environ.items() if name.startswith("TQ_") and name != "TQ_HOST_ID"}


def several_nodes() -> bool:
    """Whether the cluster has several nodes, so that parts of a session may have to be reached over TCP."""
    return sum(bool(node["Alive"]) for node in ray_module().nodes()) > 1


@StorageBootstrapProvider.register_provider("SimpleStorage")
def start(conf: Any) -> dict[str, Any]:
    """Start the units of a configuration, spread over the live nodes; returns their handles by name.

    Raises:
        InvalidArgumentError: no node has the required resource (a ValueError).
    """
    from omegaconf import OmegaConf

    from transfer_queue.storage import simple_storage

    section = conf["backend"]["SimpleStorage"]
    count = int(section.get("num_data_storage_units") or 1)
    places = get_node_round_robin_scheduling_strategies(count, section.get("required_node_resource"))
    plain = OmegaConf.to_container(section, resolve=True)
    # One that keeps values beyond its process is started again when that ends, and joins with what is on its disk.
    offload = section.get("ssd_offload") or {}
    durable = offload.get("enabled") and (offload.get("durability") or "none") != "none"
    restarts = {"max_restarts": -1} if durable else {}
    listen, security = several_nodes(), conf.get("security") or ""
    return {
        f"unit-{rank}": simple_storage.SimpleStorageUnit.options(
            name=actor_name(rank), scheduling_strategy=place, **restarts
        ).remote(plain, name=f"unit-{rank}", environment=environment(), listen=listen, security=security)
        for rank, place in enumerate(places)
    }
