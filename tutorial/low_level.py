"""Samples by index: insert, produce, fetch, consume, with the low-level client. Runs in seconds, alone on one host.

Two tasks read the same samples, each every sample once. Nobody names a sample: `get_meta` hands them out.

    python tutorial/low_level.py
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

import transfer_queue as tq


def main() -> None:
    """The life of four samples."""
    tq.init()
    client = tq.get_client()

    prompts = TensorDict({"prompt": torch.arange(8).reshape(4, 2)}, batch_size=[4])
    meta = client.put(prompts, partition_id="train_0")
    print("put       ", meta.global_indexes, meta.field_names, meta.is_ready)

    # A fetch returns ready samples that the task has not had, and marks them as consumed by it.
    batch = client.get_meta(["prompt"], batch_size=3, partition_id="train_0", task_name="rollout")
    data = client.get_data(batch)
    answers = TensorDict({"answer": torch.stack([row + 10 for row in data["prompt"].unbind()])}, batch_size=[3])
    client.put(answers, metadata=batch)  # row i belongs to sample i of the metadata
    print("answered  ", batch.global_indexes, batch.field_names)

    # The trainer sees samples that have both columns, and its consumption is its own.
    train = client.get_meta(["prompt", "answer"], batch_size=3, partition_id="train_0", task_name="train")
    print("trained on", train.global_indexes, client.get_data(train)["answer"].unbind()[2].tolist())

    indexes, consumed = client.get_consumption_status("rollout", "train_0")
    print("consumed  ", dict(zip(indexes.tolist(), consumed.tolist(), strict=True)))
    _, produced = client.get_production_status(["prompt", "answer"], "train_0")
    print("produced  ", produced.tolist())

    # Metadata is a value: it is cut, joined, and sent to other processes instead of the data.
    left, right = train.chunk(2)
    print("chunks    ", left.global_indexes, right.global_indexes)
    print("joined    ", tq.BatchMeta.concat([right, left]).global_indexes)

    client.clear_samples(left)
    print("left      ", client.get_meta(["prompt"], None, "train_0", mode="force_fetch").global_indexes)
    client.clear_partition("train_0")
    print("partitions", client.get_partition_list())
    tq.close()


if __name__ == "__main__":
    main()
