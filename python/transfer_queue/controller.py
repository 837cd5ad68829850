"""The controller as a Ray actor. `init` makes one when Ray is running; programs may make others by hand."""

from __future__ import annotations

from transfer_queue._actor_class import ActorClass

__all__ = ["TransferQueueController"]

_DOC = """Controller of a session, as a class of Ray actors.

``TransferQueueController.options(...).remote(sampler=None, polling_mode=False)`` starts one, in a process of its own
that reserves no CPU. It has no units until a client names some in ``initialize_storage_manager``. Its address is what
``get_zmq_server_info`` answers; all methods are those of the actor, called with ``.remote``.
"""

TransferQueueController = ActorClass(
    "TransferQueueController",
    _DOC,
    "transfer_queue._controller_host",
    "ControllerHost",
    num_cpus=0,
    max_concurrency=1000,
)
