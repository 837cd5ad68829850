"""The storage unit as a Ray actor. `init` makes them when Ray is running; programs may make others by hand."""

from __future__ import annotations

from transfer_queue._actor_class import ActorClass

__all__ = ["SimpleStorageUnit"]

_DOC = """Storage unit, as a class of Ray actors.

``SimpleStorageUnit.options(...).remote(config)`` starts one, in a process of its own that reserves no CPU. ``config``
is the section ``backend.SimpleStorage``; ``remote(storage_unit_size=n)`` limits it to n samples instead. Its address is
what ``get_zmq_server_info`` answers; given to a client's ``initialize_storage_manager`` it joins the session.
"""

SimpleStorageUnit = ActorClass(
    "SimpleStorageUnit", _DOC, "transfer_queue._unit_actor", "UnitActor", num_cpus=0, max_concurrency=1000
)
