"""Memory of units: free at once, within its limit always, waited for when it is full (contract A4, A5)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue import errors

MIB = 1 << 20


def _used(tq: Any) -> list[int]:
    return [unit.memory_used_bytes for unit in tq.list_units()]


def _ragged(lengths: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def test_every_kind_of_column_is_counted_and_freed(tq: Any) -> None:
    """After every partial clear the bytes are exactly those of what is left."""
    lengths = [(7 * n) % 50 for n in range(40)]
    keys = [str(n) for n in range(40)]
    data = {
        "dense": torch.ones(40, 1000),
        "scalar": torch.ones(40, dtype=torch.int16),
        "ragged": _ragged(lengths),
        "text": NonTensorStack(*["x" * n for n in lengths]),
    }
    tq.kv_batch_put(keys, "p", TensorDict(data, batch_size=[40]))

    def want(rows: Any, fields: Any = ("dense", "scalar", "ragged", "text")) -> int:
        size = {"dense": 4000, "scalar": 2}
        return sum(size.get(f, lengths[n] * (8 if f == "ragged" else 1)) for n in rows for f in fields)

    assert sum(_used(tq)) == want(range(40))
    tq.kv_clear(keys[::2], "p")
    assert sum(_used(tq)) == want(range(1, 40, 2))
    tq.kv_clear(keys[1::4], "p", fields="dense")
    left = want(range(1, 40, 4), ("scalar", "ragged", "text")) + want(range(3, 40, 4))
    assert sum(_used(tq)) == left
    tq.kv_clear(keys[1::4], "p", fields=["dense", "ragged", "nothing"])
    left -= want(range(1, 40, 4), ("ragged",))
    assert sum(_used(tq)) == left
    tq.kv_put(keys[3], "p", {"text": "0123456789"})
    left += 10 - lengths[3]
    assert sum(_used(tq)) == left
    tq.kv_update(keys[3], "p", {"dense": torch.ones(24)}, "concat")
    assert sum(_used(tq)) == left + 96
    tq.kv_clear(keys, "p")
    assert sum(_used(tq)) == 0
    assert tq.kv_list() == {"p": {}}
    tq.kv_clear(keys, "p")


def test_uneven_fields_and_names_that_are_prefixes(tq: Any) -> None:
    tq.kv_put("1", "p", {"x": torch.ones(10), "x2": torch.ones(10)})
    tq.kv_put("11", "p", {"x": torch.ones(10)})
    tq.kv_put("tag", "p", tag={"n": 1})
    tq.kv_clear("1", "p", fields="x")
    assert set(tq.kv_batch_get("1", "p").keys()) == {"x2"}
    assert tq.kv_batch_get("11", "p")["x"].values().numel() == 10
    tq.kv_clear(["1", "missing"], "p")
    assert set(tq.kv_list("p")["p"]) == {"11", "tag"}
    tq.kv_clear(["tag", "11"], "p")
    assert sum(_used(tq)) == 0
    assert tq.kv_list() == {"p": {}}


def test_clearing_many_cells_is_quick(tq: Any) -> None:
    count = 4000
    keys = [str(n) for n in range(count)]
    fields = {f"f{n}": torch.ones(count, 2) for n in range(7)}
    tq.kv_batch_put(keys, "p", TensorDict(fields, batch_size=[count]))
    began = time.process_time()  # the units are in this process
    tq.kv_clear(keys, "p")
    assert time.process_time() - began < 1
    assert sum(_used(tq)) == 0


def test_indexes_are_reused_smallest_first_and_show_nothing_old(tq: Any) -> None:
    client = tq.get_client()
    tq.kv_batch_put([*"abcd"], "p", TensorDict({"x": torch.arange(4), "y": torch.arange(4)}, batch_size=[4]))
    old = client.kv_retrieve_meta([*"abcd"], "p")
    assert old.global_indexes == sorted(old.global_indexes)
    tq.kv_clear(["b", "d"], "p")
    tq.kv_batch_put(["u", "v"], "q", TensorDict({"x": torch.tensor([10, 11])}, batch_size=[2]))
    new = client.kv_retrieve_meta(["u", "v"], "q")
    assert new.global_indexes == [old.global_indexes[1], old.global_indexes[3]]
    assert tq.kv_batch_get(["u", "v"], "q")["x"].tolist() == [10, 11]
    assert list(tq.kv_batch_get("u", "q").keys()) == ["x"], "y was the old sample's"
    with pytest.raises(KeyError):
        client.get_data(old)
    with pytest.raises(KeyError):
        client.put(TensorDict({"z": torch.zeros(4)}, batch_size=[4]), metadata=old)
    client.clear_samples(old)  # late: hits neither new sample
    assert tq.kv_batch_get(["u", "v"], "q")["x"].tolist() == [10, 11]


class TestLimited:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        storage = {"num_data_storage_units": 1, "memory_limit_bytes": 8 * MIB, "put_wait_s": 0.3}
        return {"backend": {"SimpleStorage": storage}}

    def test_a_put_that_does_not_fit_fails_and_leaves_nothing(self, tq: Any) -> None:
        tq.kv_put("a", "p", {"x": torch.zeros(6 * MIB, dtype=torch.uint8)})
        began = time.monotonic()
        with pytest.raises(errors.ResourceExhaustedError, match=str(8 * MIB)) as raised:
            tq.kv_batch_put(
                ["b", "c"],
                "p",
                TensorDict({"x": torch.zeros(2, 2 * MIB, dtype=torch.uint8)}, batch_size=[2]),
                tags=[{}, {}],
            )
        assert 0.2 < time.monotonic() - began < 5
        assert isinstance(raised.value, MemoryError)
        assert str(6 * MIB) in str(raised.value)
        assert tq.kv_list("p") == {"p": {"a": {}}}
        assert _used(tq) == [6 * MIB]
        tq.kv_put("d", "p", {"x": torch.zeros(2 * MIB, dtype=torch.uint8)})
        assert _used(tq) == [8 * MIB]
        assert tq.list_units()[0].memory_limit_bytes == 8 * MIB

    def test_updates_are_held_to_the_limit_too(self, tq: Any) -> None:
        tq.kv_put("a", "p", {"x": torch.zeros(5 * MIB, dtype=torch.uint8)})
        for merge in ("concat", lambda old, new: torch.cat([old, new])):
            with pytest.raises(errors.ResourceExhaustedError):
                tq.kv_update("a", "p", {"x": torch.zeros(4 * MIB, dtype=torch.uint8)}, merge)
            assert _used(tq) == [5 * MIB]
        assert tq.kv_batch_get("a", "p")["x"].values().numel() == 5 * MIB

    def test_a_dropped_view_makes_room(self, tq: Any) -> None:
        """Views in cycles are found before a put fails."""
        tq.kv_put("a", "p", {"x": torch.zeros(6 * MIB, dtype=torch.uint8)})
        cycle: list[Any] = [tq.kv_batch_get("a", "p", copy=False)]
        cycle.append(cycle)
        tq.kv_clear("a", "p")
        del cycle
        tq.kv_put("b", "p", {"x": torch.zeros(6 * MIB, dtype=torch.uint8)})


class TestWaiting:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        storage = {"num_data_storage_units": 1, "memory_limit_bytes": 4 * MIB, "put_wait_s": 20}
        return {"backend": {"SimpleStorage": storage}}

    def test_what_can_never_fit_is_refused_at_once(self, tq: Any) -> None:
        began = time.monotonic()
        with pytest.raises(errors.ResourceExhaustedError):
            tq.kv_put("a", "p", {"x": torch.zeros(5 * MIB, dtype=torch.uint8)}, timeout=30)
        assert time.monotonic() - began < 5

    def test_a_put_waits_for_room(self, tq: Any) -> None:
        tq.kv_put("a", "p", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)})
        data = torch.ones(2 * MIB, dtype=torch.uint8)
        done = threading.Event()

        def put() -> None:
            tq.kv_put("b", "p", {"x": data})
            done.set()

        worker = threading.Thread(target=put)
        worker.start()
        assert not done.wait(0.2)
        tq.kv_put("small", "p", {"x": torch.ones(10, dtype=torch.uint8)})
        assert set(tq.kv_list("p")["p"]) == {"a", "small"}
        tq.kv_clear("a", "p")
        worker.join(10)
        assert done.is_set()
        assert torch.equal(tq.kv_batch_get("b", "p")["x"].values(), data)

    def test_the_call_s_own_time_ends_the_wait(self, tq: Any) -> None:
        tq.kv_put("a", "p", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)})
        began = time.monotonic()
        with pytest.raises((TimeoutError, MemoryError)):
            tq.kv_put("b", "p", {"x": torch.zeros(2 * MIB, dtype=torch.uint8)}, timeout=0.3)
        assert time.monotonic() - began < 5
        assert _used(tq) == [3 * MIB]

    def test_a_relay_through_little_memory(self, tq: Any) -> None:
        """Writers put thirty times more than fits while readers clear."""
        count = 30

        def writes(name: str) -> None:
            for step in range(count):
                tq.kv_put(f"{name} {step}", "p", {"x": torch.full((MIB,), step, dtype=torch.uint8)})

        workers = [threading.Thread(target=writes, args=(name,)) for name in ("v", "w")]
        for worker in workers:
            worker.start()
        seen: list[str] = []
        while len(seen) < 2 * count:
            for key in tq.kv_wait("p", count=1, fields=["x"], timeout=30).keys:
                assert tq.kv_batch_get(key, "p")["x"].values().unique().tolist() == [int(key.split()[1])]
                tq.kv_clear(key, "p")
                assert _used(tq)[0] <= 4 * MIB
                seen.append(key)
        assert sorted(seen) == sorted(f"{name} {step}" for name in "vw" for step in range(count))
        for worker in workers:
            worker.join(10)


class TestSampleLimit:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"backend": {"SimpleStorage": {"num_data_storage_units": 2, "total_storage_size": 4}}}

    def test_no_more_samples_than_configured(self, tq: Any) -> None:
        tq.kv_batch_put([*"abc"], "p", TensorDict({"x": torch.arange(3)}, batch_size=[3]))
        with pytest.raises(errors.CapacityExceededError):
            tq.kv_batch_put([*"de"], "p", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
        assert set(tq.kv_list("p")["p"]) == {*"abc"}
        tq.kv_clear("a", "p")
        tq.kv_batch_put([*"de"], "p", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
