"""Memory of results: never handed out twice, independent of what is stored, and as good as any tensor's."""

from __future__ import annotations

import asyncio
import gc
import io
import pickle
import random
import threading
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from processes import until
from transfer_queue import _calls, _session


def _table(**columns: Any) -> TensorDict:
    count = len(next(iter(columns.values())))
    packed = {name: NonTensorStack(*c) if isinstance(c, list) else c for name, c in columns.items()}
    return TensorDict(packed, batch_size=[count])


def _pool() -> dict[str, int]:
    return _calls.counters(_session.current().handle)


def test_memory_of_a_result_comes_back_when_its_last_view_dies(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(1 << 20)})
    tq.kv_batch_get("a", "p")
    gc.collect()
    until(lambda: _pool()["results_held"] == 0, "nothing is held")
    got = tq.kv_batch_get("a", "p")["x"]
    part = got.values()[5:10]
    del got
    gc.collect()
    assert _pool()["results_held"] > 0
    del part
    until(lambda: _pool()["results_held"] == 0, "the last view is dead")
    idle = _pool()["pool_idle_bytes"]
    assert idle >= 8 << 20, "it is kept for the next result"
    again = tq.kv_batch_get("a", "p")["x"]
    assert _pool()["pool_idle_bytes"] < idle
    assert torch.equal(again.values(), torch.arange(1 << 20))


def test_results_are_never_handed_out_twice_while_alive(tq: Any) -> None:
    """Threads that keep results, views and cycles of them, and check the bytes again and again."""
    sizes = [1, 100, 9000, 40_000, 200_000]
    for number, size in enumerate(sizes):
        tq.kv_put(str(number), "p", {"x": torch.full((size,), number), "y": torch.full((3, 5), number)})
    failed: list[BaseException] = []

    def reads(seed: int) -> None:
        rng = random.Random(seed)
        held: list[Any] = []
        try:
            for step in range(150):
                number = rng.randrange(len(sizes))
                got = tq.kv_batch_get(str(number), "p")
                mark = seed * 1000 + step
                got["x"].values().fill_(mark)
                kept = rng.choice([got, got["x"], got["x"].values()[: 1 + sizes[number] // 2], got["x"].unbind()])
                cycle: list[Any] = [kept, mark]
                if rng.random() < 0.3:
                    cycle.append(cycle)
                held.append(cycle)
                while len(held) > 12:
                    held.pop(rng.randrange(len(held)))
                if step % 40 == 0:
                    gc.collect()
                for kept, mark, *_ in rng.sample(held, min(3, len(held))):
                    first = kept["x"] if isinstance(kept, TensorDict) else kept
                    first = first[0] if isinstance(first, tuple) else first
                    values = first.values() if first.is_nested else first
                    assert bool((values == mark).all())
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=reads, args=(seed,)) for seed in range(1, 9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
    assert not failed, failed
    gc.collect()
    until(lambda: _pool()["results_held"] == 0, "everything is given back")


def test_a_result_is_independent_of_what_is_stored(tq: Any) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(100), "n": torch.tensor(5)})
    got = tq.kv_batch_get("a", "p")
    got["x"].values().zero_()
    got["n"] += 1
    again = tq.kv_batch_get("a", "p")
    assert torch.equal(again["x"].values(), torch.arange(100))
    assert again["n"].tolist() == [5]


@pytest.mark.parametrize("size", [10, 100_000])
def test_input_may_be_overwritten_when_submit_has_returned(tq: Any, size: int) -> None:
    async def work() -> None:
        data = torch.full((4, size), 1)
        tasks = []
        for step in range(8):
            data.fill_(step)
            tasks.append(
                asyncio.ensure_future(tq.async_kv_batch_put([f"{step} {i}" for i in range(4)], "p", _table(x=data)))
            )
            await asyncio.sleep(0)  # the task runs up to its first wait
            data.fill_(-1)
        await asyncio.gather(*tasks)
        for step in range(8):
            got = await tq.async_kv_batch_get([f"{step} {i}" for i in range(4)], "p")
            assert got["x"].values().unique().tolist() == [step]

    asyncio.run(work())


@pytest.mark.parametrize("copied", [True, False])
def test_results_pickle_and_save(tq: Any, copied: bool) -> None:
    rows = torch.arange(4 * 20_000).reshape(4, -1)
    tq.kv_batch_put([*"abcd"], "p", _table(x=rows, n=torch.arange(4.0), text=[*"wxyz"], o=[(1, 2), None, {}, b""]))
    got = tq.kv_batch_get([*"abcd"], "p", copy=copied)
    buffer = io.BytesIO()
    torch.save(got, buffer)
    size = buffer.tell()
    buffer.seek(0)
    loaded = [pickle.loads(pickle.dumps(got)), torch.load(buffer, weights_only=False)]
    del got
    gc.collect()
    tq.kv_clear([*"abcd"], "p")
    for other in loaded:
        assert torch.equal(torch.stack(other["x"].unbind()), rows)
        assert torch.equal(other["n"], torch.arange(4.0))
        assert other["text"] == [*"wxyz"]
        assert list(other["o"]) == [(1, 2), None, {}, b""]
    assert size < 2 * rows.nbytes, "no more than the result itself is saved"


def test_columns_of_one_get_can_be_combined(tq: Any) -> None:
    """Torch combines two jagged tensors only when they share their offsets."""
    lengths = [3, 1, 4]
    nested = torch.nested.nested_tensor([torch.arange(float(n)) for n in lengths], layout=torch.jagged)
    tq.kv_batch_put([*"abc"], "p", _table(x=nested, y=nested.clone(), z=torch.ones(3, 2)))
    got = tq.kv_batch_get([*"abc"], "p")
    assert torch.equal((got["x"] + got["y"]).values(), 2 * nested.values())
    assert got["x"].offsets() is got["y"].offsets()


def test_what_programs_do_with_results(tq: Any) -> None:
    """Slicing, selecting, assigning, popping: as with any TensorDict (clients.md 1)."""
    nested = torch.nested.nested_tensor([torch.arange(n + 1) for n in range(4)], layout=torch.jagged)
    tq.kv_batch_put([*"abcd"], "p", _table(ids=nested, reward=torch.arange(4.0), uid=[*"wxyz"], info=[{"n": 1}] * 4))
    got = tq.kv_batch_get([*"abcd"], "p")
    assert list(got.keys()) == ["ids", "info", "reward", "uid"]
    assert type(got["uid"]).__name__ == "LinkedList"
    assert isinstance(got.get("uid"), NonTensorStack)
    assert got["ids"]._values.is_contiguous()
    assert got["ids"]._offsets.tolist() == [0, 1, 3, 6, 10]
    assert got["ids"].offsets().tolist() == [0, 1, 3, 6, 10]
    assert torch.nested.to_padded_tensor(got["ids"], -1).shape == (4, 4)
    row = got[2]
    assert (row["ids"].tolist(), row["uid"], row["info"], row["reward"].item()) == ([0, 1, 2], "y", {"n": 1}, 2.0)
    assert got[1:3]["reward"].tolist() == [1.0, 2.0]
    assert got[[3, 0]]["uid"] == ["z", "w"]
    assert got.select("uid", "reward").batch_size == torch.Size([4])
    got["new"] = torch.zeros(4, 3)
    del got["info"]
    assert got.pop("uid").tolist() == [*"wxyz"]
    assert got.detach()["reward"].tolist() == [0.0, 1.0, 2.0, 3.0]
    tq.kv_batch_put([*"efgh"], "p", got)
    assert tq.kv_batch_get("h", "p")["ids"].values().tolist() == [0, 1, 2, 3]


def test_layout_dense(tq: Any) -> None:
    uneven = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    tq.kv_batch_put(["a", "b"], "p", _table(even=torch.arange(8).reshape(2, 4), uneven=uneven, n=torch.arange(2)))
    got = tq.kv_batch_get(["a", "b"], "p", layout="dense")
    assert not got["even"].is_nested
    assert torch.equal(got["even"], torch.arange(8).reshape(2, 4))
    assert got["uneven"].layout is torch.jagged
    assert got["n"].tolist() == [0, 1]
    assert tq.kv_batch_get(["a", "b"], "p")["even"].layout is torch.jagged
    with pytest.raises(ValueError, match="wide"):
        tq.kv_batch_get("a", "p", layout="wide")


class TestDenseByDefault:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"client": {"layout": "dense"}}

    def test_the_configuration_decides(self, tq: Any) -> None:
        meta = tq.kv_batch_put(["a", "b"], "p", _table(x=torch.arange(8).reshape(2, 4)))
        assert tq.kv_batch_get_by_meta(meta)["x"][:, 1:].tolist() == [[1, 2, 3], [5, 6, 7]]
        assert tq.kv_batch_get("a", "p", layout="jagged")["x"].layout is torch.jagged
        client = tq.get_client()
        fetched = client.get_meta(["x"], 2, "p", task_name="t")
        assert client.get_data(fetched)["x"].shape == (2, 4)
