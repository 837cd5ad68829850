"""The queue between actors of Ray: some write, one waits for their samples, and no tensor passes through Ray.

Run `python tutorial/ray_actors.py`; it starts a Ray of its own on this machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # a local Ray binds to loopback only

import torch
from tensordict import TensorDict

import ray
import transfer_queue as tq

ROWS = 4


@ray.remote(num_cpus=0.1)
class Rollout:
    """Writes samples. It needs no handle of the queue: a call joins the session of this Ray."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def generate(self, step: int) -> list[str]:
        """Put a batch and return only its keys."""
        keys = [f"{step}/{self.rank}/{row}" for row in range(ROWS)]
        answers = torch.nested.nested_tensor([torch.arange(row + 1) for row in range(ROWS)], layout=torch.jagged)
        tq.kv_batch_put(keys, "train", fields=TensorDict({"answer": answers}, [ROWS]), tags=[{"step": step}] * ROWS)
        return keys


@ray.remote(num_cpus=0.1)
class Trainer:
    """Reads samples as soon as there are enough."""

    def train(self, step: int, samples: int) -> int:
        """Wait for a step's samples, use them, and free them."""
        batch = tq.kv_wait("train", count=samples, fields=["answer"], tags={"step": step}, timeout=60)
        tokens = sum(len(row) for row in tq.kv_batch_get(batch.keys, "train")["answer"].unbind())
        tq.kv_clear(batch.keys, "train")
        return tokens


def main() -> None:
    """Two steps of two rollout actors and a trainer."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init()  # the first process of this Ray creates controller and units as actors
    print("units     ", len(tq.list_units()))
    trainer, rollouts = Trainer.remote(), [Rollout.remote(rank) for rank in range(2)]
    for step in range(2):
        trained = trainer.train.remote(step, 2 * ROWS)  # it waits in the queue
        ray.get([rollout.generate.remote(step) for rollout in rollouts])
        print("step", step, "tokens", ray.get(trained))
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    print("partitions", ray.get(controller.list_partitions.remote()))
    print("left      ", sum(unit.memory_used_bytes for unit in tq.list_units()), "bytes")
    tq.close()  # the owner's close ends the actors
    ray.shutdown()


if __name__ == "__main__":
    main()
