"""``copy=False``: writable private views of unit memory, whose bytes stay while the unit reuses everything else."""

from __future__ import annotations

import copy
import gc
import random
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import until

ROW = 8192  # int64: 64 KiB, so that a column of one row is viewed too


def _put(tq: Any, count: int, start: int = 0) -> list[str]:
    keys = [str(n) for n in range(start, start + count)]
    rows = torch.arange(start * ROW, (start + count) * ROW).reshape(count, ROW)
    tq.kv_batch_put(keys, "p", TensorDict({"x": rows}, batch_size=[count]))
    return keys


def _want(key: str) -> torch.Tensor:
    return torch.arange(int(key) * ROW, (int(key) + 1) * ROW)


def _used(tq: Any) -> int:
    return sum(unit.memory_used_bytes for unit in tq.list_units())


def _leases(tq: Any) -> int:
    return sum(unit.leases for unit in tq.list_units())


@pytest.fixture
def conf() -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}


def test_a_view_is_no_copy_and_ends_with_its_last_tensor(tq: Any) -> None:
    keys = _put(tq, 16)
    got = tq.kv_batch_get(keys, "p", copy=False)["x"]
    assert _leases(tq) == 1
    row = got[3]
    del got
    assert _leases(tq) == 1, "a row keeps the memory"
    assert torch.equal(row, _want("3"))
    del row
    until(lambda: _leases(tq) == 0, "the lease ends with the last tensor")


def test_bytes_stay_while_the_unit_reuses_memory(tq: Any) -> None:
    keys = _put(tq, 16)
    view = tq.kv_batch_get(keys, "p", copy=False)["x"]
    tq.kv_clear(keys, "p")
    assert _used(tq) == 16 * ROW * 8, "cleared cells that a reader holds still count"
    for start in range(16, 80, 16):
        tq.kv_clear(_put(tq, 16, start), "p")
    _put(tq, 16, 200)
    assert torch.equal(view.values(), torch.arange(16 * ROW))
    del view
    until(lambda: _used(tq) == 16 * ROW * 8, "memory of cleared cells comes back with the view's end")


def test_updates_and_overwrites_are_not_seen_by_a_view(tq: Any) -> None:
    keys = _put(tq, 4)
    view = tq.kv_batch_get(keys, "p", copy=False)["x"]
    tq.kv_batch_update(keys, "p", TensorDict({"x": torch.ones(4, ROW, dtype=torch.int64)}, batch_size=[4]), "add")
    tq.kv_put("0", "p", {"x": torch.zeros(ROW, dtype=torch.int64)})
    assert torch.equal(view.values(), torch.arange(4 * ROW))


def test_writing_to_a_view_changes_no_other_reader(tq: Any) -> None:
    keys = _put(tq, 4)
    view = tq.kv_batch_get(keys, "p", copy=False)["x"]
    view.values().mul_(-1)
    for other in (tq.kv_batch_get(keys, "p", copy=False)["x"], tq.kv_batch_get(keys, "p")["x"]):
        assert torch.equal(other.values(), torch.arange(4 * ROW))
    assert torch.equal(view.values(), -torch.arange(4 * ROW))
    del view, other
    gc.collect()
    until(lambda: _leases(tq) == 0, "leases end")
    again = tq.kv_batch_get(keys, "p", copy=False)["x"]
    assert torch.equal(again.values(), torch.arange(4 * ROW)), "pages that the first view wrote are dropped"


def test_pages_that_are_viewed_already_are_copied(tq: Any) -> None:
    keys = _put(tq, 4)
    first = tq.kv_batch_get(keys, "p", copy=False)["x"]
    second = tq.kv_batch_get(keys[1:3], "p", copy=False)["x"]
    second.values().zero_()
    assert torch.equal(first.values(), torch.arange(4 * ROW))
    first.values().zero_()
    assert torch.equal(tq.kv_batch_get(keys, "p")["x"].values(), torch.arange(4 * ROW))


def test_a_view_outlives_its_session(runtime_dir: Any) -> None:
    import transfer_queue as tq

    tq.init()
    keys = _put(tq, 4)
    view = tq.kv_batch_get(keys, "p", copy=False)["x"]
    result = tq.kv_batch_get(keys, "p")["x"]
    tq.close()
    tq.init()
    try:
        tq.kv_clear(_put(tq, 32, 100), "p")
        assert torch.equal(view.values(), torch.arange(4 * ROW))
        assert torch.equal(result.values(), torch.arange(4 * ROW))
        view.values().zero_()
        del view, result
        gc.collect()
        assert torch.equal(tq.kv_batch_get(_put(tq, 4), "p")["x"].values(), torch.arange(4 * ROW))
    finally:
        tq.close()


def test_a_copy_of_a_view_is_independent(tq: Any) -> None:
    keys = _put(tq, 4)
    view = tq.kv_batch_get(keys, "p", copy=False)
    kept = [view.clone(), copy.deepcopy(view)["x"]]
    del view
    until(lambda: _leases(tq) == 0, "clones hold no memory of the unit")
    tq.kv_clear(keys, "p")
    _put(tq, 4, 50)
    assert torch.equal(kept[0]["x"].values(), torch.arange(4 * ROW))
    assert torch.equal(kept[1].values(), torch.arange(4 * ROW))


def test_random_views_writes_and_overlaps(tq: Any) -> None:
    """Random reads of overlapping ranges, copied or viewed, written to or not, among puts, clears and updates."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    model: dict[str, torch.Tensor] = {}
    held: list[tuple[Any, torch.Tensor]] = []
    for _ in range(400):
        act = rng.random()
        if act < 0.3 or not model:
            start, count = rng.randrange(24), rng.randrange(1, 9)
            keys = _put(tq, count, start)
            model.update({key: _want(key) for key in keys})
        elif act < 0.4:
            keys = rng.sample(sorted(model), rng.randrange(1, len(model) + 1))
            tq.kv_clear(keys, "p")
            for key in keys:
                del model[key]
        elif act < 0.5:
            key = rng.choice(sorted(model))
            tq.kv_update(key, "p", {"x": torch.ones(ROW, dtype=torch.int64)}, "add")
            model[key] = model[key] + 1
        elif act < 0.85:
            first = rng.randrange(len(model))
            keys = sorted(model, key=int)[first : first + rng.randrange(1, 9)]
            got = tq.kv_batch_get(keys, "p", copy=rng.random() < 0.2)["x"]
            want = torch.cat([model[key] for key in keys])
            assert torch.equal(got.values(), want)
            if rng.random() < 0.4:
                value = rng.randrange(1 << 40)
                got.values()[:: rng.choice([1, 500])] = value
                want = got.values().clone()
            held.append((got, want))
        elif held:
            held.pop(rng.randrange(len(held)))
        for got, want in rng.sample(held, min(3, len(held))):
            assert torch.equal(got.values(), want)
    for got, want in held:
        assert torch.equal(got.values(), want)


def test_views_on_many_threads(tq: Any) -> None:
    keys = _put(tq, 8)
    failed: list[BaseException] = []

    def reads(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                first = rng.randrange(8)
                some = keys[first : first + rng.randrange(1, 5)]
                got = tq.kv_batch_get(some, "p", copy=False)["x"]
                want = torch.cat([_want(key) for key in some])
                assert torch.equal(got.values(), want)
                got.values().fill_(seed)
                assert bool((got.values() == seed).all())
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=reads, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    assert not failed, failed
