"""The unit actors that `init` starts under Ray."""

from __future__ import annotations

import os
from typing import Any

from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

__all__ = ["actor_name", "start"]


def actor_name(rank: int) -> str:
    """Name of the actor of a unit, in the Ray namespace of who calls ``init``."""
    return f"TransferQueueStorageUnit#{rank}"


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
    environment = {name: value for name, value in os.environ.items() if name.startswith("TQ_")}
    return {
        f"unit-{rank}": simple_storage.SimpleStorageUnit.options(
            name=actor_name(rank), scheduling_strategy=place, **restarts
        ).remote(plain, name=f"unit-{rank}", environment=environment)
        for rank, place in enumerate(places)
    }
