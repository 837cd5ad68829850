"""The controller as a Ray actor. `init` makes one when Ray is running; programs may make others by hand."""

from __future__ import annotations

from transfer_queue._actor_class import ActorClass

__all__ = ["TransferQueueController"]

TransferQueueController = ActorClass(
    "TransferQueueController", "transfer_queue._controller_host", "ControllerHost", num_cpus=0, max_concurrency=1000
)
