"""Programs of real users, as loops that run for a while; lines are those of the list of what they break on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib.resources
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from tensordict.utils import LinkedList

import transfer_queue
from processes import Nursery

BUDGET = {"controller": {"polling_mode": True, "sampler": "StreamingTokenBudgetSampler"}}
GROUPS = {"controller": {"sampler": transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=4), "polling_mode": True}}


def table(rows: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[rows])


def ragged(*lengths: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=layout)


@pytest.mark.parametrize(
    "column",
    [
        NonTensorStack({"a": 1}, "b", None, [1, "x"]),
        np.array([{"a": 1}, "b", None, [1, "x"]], dtype=object),
    ],
    ids=["stack", "object array"],
)
def test_objects_in_any_wrapping(tq: Any, column: Any) -> None:
    """Line 1: subscription gives a LinkedList, get and items a NonTensorStack, whatever went in."""
    tq.kv_batch_put(list("abcd"), "p", table(4, note=column))
    got = tq.kv_batch_get(list("abcd"), "p")
    assert isinstance(got["note"], LinkedList)
    assert isinstance(got.get("note"), NonTensorStack)
    assert isinstance(dict(got.items())["note"], NonTensorStack)
    assert list(got["note"]) == [{"a": 1}, "b", None, [1, "x"]]
    assert [type(value) for value in got["note"]] == [dict, str, type(None), list]


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (torch.tensor([[1], [2]]), [[1], [2]]),
        (torch.tensor([[True, False], [False, True]]), [[True, False], [False, True]]),
        (torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2), None),
        (ragged(2, 2, layout=torch.strided), [[0, 1], [0, 1]]),
        (ragged(1, 3, layout=torch.strided), [[0], [0, 1, 2]]),
    ],
    ids=["one wide", "bool", "images", "strided uniform", "strided"],
)
def test_whatever_has_dimensions_is_jagged(tq: Any, column: torch.Tensor, rows: list[Any] | None) -> None:
    """Lines 2 and 3: and the metadata says nothing else about dtype and rows; a single row too."""
    tq.kv_batch_put(["a", "b"], "p", table(2, x=column))
    for keys in (["a", "b"], ["b"]):
        got = tq.kv_batch_get(keys, "p")["x"]
        assert (got.layout, got.dtype, got.is_nested) == (torch.jagged, column.dtype, True)
        assert got._values.is_contiguous()
        want = list(column.unbind())[-len(keys) :]
        assert all(torch.equal(a, b) for a, b in zip(got.unbind(), want, strict=True))
    if rows is not None:
        assert [row.tolist() for row in tq.kv_batch_get(["a", "b"], "p")["x"].unbind()] == rows


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.bool, torch.int64, torch.float32], ids=str
)
def test_dtypes_are_exact_and_columns_sorted(tq: Any, dtype: torch.dtype) -> None:
    """Line 6."""
    client = tq.get_client()
    data = table(2, zeta=torch.ones(2, 3, dtype=dtype), alpha=torch.ones(2, dtype=dtype), mid=["x", "y"])
    meta = client.put(data, partition_id="p")
    assert meta.field_names == ["alpha", "mid", "zeta"]
    got = client.get_data(meta)
    assert list(got.keys()) == ["alpha", "mid", "zeta"]
    assert (got["zeta"].dtype, got["alpha"].dtype, got["alpha"].shape) == (dtype, dtype, (2,))


def test_lists_of_ints(tq: Any) -> None:
    """Line 7: equally long ones are a tensor column, uneven ones objects."""
    tq.kv_batch_put(["a", "b"], "p", table(2, even=[[1, 2], [3, 4]], uneven=[[1], [2, 3]]))
    got = tq.kv_batch_get(["a", "b"], "p")
    assert [row.tolist() for row in got["even"].unbind()] == [[1, 2], [3, 4]]
    assert [[int(x) for x in row] for row in got["uneven"]] == [[1], [2, 3]]


def test_a_replay_buffer_of_verl(tq: Any, tmp_path: Path) -> None:
    """Lines 4, 5, 8, 10, 12: put, filter the list, get, update tags, clear; a batch of the buffer is saved by torch."""
    saved = []
    for step in range(3):
        keys = [f"{step}-{i}" for i in range(6)]
        fields = table(6, prompts=ragged(*range(1, 7)), uid=[f"u{i // 2}" for i in range(6)], n=torch.arange(6))
        meta = tq.kv_batch_put(keys, "train", fields, tags=[{"step": step, "status": "running"} for _ in keys])
        assert meta.keys == keys
        for i, key in enumerate(keys):
            tq.kv_put(key, "train", tag={"status": "finished" if i % 2 else "running"})
        listed = tq.kv_list("train")["train"]
        finished = [k for k, tag in listed.items() if tag["status"] == "finished" and tag["step"] == step]
        assert finished == keys[1::2]
        meta = tq.kv_batch_put(finished, "train", table(3, rewards=torch.arange(3) / 2))
        assert meta.fields == ["n", "prompts", "rewards", "uid"]
        assert [tag["step"] for tag in meta.tags] == [step] * 3
        meta.extra_info["global_token_num"] = [1, 2, 3]
        part = meta.chunk(3)[1]
        got = tq.kv_batch_get_by_meta(pickle.loads(pickle.dumps(part)))
        assert (got["prompts"].unbind()[0].tolist(), got["uid"].tolist()) == ([0, 1, 2, 3], ["u1"])
        assert part.extra_info == {"global_token_num": [1, 2, 3]}
        batch = tq.kv_batch_get(finished, "train", select_fields=("prompts", "rewards"))
        torch.save(batch, tmp_path / f"{step}.pt")
        saved.append([row.tolist() for row in batch["prompts"].unbind()])
        tq.kv_clear(keys, "train")
        assert tq.kv_list() == {"train": {}}
    tq.close()
    again = [torch.load(tmp_path / f"{step}.pt", weights_only=False) for step in range(3)]
    assert [[row.tolist() for row in part["prompts"].unbind()] for part in again] == saved
    tq.init({})


def test_a_checkpoint_between_steps(tq: Any, tmp_path: Path) -> None:
    """Line 15: what was put after the save is gone, what was cleared is back."""
    tq.kv_batch_put(["a", "b"], "train", table(2, x=ragged(1, 2), note=["x", {"y": 1}]), tags=[{"s": 1}, {"s": 2}])
    tq.save_checkpoint(tmp_path / "step_1", metadata={"step": 1})
    tq.kv_clear(["a"], "train")
    tq.kv_put("c", "train", {"x": torch.zeros(1, dtype=torch.int64)})
    tq.load_checkpoint(tmp_path / "step_1")
    assert tq.kv_list("train") == {"train": {"a": {"s": 1}, "b": {"s": 2}}}
    got = tq.kv_batch_get(["b", "a"], "train")
    assert ([row.tolist() for row in got["x"].unbind()], list(got["note"])) == ([[0, 1], [0]], [{"y": 1}, "x"])


def _remote(line: Any, packed: bytes, keys: list[str]) -> Any:
    conf = pickle.loads(packed)
    before = [row.tolist() for row in transfer_queue.kv_batch_get(keys, "p")["x"].unbind()]
    running = transfer_queue.init(conf)
    after = [row.tolist() for row in transfer_queue.kv_batch_get(keys, "p")["x"].unbind()]
    transfer_queue.close()
    return before == after, after, running.enable, running.controller.sampler.n_samples_per_prompt


def test_a_data_plane_of_nemo(runtime_dir: Path, nursery: Nursery) -> None:
    """Lines 16, 18, 30, 33: merged defaults come back, workers get them by pickle, twelve threads work at once."""
    packaged = OmegaConf.load(str(importlib.resources.files("transfer_queue") / "config.yaml"))
    packaged._set_flag("allow_objects", True)
    packaged.controller.sampler = transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=2)
    conf = transfer_queue.init(OmegaConf.merge(packaged, {"enable": True}))
    try:
        names = ["x", "mask", "text"]
        transfer_queue.kv_put("warm", "p", {name: torch.zeros(1) for name in names})
        transfer_queue.kv_clear(["warm"], "p")

        def work(n: int) -> None:
            keys = [f"{n}/{i}" for i in range(8)]
            data = table(8, x=ragged(*range(1, 9)), mask=torch.ones(8, 4, dtype=torch.bool), text=[f"t{n}"] * 8)
            transfer_queue.kv_batch_put(keys, "p", data, tags=[{"n": n}] * 8)
            got = transfer_queue.kv_batch_get(keys, "p", select_fields=names)
            assert list(got["text"]) == [f"t{n}"] * 8
            assert got["mask"].dtype is torch.bool

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            list(pool.map(work, range(36)))
        assert len(transfer_queue.kv_list("p")["p"]) == 36 * 8
        got = nursery.start(_remote, pickle.dumps(conf), ["7/0", "9/2"]).result()
        assert got == (True, [[0], [0, 1, 2]], True, 2)
        assert "7/0" in transfer_queue.kv_list("p")["p"], "a worker's close() only detaches"
        transfer_queue.kv_clear(list(transfer_queue.kv_list("p")["p"]), "p")
    finally:
        transfer_queue.close()


@pytest.mark.parametrize("conf", [{"client": {"layout": "dense"}}])
def test_a_cache_of_roll(tq: Any) -> None:
    """Lines 1, 2, 13, 30: dense columns by configuration, repeated keys, calls from an executor."""

    async def scenario() -> TensorDict:
        loop = asyncio.get_running_loop()
        data = table(2, ids=torch.arange(6).reshape(2, 3), domain=np.array(["m", "c"], dtype=object))
        await loop.run_in_executor(None, functools.partial(tq.kv_batch_put, ["a", "b"], "p", data))
        return await loop.run_in_executor(None, functools.partial(tq.kv_batch_get, ["a", "b", "b"], "p"))

    got = asyncio.run(scenario())
    for name in got.keys():  # noqa: SIM118
        assert isinstance(got[name], LinkedList | torch.Tensor)
    assert got["ids"][:, 1:].tolist() == [[1, 2], [4, 5], [4, 5]]
    assert got["ids"].repeat(2, 1).shape == (6, 3)
    assert list(got["domain"]) == ["m", "c", "c"]


@pytest.mark.parametrize("conf", [BUDGET])
def test_a_stream_of_relax(tq: Any) -> None:
    """Micro-batches under a budget, equal on every stage, an end after the last; producer and stages are tasks."""
    client = tq.get_client()
    lengths = [30, 50, 20, 70, 10, 120, 40, 60]

    async def produce() -> None:
        for i, length in enumerate(lengths):
            row = table(1, tokens=torch.full((1, 4), i))
            last = i == len(lengths) - 1
            await client.async_put(
                data=row, partition_id="train_0", custom_meta=[{"total_lengths": length}], is_last=last
            )
            await asyncio.sleep(0)

    async def stage(task: str) -> list[list[int]]:
        batches: list[list[int]] = []
        while True:
            where = {"dp_rank": 0, "batch_index": len(batches), "task_name": task, "partition_id": "train_0"}
            meta = await client.async_get_meta(
                ["tokens"], None, "train_0", task_name=task, sampling_config=where, token_budget=100
            )
            if meta.size:
                rows = (await client.async_get_data(meta))["tokens"].unbind()
                batches.append([int(row[0]) for row in rows])
                assert [tag["total_lengths"] for tag in meta.get_all_custom_meta()] == [lengths[i] for i in batches[-1]]
            elif meta.extra_info.get("end_of_stream"):
                return batches
            await asyncio.sleep(0.001)

    async def scenario() -> Any:
        return await asyncio.gather(produce(), stage("pp"), stage("pp"), stage("ref"))

    _, first, second, other = asyncio.run(scenario())
    assert first == second == other == [[0, 1, 2], [3, 4], [5], [6, 7]]
    assert asyncio.run(client.async_check_production_completed("train_0")) is True
    assert asyncio.run(client.async_check_stream_drained("pp", "train_0")) is True
    assert asyncio.run(client.async_check_stream_drained("nobody", "train_0")) is False


@pytest.mark.parametrize("conf", [GROUPS])
def test_groups_come_whole_in_put_order(tq: Any) -> None:
    """Line 27: a batch that is no multiple of the group is an error at once, also when there is nothing yet."""
    client = tq.get_client()
    with pytest.raises((RuntimeError, ValueError), match="multiple of n_samples_per_prompt"):
        client.get_meta(["x"], 6, "p", task_name="t")
    for prompt in (3, 1, 2):
        client.put(table(4, x=torch.full((4,), prompt)), partition_id="p")
    meta = client.get_meta(["x"], 8, "p", task_name="t")
    assert client.get_data(meta)["x"].tolist() == [3] * 4 + [1] * 4
    assert client.get_meta(["x"], 8, "p", task_name="t").size == 0


def test_a_weight_of_staleness(tq: Any) -> None:
    """Line 12: Relax and vime wait until old partitions have left the list."""
    client = tq.get_client()
    for step in range(3):
        client.put(table(2, x=torch.zeros(2)), partition_id=f"train_{step}")
    released = threading.Event()

    async def wait() -> None:
        while len(await client.async_get_partition_list()) > 1:
            released.set()
            await asyncio.sleep(0.001)

    waiter = threading.Thread(target=asyncio.run, args=(wait(),))
    waiter.start()
    assert released.wait(10)
    for step in range(2):
        client.clear_partition(f"train_{step}")
    waiter.join(10)
    assert not waiter.is_alive()
    assert client.get_partition_list() == ["train_2"]


def test_a_meta_travels_and_is_extended_elsewhere(tq: Any, nursery: Nursery) -> None:
    """Line 24: metadata is pickled to a worker, which reads, writes another column, and sends it back."""
    client = tq.get_client()
    meta = client.put(table(4, x=torch.arange(8).reshape(4, 2)), partition_id="p")
    meta.extra_info["step"] = 7
    back = nursery.start(_extend, meta.select_samples([3, 1])).result()
    assert (back.global_indexes, back.field_names) == ([meta.global_indexes[3], meta.global_indexes[1]], ["x", "y"])
    assert back.extra_info == {"step": 7}
    whole = client.get_meta([], None, "p", mode="force_fetch")
    assert whole.size == 4
    assert client.get_data(back)["y"].tolist() == [13, 5]
    assert client.get_meta(["y"], 2, "p", task_name="t").global_indexes == sorted(back.global_indexes)


def _extend(line: Any, meta: Any) -> Any:
    transfer_queue.init()
    client = transfer_queue.get_client()
    got = client.get_data(meta.select_fields(["x"]))
    return client.put(table(2, y=torch.stack([row.sum() for row in got["x"].unbind()])), metadata=meta)


def test_races_of_psrl(tq: Any) -> None:
    """Line 31: threads put, read and clear the same keys; a read is whole, or says what is gone."""
    stop = threading.Event()
    wrong: list[Any] = []

    def write(worker: int) -> None:
        for step in range(40):
            keys = [f"{worker}-{i}" for i in range(4)]
            tq.kv_batch_put(keys, "p", table(4, a=torch.full((4, 8), step), b=[step] * 4), tags=[{"step": step}] * 4)
            got = tq.kv_batch_get(keys, "p")
            if [int(v) for v in got["a"].values()] != [step] * 32 or list(got["b"]) != [step] * 4:
                wrong.append((worker, step, got["a"].values().tolist()))
            tq.kv_clear(keys, "p")

    def read() -> None:
        while not stop.is_set():
            for key in list(tq.kv_list("p").get("p", {})):
                try:
                    got = tq.kv_batch_get([key], "p")
                except ValueError as error:
                    assert "not found" in str(error) or "not ready" in str(error)  # noqa: PT017
                    continue
                except KeyError:
                    continue
                if "a" in got.keys() and "b" in got.keys() and int(got["a"].values()[0]) != got["b"][0]:  # noqa: SIM118
                    wrong.append((key, got["a"].values().tolist(), list(got["b"])))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for done in [pool.submit(write, n) for n in range(6)]:
                done.result(60)
        finally:
            stop.set()
        for reader in readers:
            reader.result(10)
    assert wrong == []
    assert tq.kv_list("p") == {"p": {}}
