"""The unit actors that `init` starts under Ray."""

from __future__ import annotations

import os
from typing import Any

from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

__all__ = ["start"]


@StorageBootstrapProvider.register_provider("SimpleStorage")
def start(conf: Any) -> dict[str, Any]:
    """Start the units of a configuration, spread over the live nodes; returns their handles by name.

    Raises:
        InvalidArgumentError: no node has the required resource (a ValueError).
    """
    from transfer_queue.storage import simple_storage

    section = conf["backend"]["SimpleStorage"]
    count = int(section.get("num_data_storage_units") or 1)
    places = get_node_round_robin_scheduling_strategies(count, section.get("required_node_resource"))
    plain = {key: value for key, value in section.items() if key != "zmq_info"}
    environment = {name: value for name, value in os.environ.items() if name.startswith("TQ_")}
    return {
        f"unit-{rank}": simple_storage.SimpleStorageUnit.options(
            name=f"TransferQueueStorageUnit#{rank}", scheduling_strategy=place
        ).remote(plain, name=f"unit-{rank}", environment=environment)
        for rank, place in enumerate(places)
    }
