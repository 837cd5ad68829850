"""Save the whole session while somebody writes, lose everything, and load it again; and move single samples.

Run `python tutorial/checkpoint.py`; it needs nothing else.
"""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq


def put(step: int) -> None:
    """Two samples of one step, whose rows say so."""
    rows = TensorDict({"x": torch.full((2, 1000), step)}, batch_size=[2])
    tq.kv_batch_put([f"{step}/a", f"{step}/b"], "train", fields=rows, tags=[{"step": step}] * 2)


def keep_writing(stop: threading.Event) -> None:
    """What goes on during a save."""
    step = 100
    while not stop.is_set():
        put(step)
        step += 1


def save_under_load(folder: Path) -> None:
    """The checkpoint is one moment: of every put it has all rows or none."""
    stop = threading.Event()
    writer = threading.Thread(target=keep_writing, args=(stop,))
    writer.start()
    tq.save_checkpoint(folder, metadata={"step": 7})
    stop.set()
    writer.join()
    print("metadata  ", json.loads((folder / "metadata.json").read_text())["user_metadata"])


def load(folder: Path) -> None:
    """A load replaces everything, values, tags and what was consumed, or changes nothing."""
    client = tq.get_client()
    client.clear_partition("train")
    tq.load_checkpoint(folder)
    keys = list(tq.kv_list("train")["train"])
    print("loaded    ", keys[:4], "pairs are whole:", len(keys) % 2 == 0)
    print("consumed  ", client.get_consumption_status("rollout", "train")[1].tolist()[:4])
    rows = tq.kv_batch_get(keys, "train")["x"].unbind()
    print("values    ", all(bool((row == int(key.split("/")[0])).all()) for key, row in zip(keys, rows, strict=True)))


def spoil(folder: Path) -> None:
    """A damaged checkpoint is refused, and nothing has changed."""
    (victim,) = folder.glob("controller_state*")
    victim.write_bytes(victim.read_bytes()[:-10])
    try:
        tq.load_checkpoint(folder)
    except tq.TransferQueueError as error:
        print("refused   ", type(error).__name__, "| still there:", "1/a" in tq.kv_list("train")["train"])


def dump(folder: Path) -> None:
    """Some samples, by key; they come back among the living."""
    report = tq.dump_data_by_key(folder, ["1/a", "2/b"], "train")
    tq.kv_clear(["1/a"], "train")
    print("dumped    ", report["keys"], report["rows_with_data"])
    print("back      ", tq.load_data_by_key(folder), "1/a" in tq.kv_list("train")["train"])


def main() -> None:
    """Everything once."""
    tq.init()
    put(1)
    put(2)
    tq.get_client().get_meta(["x"], 2, "train", task_name="rollout")
    with tempfile.TemporaryDirectory() as scratch:
        save_under_load(Path(scratch, "checkpoint"))
        load(Path(scratch, "checkpoint"))
        spoil(Path(scratch, "checkpoint"))
        dump(Path(scratch, "dump"))
    tq.close()


if __name__ == "__main__":
    main()
