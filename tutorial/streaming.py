"""A partition as a stream of micro-batches, loaded by worker processes. Runs in seconds, alone on one host.

A producer puts samples while the trainer reads them. The stream waits for samples, comes in the same order for any
number of workers, and ends when the task has consumed what was planned.

    python tutorial/streaming.py
"""

from __future__ import annotations

import os
import threading
import time

import torch
from tensordict import TensorDict

SAMPLES = 12
# How many samples a partition will have, so that the stream does not take a pause of the producer for the end.
os.environ["TQ_PRE_ALLOC_SAMPLE_NUM"] = str(SAMPLES)

import transfer_queue as tq  # noqa: E402


def produce(partition: str) -> None:
    """Put samples of different lengths, a few at a time."""
    for first in range(0, SAMPLES, 4):
        rows = [torch.full((1 + number % 3,), number) for number in range(first, first + 4)]
        tokens = torch.nested.nested_tensor(rows, layout=torch.jagged)
        tq.get_client().put(TensorDict({"tokens": tokens}, batch_size=[4]), partition_id=partition)
        time.sleep(0.1)


def train(loader: tq.StreamingDataLoader) -> list[list[int]]:
    """The samples of every micro-batch."""
    return [[int(row[0]) for row in data["tokens"].unbind()] for data, _ in loader]


def main() -> None:
    """Two steps of a trainer with two workers."""
    torch.set_num_threads(1)  # forked workers want a parent without threads of torch
    # A sampler that remembers its answers: every pipeline stage that asks for a batch gets the same one.
    config = tq.init({"controller": {"sampler": "RankAwareSampler", "polling_mode": True}})

    # Other processes need only the configuration: each worker joins the session by itself.
    dataset = tq.StreamingDataset(
        config,
        batch_size=4,
        micro_batch_size=3,
        data_fields=["tokens"],
        partition_id="step_0",
        task_name="train",
        dp_rank=0,
        should_check_consumption_status=True,
    )
    loader = tq.StreamingDataLoader(dataset, num_workers=2, persistent_workers=True)

    producer = threading.Thread(target=produce, args=("step_0",))
    producer.start()
    print("step 0   ", train(loader))
    producer.join()

    # A second pass over the same batches comes from memory, even when the queue has let them go.
    tq.get_client().clear_partition("step_0")
    loader.reset()
    print("again    ", train(loader))

    # The same workers go on with the next partition.
    produce("step_1")
    loader.step("step_1")
    print("step 1   ", train(loader))
    print("lengths  ", [data["tokens"].offsets().diff().tolist() for data, _ in loader.get_buffer()])
    del loader  # its workers end
    tq.get_client().clear_partition("step_1")
    tq.close()


if __name__ == "__main__":
    main()
