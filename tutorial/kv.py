"""Samples by key: put, get, update, tags, wait and watch, and memory that returns.

Run `python tutorial/kv.py`; it needs nothing else.
"""

from __future__ import annotations

import asyncio
import threading

import torch
from tensordict import TensorDict

import transfer_queue as tq


def ragged(*lengths: int) -> torch.Tensor:
    """Rows of token ids, one per length."""
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def put_and_get() -> None:
    """A batch is a TensorDict; row i belongs to key i. One call writes everything or nothing."""
    batch = TensorDict({"prompt": ragged(3, 5), "reward": torch.zeros(2), "source": ["web", "book"]}, batch_size=[2])
    put = tq.kv_batch_put(["a", "b"], "train", fields=batch, tags=[{"step": 1}, {"step": 1}])
    print("put        ", put.keys, put.fields, put.tags)

    got = tq.kv_batch_get(["b", "a"], "train")  # in the order of the keys
    print("get        ", [row.tolist() for row in got["prompt"].unbind()], got["reward"].tolist(), list(got["source"]))

    one = tq.kv_batch_get("a", "train", select_fields=["reward"])
    print("one field  ", one["reward"])


def update() -> None:
    """Change cells where they lie. Native merges run in the core, a callable in the process that owns the data."""
    tq.kv_update("a", "train", {"prompt": torch.tensor([7, 8])}, merge_fn="concat")
    rewards = TensorDict({"reward": torch.tensor([1.0, 2.0])}, batch_size=[2])
    tq.kv_batch_update(["a", "b"], "train", rewards, merge_fn=lambda stored, new: stored + 10 * new)
    got = tq.kv_batch_get(["a", "b"], "train", select_fields=["prompt", "reward"])
    print("updated    ", got["prompt"].unbind()[0].tolist(), got["reward"].tolist())


def tags() -> None:
    """Tags are small dicts at the controller: merged by every put, listed and filtered without touching the data."""
    tq.kv_put("b", "train", tag={"status": "done"})
    print("done       ", tq.kv_list("train", tags={"status": "done"}))


def wait() -> None:
    """Wait for samples instead of asking again and again."""
    threading.Timer(0.1, tq.kv_put, ("c", "train", {"reward": torch.tensor(5.0)})).start()
    print("waited for ", tq.kv_wait("train", keys=["c"], fields=["reward"], timeout=10).keys)


async def watch() -> None:
    """Or see every change of a partition."""
    changes = tq.kv_watch("train")
    first = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0.05)  # the watch begins with the first anext
    await tq.async_kv_put("d", "train", tag={"status": "new"})
    change = await first
    print("watched    ", change.kind, change.key, change.tags)
    await changes.aclose()


def clear() -> None:
    """Memory is free when the call returns, also that of one field or of one row of a batch."""

    def used() -> int:
        return sum(unit.memory_used_bytes for unit in tq.list_units())

    before = used()
    tq.kv_clear(["a", "b"], "train", fields=["prompt"])
    fields = used()
    tq.kv_clear(["a", "b", "c", "d"], "train")
    print("bytes      ", before, "->", fields, "->", used())


def main() -> None:
    """Everything once."""
    tq.init()
    put_and_get()
    update()
    tags()
    wait()
    asyncio.run(watch())
    clear()
    tq.close()


if __name__ == "__main__":
    main()
