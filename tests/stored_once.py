"""What identical payloads of a batch must do, wherever the units are: see ``kv_batch_put(..., dedup=)``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from processes import until


def used(tq: Any) -> int:
    """Bytes of memory and disk over all units."""
    return sum(unit.memory_used_bytes + unit.disk_used_bytes for unit in tq.list_units())


def exercise(tq: Any, numbers: int) -> None:
    """Put, read, update, overwrite and clear rows of which several are alike; ``numbers`` of int64 each."""
    size = 8 * numbers
    images = torch.arange(3 * numbers).reshape(3, numbers)
    keys = [f"k{i}" for i in range(6)]
    fields = TensorDict(
        {
            "image": images[[0, 0, 1, 0, 1, 2]],
            "expanded": images[:1].expand(6, -1),
            "text": NonTensorStack(*(letter * size for letter in "aabbba")),
            "reply": torch.arange(6),
        },
        batch_size=[6],
    )
    want = {name: list(fields[name]) for name in ("image", "expanded", "text", "reply")}
    tq.kv_batch_put(keys, "p", fields, dedup=["image", "expanded", "text"])
    assert used(tq) == (3 + 1 + 2) * size + 6 * 8
    _check(tq, keys, want)
    view = tq.kv_batch_get(keys, "p", select_fields=["image"], copy=False)["image"]
    tq.kv_update("k3", "p", {"image": torch.ones(numbers, dtype=torch.int64)}, "add")
    want["image"][3] = images[0] + 1
    _check(tq, keys, want)
    assert used(tq) == (4 + 1 + 2) * size + 6 * 8
    assert torch.equal(torch.stack(view.unbind()), images[[0, 0, 1, 0, 1, 2]])
    del view
    tq.kv_put("k4", "p", fields={"text": "new"})
    want["text"][4] = "new"
    _check(tq, keys, want)
    tq.kv_clear(["k0", "k5"], "p")
    _check(tq, keys[1:5], {name: values[1:5] for name, values in want.items()})
    until(lambda: used(tq) == (3 + 1 + 2) * size + 3 + 4 * 8, "what nobody has any more is freed")
    tq.kv_clear(keys[1:3], "p")
    _check(tq, keys[3:5], {name: values[3:5] for name, values in want.items()})
    tq.kv_clear(keys, "p")
    until(lambda: used(tq) == 0, "nothing is left")


def _check(tq: Any, keys: list[str], want: dict[str, list[Any]]) -> None:
    got = tq.kv_batch_get(keys, "p")
    for name in ("image", "expanded"):
        for key, row, value in zip(keys, got[name].unbind(), want[name], strict=True):
            assert torch.equal(row, value), (name, key)
    assert list(got["text"]) == want["text"]
    assert got["reply"].tolist() == [int(value) for value in want["reply"]]
