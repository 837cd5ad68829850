"""What real programs rely on, in the shapes in which they use it; lines are those of the list of what they break on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.resources
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import NonTensorData, TensorDict
from tensordict.utils import LinkedList

import transfer_queue

POLLING = {"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}}


def ragged(*rows: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(rows: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[rows])


def test_objects_come_back_as_linked_lists_of_what_went_in(tq: Any) -> None:
    """Line 1: ROLL asserts LinkedList or Tensor, verl pops a column and calls tolist."""
    values: list[Any] = ["a", 1, {"k": [1, None]}, None]
    for i, value in enumerate(values):
        tq.kv_put(str(i), "p", {"uid": value, "x": torch.zeros(2)})
    got = tq.kv_batch_get([str(i) for i in range(4)], "p")
    assert all(isinstance(got[name], LinkedList | torch.Tensor) for name in got.keys())  # noqa: SIM118
    assert list(got["uid"]) == values
    assert got.pop("uid").tolist() == values


def test_uniform_columns_are_jagged_and_numbers_dense(tq: Any) -> None:
    """Lines 2 and 3: offsets() and to_padded_tensor() on uniform columns, tolist() on numbers, torch's own names."""
    tq.kv_batch_put(["a", "b"], "p", batch(2, ids=torch.arange(6).reshape(2, 3), lengths=torch.tensor([3, 3])))
    got = tq.kv_batch_get(["a", "b"], "p")
    assert got["ids"].layout is torch.jagged
    assert got["ids"].offsets().tolist() == [0, 3, 6]
    assert got["ids"].to_padded_tensor(0).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (got["ids"]._values.tolist(), got["ids"]._offsets.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 3, 6])
    assert got["ids"]._values.is_contiguous()
    assert got["lengths"].tolist() == [3, 3]


def test_dense_layout_serves_programs_of_older_releases(tq: Any) -> None:
    """Line 2: ROLL slices uniform columns."""
    tq.kv_batch_put(["a", "b"], "p", batch(2, ids=torch.arange(6).reshape(2, 3)))
    got = tq.kv_batch_get(["a", "b"], "p", layout="dense")
    assert got["ids"][:, 1:].tolist() == [[1, 2], [4, 5]]


def test_a_result_is_an_ordinary_tensordict(tq: Any) -> None:
    """Lines 4 and 5: rows, selections, new columns, deletion, detach; saved with torch and pickled."""
    tq.kv_batch_put(
        ["a", "b", "c"], "p", batch(3, ids=ragged([1], [2, 3], [4]), n=torch.arange(3), uid=["x", "y", "z"])
    )
    got = tq.kv_batch_get(["a", "b", "c"], "p")
    row = got[1]
    assert (row["ids"].tolist(), int(row["n"]), row["uid"]) == ([2, 3], 1, "y")
    assert got[[0, 2]]["n"].tolist() == [0, 2]
    assert got[1:]["n"].tolist() == [1, 2]
    assert list(got.select("n").keys()) == ["n"]
    got["more"] = torch.ones(3)
    del got["n"]
    assert sorted(got.detach().keys()) == ["ids", "more", "uid"]
    file = io.BytesIO()
    torch.save(got, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(got))):
        assert [r.tolist() for r in again["ids"].unbind()] == [[1], [2, 3], [4]]
        assert list(again["uid"]) == ["x", "y", "z"]


def test_a_put_returns_the_batch_that_replaces_it(tq: Any) -> None:
    """Line 8: verl goes on with what a put returns, and assigns tags and extra_info."""
    tq.kv_put("b", "p", {"old": torch.zeros(1)}, tag={"step": 1})
    tq.kv_put("a", "p", {"old": torch.zeros(1)})
    meta = tq.kv_batch_put(["b", "a"], "p", batch(2, new=torch.zeros(2)), tags=[{"reward": 2.0}, {}])
    assert (meta.keys, meta.fields, meta.tags) == (["b", "a"], ["new", "old"], [{"step": 1, "reward": 2.0}, {}])
    assert meta.extra_info == {}
    meta.extra_info["metrics"] = {"loss": 1.0}
    meta.tags[0]["seen"] = True
    assert tq.kv_list("p")["p"]["b"] == {"step": 1, "reward": 2.0}
    assert tq.kv_put("c", "p", tag={"t": 1}).fields == []


@pytest.mark.parametrize("names", [["x", "nope"], ("x", "nope"), "x"])
def test_unknown_columns_are_dropped(tq: Any, names: Any) -> None:
    """Line 9: and when nothing is left the result is empty, not an error."""
    tq.kv_put("a", "p", {"x": torch.zeros(2)})
    assert list(tq.kv_batch_get(["a"], "p", select_fields=names).keys()) == ["x"]
    assert tq.kv_batch_get(["a"], "p", select_fields=["nope"]).batch_size == torch.Size([0])


def test_missing_keys_and_cleared_partitions(tq: Any) -> None:
    """Lines 10 to 13."""
    tq.kv_put("a", "p", {"x": torch.tensor([1, 2])})
    assert tq.kv_batch_get(["a", "gone", "a"], "p")["x"].unbind()[1].tolist() == [1, 2]
    for keys, partition in ((["gone"], "p"), (["a"], "unknown")):
        with pytest.raises(ValueError, match="not found") as raised:
            tq.kv_batch_get(keys, partition)
        assert isinstance(raised.value, KeyError)
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        tq.kv_batch_put(["b", "b"], "p", batch(2, x=torch.zeros(2, 2, dtype=torch.int64)))
    tq.kv_clear(["a", "gone"], "p")
    assert tq.kv_list() == {"p": {}}
    assert tq.get_client().get_partition_list() == ["p"]
    assert tq.kv_list("unknown") == {}
    tq.get_client().clear_partition("p")
    assert tq.kv_list() == {}


def test_a_constant_column_is_stored_or_refused_by_name(tq: Any) -> None:
    """Line 14: NonTensorData over a whole column."""
    data = batch(2, x=torch.zeros(2, 1))
    data.set("who", NonTensorData("me", batch_size=[2]))
    try:
        tq.kv_batch_put(["a", "b"], "p", data)
    except ValueError as error:
        assert "who" in str(error)  # noqa: PT017
    else:
        assert list(tq.kv_batch_get(["a", "b"], "p")["who"]) == ["me", "me"]


def test_the_packaged_configuration_goes_around(runtime_dir: Path) -> None:
    """Lines 16 to 19: NeMo-RL merges the packaged file and passes everything back; foreign keys stay."""
    packaged = yaml.safe_load((importlib.resources.files("transfer_queue") / "config.yaml").read_text())
    packaged["enable"] = True
    packaged["controller"]["sampler"] = transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=2)
    first = transfer_queue.init(packaged)
    try:
        assert first.enable is True
        shipped = pickle.loads(pickle.dumps(first))
        assert shipped.controller.sampler.n_samples_per_prompt == 2
        assert shipped.backend[shipped.backend.storage_backend] is not None
        assert transfer_queue.init(shipped).controller.zmq_info == first.controller.zmq_info
    finally:
        transfer_queue.close()
    transfer_queue.close()
    with pytest.raises(AssertionError):
        transfer_queue.get_client()


def test_an_async_put_returns_the_very_metadata(tq: Any) -> None:
    """Lines 24 and 25: verl assigns extra_info to what it has put; BatchMeta() is empty."""
    client = tq.get_client()

    async def scenario() -> None:
        meta = await client.async_put(batch(4, x=torch.zeros(4, 2)), partition_id="p")
        meta.extra_info = {"kept": 1}
        assert await client.async_put(batch(4, y=torch.zeros(4)), metadata=meta) is meta
        assert (meta.field_names, meta.extra_info, len(meta.samples), meta.size) == (["x", "y"], {"kept": 1}, 4, 4)
        assert meta.partition_ids == ["p"] * 4
        assert [part.size for part in meta.chunk(2)] == [2, 2]
        meta.extra_info = {"assigned": True}

    asyncio.run(scenario())
    assert len(tq.BatchMeta()) == 0
    assert tq.KVBatchMeta is transfer_queue.metadata.KVBatchMeta


@pytest.mark.parametrize("conf", [POLLING])
def test_pipeline_stages_see_the_same_batch(tq: Any) -> None:
    """Line 26: Relax and vime ask with dp_rank and batch_index from every stage."""
    client = tq.get_client()
    client.put(batch(8, x=torch.zeros(8, 2)), partition_id="p")

    def ask(rank: int, index: int, fields: tuple[str, ...] = ("x",)) -> list[int]:
        where = {"dp_rank": rank, "batch_index": index, "task_name": "train", "partition_id": "p"}
        indexes: list[int] = client.get_meta(
            list(fields), 2, "p", task_name="train", sampling_config=where
        ).global_indexes
        return indexes

    assert ask(0, 0, ("x", "late")) == []
    assert client.get_consumption_status("train", "p")[1].sum() == 0
    first = ask(0, 0)
    assert ask(0, 0) == first
    assert sorted([*first, *ask(1, 0), *ask(0, 1), *ask(1, 1)]) == list(range(8))
    client.reset_consumption("p", "train")
    assert len(ask(0, 2)) == 2


def test_an_agentic_backfill_keeps_order_and_tags(tq: Any) -> None:
    """Line 28: rows are put again under their metadata, then tagged."""
    client = tq.get_client()
    meta = client.put(batch(3, x=torch.arange(3).reshape(3, 1)), partition_id="p")
    client.put(batch(3, x=torch.arange(10, 13).reshape(3, 1)), metadata=meta)
    meta.update_custom_meta([{"i": i} for i in range(3)])
    client.set_custom_meta(meta)
    again = client.get_meta(["x"], 3, "p", task_name="t")
    assert [tag["i"] for tag in again.get_all_custom_meta()] == [0, 1, 2]
    assert [row.tolist() for row in client.get_data(again)["x"].unbind()] == [[10], [11], [12]]


def test_names_of_partitions_may_be_long_and_have_any_characters(tq: Any) -> None:
    """Line 29: vime writes the shard size and all field names into the name."""
    name = "train/0.1/" + ",".join(f"field_{i}" for i in range(60)) + "|é"
    tq.kv_put("k", name, {"x": torch.zeros(1)})
    assert list(tq.kv_list(name)[name]) == ["k"]
    tq.get_client().clear_partition(name)


def test_one_client_from_threads_loops_and_executors(tq: Any) -> None:
    """Lines 30 and 31: a background loop, loops that come and go, plain threads, executors; keys used again at once."""
    loop = asyncio.new_event_loop()
    background = threading.Thread(target=loop.run_forever)
    background.start()

    def cycle(n: int) -> None:
        keys = [f"{n}/{i}" for i in range(4)]
        for step in range(5):
            tq.kv_batch_put(keys, "p", batch(4, x=torch.full((4, 3), step)))
            assert {int(row[0]) for row in tq.kv_batch_get(keys, "p")["x"].unbind()} == {step}
            tq.kv_clear(keys, "p")

    async def cycle_async(n: int) -> None:
        await tq.async_kv_put(f"a{n}", "p", {"x": torch.full((3,), n)})
        got = await tq.async_kv_batch_get([f"a{n}"], "p")
        assert got["x"].unbind()[0].tolist() == [n] * 3
        await tq.async_kv_clear([f"a{n}"], "p")

    try:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            work = [pool.submit(cycle, n) for n in range(8)]
            work += [asyncio.run_coroutine_threadsafe(cycle_async(100 + n), loop) for n in range(20)]
            work += [pool.submit(lambda n=n: asyncio.run(cycle_async(n))) for n in range(20)]
            for done in work:
                done.result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        background.join()
        loop.close()
    assert tq.kv_list("p") == {"p": {}}


def _adapter(line: Any) -> list[int]:
    """Line 30: NeMo-RL ships an adapter to a process that never called init."""
    rows: list[int] = transfer_queue.kv_batch_get(["k"], "p")["x"].unbind()[0].tolist()
    return rows


def test_a_process_that_never_called_init_attaches(tq: Any, nursery: Any) -> None:
    tq.kv_put("k", "p", {"x": torch.tensor([1, 2])})
    assert nursery.start(_adapter).result() == [1, 2]


def test_a_warm_up_row_pins_neither_dtype_nor_shape(tq: Any) -> None:
    """Line 33: NeMo-RL puts torch.zeros(1) into every field and clears it."""
    tq.kv_put("warm", "p", {"ids": torch.zeros(1), "text": torch.zeros(1)})
    tq.kv_clear(["warm"], "p")
    tq.kv_put("k", "p", {"ids": torch.tensor([[1, 2]]), "text": "hello"})
    got = tq.kv_batch_get(["k"], "p")
    assert (got["ids"].unbind()[0].tolist(), list(got["text"])) == ([[1, 2]], ["hello"])
