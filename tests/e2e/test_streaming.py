"""Streams through real workers: nothing twice, nothing lost, an exact end, nobody left behind (contract F16, K5)."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import get_worker_info

from processes import Nursery, descriptors, until
from transfer_queue import BatchMeta, StreamingDataLoader, StreamingDataset, errors
from transfer_queue.dataloader import chunk_batch_fn, default_fetch_batch_fn

# Four workers on fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
RANKS = {"controller": {"sampler": "RankAwareSampler", "polling_mode": True}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Forked workers of a process whose torch has used several threads may hang in torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not multiprocessing.active_children(), "the workers end with their loader", 8)


@pytest.fixture
def stream(tq: Any) -> Callable[..., StreamingDataset]:
    """Makes a dataset of task ``t`` over partition ``p`` that ends; by default two samples a batch and a piece."""
    config = tq.get_client()._session().config

    def make(**changed: Any) -> StreamingDataset:
        settings = {
            "batch_size": 2,
            "micro_batch_size": 2,
            "data_fields": ["x"],
            "partition_id": "p",
            "task_name": "t",
            "dp_rank": 0,
            "should_check_consumption_status": True,
        }
        return StreamingDataset(config, **{**settings, **changed})

    return make


def produce(tq: Any, count: int, partition: str = "p", start: int = 0) -> list[int]:
    """Put samples whose ``x`` is their number twice; returns the numbers."""
    numbers = torch.arange(start, start + count)
    tq.get_client().put(TensorDict({"x": numbers.repeat(2, 1).t()}, batch_size=[count]), partition_id=partition)
    return numbers.tolist()


def numbers(piece: tuple[TensorDict, BatchMeta]) -> list[int]:
    data, meta = piece
    assert data.batch_size[0] == meta.size
    assert data["x"].is_nested
    return [int(row[0]) for row in data["x"].unbind()]


def flat(pieces: Any) -> list[int]:
    return [number for piece in pieces for number in numbers(piece)]


def worker_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_the_stream_is_the_same_for_any_number_of_workers(tq: Any, stream: Any, workers: int) -> None:
    lengths = [row % 4 for row in range(42)]
    columns = {
        "x": torch.arange(42).repeat(2, 1).t(),
        "jagged": torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged),
        "scalar": torch.arange(42.0),
        "text": NonTensorStack(*[f"row {row}" for row in range(42)]),
    }
    tq.kv_batch_put(
        [f"k{row}" for row in range(42)],
        "p",
        TensorDict(columns, batch_size=[42]),
        tags=[{"row": row} for row in range(42)],
    )
    dataset = stream(batch_size=7, micro_batch_size=3, data_fields=list(columns))
    seen = 0
    for data, meta in StreamingDataLoader(dataset, num_workers=workers, prefetch_factor=3 if workers else None):
        rows = range(seen, seen + meta.size)
        assert meta.size == (3, 3, 1)[rows.start % 7 // 3]
        assert meta.custom_meta == [{"row": row} for row in rows]
        assert numbers((data, meta)) == list(rows)
        assert [len(row) for row in data["jagged"].unbind()] == [lengths[row] for row in rows]
        assert data["scalar"].tolist() == [float(row) for row in rows]
        assert list(data["text"]) == [f"row {row}" for row in rows]
        assert data["jagged"].layout == torch.jagged
        seen += meta.size
    assert seen == 42


class TestRanks:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return RANKS

    def test_ranks_share_and_stages_agree(self, tq: Any, stream: Any) -> None:
        """Two ranks of two stages each; a stage with workers gets what the one without gets."""
        want = produce(tq, 24)
        got: dict[tuple[int, int], list[list[int]]] = {}

        def run(rank: int, stage: int, workers: int) -> None:
            loader = StreamingDataLoader(stream(dp_rank=rank, micro_batch_size=1), num_workers=workers)
            got[rank, stage] = [numbers(piece) for piece in loader]

        first = [threading.Thread(target=run, args=(rank, 0, 0)) for rank in range(2)]
        for thread in first:
            thread.start()
        for thread in first:
            thread.join()
        run(0, 1, 2)
        run(1, 1, 2)
        assert got[0, 0] == got[0, 1]
        assert got[1, 0] == got[1, 1]
        assert sorted(number for pieces in (got[0, 0], got[1, 0]) for (number,) in pieces) == want

    def test_workers_of_two_ranks_at_once(self, tq: Any, stream: Any) -> None:
        want = produce(tq, 40)
        left = iter(StreamingDataLoader(stream(dp_rank=0), num_workers=2))
        right = iter(StreamingDataLoader(stream(dp_rank=1), num_workers=2))
        seen = numbers(next(left)) + numbers(next(right))
        assert sorted(seen + flat(left) + flat(right)) == want

    def test_a_killed_worker_surfaces_and_hurts_nobody_else(self, tq: Any, stream: Any) -> None:
        want = produce(tq, 40)
        other = StreamingDataLoader(stream(task_name="other"), num_workers=1)
        bystander = iter(other)
        seen_by_other = numbers(next(bystander))
        before = worker_pids()
        loader = StreamingDataLoader(stream(), num_workers=2)
        running = iter(loader)
        seen = numbers(next(running))
        killed = (worker_pids() - before).pop()
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=str(killed)):
            time.sleep(10)  # torch raises it wherever the main thread is
        assert seen_by_other + flat(bystander) == want
        assert seen + flat(loader) == want, "the next iteration goes on behind what was yielded"
        assert flat(stream(task_name="third")) == want


class TestPolling:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"polling_mode": True}}

    def test_workers_wait_without_hurry(self, tq: Any, stream: Any) -> None:
        _waits_for_a_late_partition(tq, stream)


def _waits_for_a_late_partition(tq: Any, stream: Any) -> None:
    running = iter(StreamingDataLoader(stream(should_check_consumption_status=False), num_workers=2))
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(next(running) for _ in range(4)))
    reader.start()
    time.sleep(0.3)
    assert got == []
    for start in range(0, 8, 2):
        produce(tq, 2, start=start)
        time.sleep(0.05)
    reader.join(20)
    assert flat(got) == list(range(8))


def test_workers_wait_for_a_partition_that_comes_late(tq: Any, stream: Any) -> None:
    _waits_for_a_late_partition(tq, stream)


class TestTheEnd:
    @pytest.fixture
    def conf(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "12")
        return {}

    @pytest.mark.parametrize("workers", [0, 2])
    def test_planned_samples_are_waited_for(self, tq: Any, stream: Any, workers: int) -> None:
        """Everything that was put is consumed several times over before the last sample is there."""
        produce(tq, 4)

        def late() -> None:
            for start in (4, 8):
                time.sleep(0.2)
                produce(tq, 4, start=start)

        producer = threading.Thread(target=late)
        producer.start()
        seen = flat(StreamingDataLoader(stream(), num_workers=workers))
        producer.join()
        assert seen == list(range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_is_seen_although_the_consumer_clears(tq: Any, stream: Any, workers: int) -> None:
    want = produce(tq, 8)
    client, seen = tq.get_client(), []
    loader = StreamingDataLoader(stream(), num_workers=workers)
    for data, meta in loader:
        seen += numbers((data, meta))
        client.clear_samples(meta)
        if len(seen) == len(want):
            client.clear_partition("p")
    assert seen == want
    loader.reset()
    assert flat(loader) == want
    assert flat(loader) == []


def test_batches_go_on_when_more_was_put_after_the_end(tq: Any, stream: Any) -> None:
    for workers in (0, 2):
        task = f"{workers} workers"
        loader = StreamingDataLoader(stream(task_name=task), num_workers=workers)
        first = produce(tq, 4, task)
        loader.step(task)
        assert flat(loader) == first
        second = produce(tq, 4, task, start=4)
        assert flat(loader) == second
        loader.reset()
        assert flat(loader) == first + second


def test_a_stream_that_does_not_check_never_ends(tq: Any, stream: Any) -> None:
    produce(tq, 4)
    loader = StreamingDataLoader(stream(should_check_consumption_status=False), num_workers=2)
    running = iter(loader)
    assert flat([next(running), next(running)]) == [0, 1, 2, 3]
    until(lambda: len(worker_pids()) == 2, "workers wait")
    time.sleep(0.2)
    began = time.monotonic()
    del running, loader
    gc.collect()
    assert time.monotonic() - began < 3, "workers that wait end at once"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_reset_and_step_in_the_middle(tq: Any, stream: Any, workers: int, persistent: bool) -> None:
    first, second = produce(tq, 12), produce(tq, 8, "q", start=100)
    dataset = stream(micro_batch_size=1)
    loader = StreamingDataLoader(dataset, num_workers=workers, persistent_workers=persistent and workers > 0)
    running = iter(loader)
    assert flat([next(running) for _ in range(5)]) == first[:5]
    loader.reset()
    assert flat([next(running) for _ in range(7)]) == first[:7]
    until(lambda: tq.get_client().check_consumption_status("t", "p") or not workers, "workers prefetch all of it")
    dataset.step("q")  # the dataset's own
    assert flat(running) == second
    assert all(set(meta.partition_ids) == {"q"} for _, meta in loader.get_buffer())
    loader.reset()
    client = tq.get_client()
    client.clear_partition("q")
    assert flat(loader) == second, "from memory"
    third = produce(tq, 4, "p/2", start=200)
    loader.step("p/2")
    assert loader.get_buffer() == []
    assert flat(loader) == third
    assert sum(meta.size for _, meta in loader.get_buffer()) == 4


def test_persistent_workers_are_the_same_after_a_step(tq: Any, stream: Any) -> None:
    def who(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> list[tuple[int, list[int]]]:
        return [(os.getpid(), numbers(piece)) for piece in chunk_batch_fn(data, meta, micro_batch_size)]

    dataset = stream(process_batch_fn=who)
    loader = StreamingDataLoader(dataset, num_workers=2, persistent_workers=True)
    pids = []
    for step in range(4):
        want = produce(tq, 8, f"p{step}", start=step)
        loader.step(f"p{step}")
        got = list(loader)
        assert [number for _, piece in got for number in piece] == want
        pids.append({pid for pid, _ in got})
    assert pids[0] == pids[1] == pids[2] == pids[3] == worker_pids()
    assert os.getpid() not in pids[0]
    assert len(pids[0]) == 2


def test_an_iteration_that_is_left_is_taken_up(tq: Any, stream: Any) -> None:
    want = produce(tq, 16)
    loader = StreamingDataLoader(stream(batch_size=4, micro_batch_size=1), num_workers=2)
    seen: list[int] = []
    for piece in loader:
        seen += numbers(piece)
        if len(seen) == 6:
            break
    for piece in loader:
        seen += numbers(piece)
        break
    assert seen + flat(loader) == want


def test_what_a_user_does_to_a_piece_is_not_replayed(tq: Any, stream: Any) -> None:
    produce(tq, 4)
    loader = StreamingDataLoader(stream(), num_workers=1)
    for data, meta in loader:
        data["new"] = torch.ones(2)
        meta.update_extra_info({"trained": True})
        meta.custom_meta[0]["tag"] = 1
    loader.reset()
    for data, meta in loader:
        assert list(data.keys()) == ["x"]
        assert (meta.extra_info, meta.custom_meta) == ({}, [{}, {}])


def test_the_dataset_in_another_process_that_never_called_init(tq: Any, stream: Any, nursery: Nursery) -> None:
    def trainer(line: Any, dataset: Any, workers: int) -> list[int]:
        import transfer_queue as tq

        loader = tq.StreamingDataLoader(dataset, num_workers=workers)
        return [int(row[0]) for data, _ in loader for row in data["x"].unbind()]

    want = produce(tq, 8)
    for workers in (0, 2):
        assert nursery.start(trainer, stream(task_name=str(workers)), workers).result() == want


def test_a_loader_of_torch_yields_every_sample_once(tq: Any, stream: Any) -> None:
    want = produce(tq, 12)
    loader = torch.utils.data.DataLoader(
        stream(micro_batch_size=1), batch_size=None, num_workers=2, collate_fn=lambda piece: piece
    )
    assert sorted(flat(loader)) == want


def test_nothing_is_lost_where_a_fetch_ends_without_data(tq: Any, stream: Any) -> None:
    """Samples trickle in while fetches wait, run out of time, and wait again."""

    def trickle() -> None:
        for number in range(0, 400, 2):
            produce(tq, 2, start=number)
            time.sleep(0.001 * (number % 7))

    producer = threading.Thread(target=trickle)
    running = iter(stream(should_check_consumption_status=False))
    producer.start()
    seen = flat(next(running) for _ in range(200))
    producer.join()
    assert seen == list(range(400))


def test_spawned_workers(tq: Any, stream: Any) -> None:
    first, second = produce(tq, 6), produce(tq, 4, "q", start=50)
    loader = StreamingDataLoader(stream(), num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    running = iter(loader)
    seen = numbers(next(running))
    assert seen + flat(running) == first
    loader.step("q")
    assert flat(loader) == second


def test_functions_and_collation(tq: Any, stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    want = produce(tq, 8)
    started: list[Any] = []

    def fetch(client: Any, fields: Any, size: int, partition: str, task: str, sampling: Any, number: int) -> Any:
        got = default_fetch_batch_fn(client, fields, size, partition, task, sampling, number)
        if got is not None:
            got[1].set_extra_info("number", number)
        return got

    def process(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> Iterator[Any]:
        worker = get_worker_info()
        for piece, part in chunk_batch_fn(data, meta, micro_batch_size):
            yield {"data": numbers((piece, part)), "number": meta.extra_info["number"], "by": worker and worker.id}

    for workers, task in ((0, "a"), (2, "b")):
        loader = StreamingDataLoader(
            stream(task_name=task, fetch_batch_fn=fetch, process_batch_fn=process, micro_batch_size=1),
            num_workers=workers,
            collate_fn=lambda piece: {**piece, "collated": True},
            worker_init_fn=started.append,
            pin_memory=True,
        )
        got = list(loader)
        assert [number for piece in got for number in piece["data"]] == want
        assert [piece["number"] for piece in got] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all(piece["collated"] for piece in got)
        assert {piece["by"] for piece in got} == ({0, 1} if workers else {None})
    assert started == [], "only in workers"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_logged_and_raised_and_the_batch_tried_again(
    tq: Any, stream: Any, workers: int, caplog: pytest.LogCaptureFixture, runtime_dir: Any
) -> None:
    want = produce(tq, 8)
    flag = runtime_dir / "fail.lock"
    flag.touch()

    def fetch(*arguments: Any) -> Any:
        if arguments[-1] == 2 and flag.exists():
            raise ValueError("batch two is cursed")
        return default_fetch_batch_fn(*arguments)

    loader = StreamingDataLoader(stream(fetch_batch_fn=fetch), num_workers=workers)
    seen: list[int] = []

    def read() -> None:
        for piece in loader:
            seen.extend(numbers(piece))

    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="batch two is cursed"):
        read()
    if not workers:  # those of workers are logged there
        assert "task 't', rank 0, partition 'p'" in caplog.text
        assert "cursed" in caplog.text
    assert seen == want[:4]
    flag.unlink()
    assert flat(loader) == want[4:]


def test_a_result_that_cannot_travel_is_an_error(tq: Any, stream: Any) -> None:
    produce(tq, 4)

    def process(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> list[Any]:
        return [threading.Lock()]

    with pytest.raises(TypeError, match="pickle"):
        list(StreamingDataLoader(stream(process_batch_fn=process), num_workers=1))


def test_a_session_that_is_gone_is_an_error_in_every_worker(nursery: Nursery) -> None:
    def owner(line: Any) -> None:
        import transfer_queue as tq

        line.send(tq.init())
        line.recv()

    process = nursery.start(owner)
    dataset = StreamingDataset(process.recv(), 2, 2, ["x"], "p", "t", 0)
    running = iter(StreamingDataLoader(dataset, num_workers=2))
    failed: list[BaseException] = []

    def read() -> None:
        try:
            next(running)
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    process.signal(signal.SIGKILL)
    reader.join(20)
    assert len(failed) == 1
    assert isinstance(failed[0], errors.UnavailableError | RuntimeError)
    with pytest.raises(errors.UnavailableError):
        next(iter(dataset))


class TestTokenBudget:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": "StreamingTokenBudgetSampler", "polling_mode": True}}

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_declared_end_ends_the_stream(self, tq: Any, stream: Any, workers: int) -> None:
        lengths = [5, 4, 2, 9, 1, 1, 20, 3]
        tq.get_client().put(
            TensorDict({"x": torch.arange(8).repeat(2, 1).t()}, batch_size=[8]),
            partition_id="p",
            custom_meta=[{"total_lengths": length} for length in lengths],
            is_last=True,
        )

        def fetch(client: Any, fields: Any, size: Any, partition: str, task: str, sampling: Any, number: int) -> Any:
            where = {**sampling, "batch_index": number}
            meta = client.get_meta(fields, None, partition, task_name=task, sampling_config=where, token_budget=10)
            return (client.get_data(meta), meta) if meta.size else None

        def whole(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> list[Any]:
            return [(data, meta)]

        dataset = stream(should_check_consumption_status=False, fetch_batch_fn=fetch, process_batch_fn=whole)
        got = [numbers(piece) for piece in StreamingDataLoader(dataset, num_workers=workers)]
        assert got == [[0, 1], [2], [3, 4], [5], [6], [7]]


def test_batches_that_are_kept_hold_no_descriptors(tq: Any, stream: Any) -> None:
    """Each batch is larger than what travels inside a message."""
    rows = torch.arange(40 * 80_000, dtype=torch.int64).reshape(40, 80_000)
    tq.get_client().put(TensorDict({"x": rows}, batch_size=[40]), partition_id="p")
    loader = StreamingDataLoader(stream(micro_batch_size=1), num_workers=2)
    running = iter(loader)
    next(running)
    during = descriptors()
    total = 1
    for data, _ in running:
        assert torch.equal(data["x"].values(), rows[total])
        total += 1
    assert total == 40
    assert descriptors() <= during
    loader.reset()
    assert [int(data["x"].values()[0]) for data, _ in loader] == rows[:, 0].tolist()


def test_loaders_leave_nothing_behind(tq: Any, stream: Any) -> None:
    produce(tq, 8)
    allowed: list[int] = []

    def left() -> list[int]:
        return [descriptors(), threading.active_count(), len(os.listdir("/dev/shm"))]

    def nothing_new() -> bool:  # what ran for a loader ends a moment after its workers
        return all(now <= before for now, before in zip(left(), allowed, strict=True))

    for number in range(4):
        loader = StreamingDataLoader(stream(task_name=f"t{number}"), num_workers=2, persistent_workers=number % 2 == 1)
        running = iter(loader)
        next(running)
        del loader, running
        gc.collect()
        until(lambda: not worker_pids(), "workers end")
        if number == 1:
            allowed = left()
        elif number > 1:
            until(nothing_new, f"no more than {allowed} is left")


def test_workers_end_when_their_main_process_is_killed(tq: Any, nursery: Nursery) -> None:
    def main(line: Any, config: Any) -> None:
        import multiprocessing

        import transfer_queue as tq

        dataset = tq.StreamingDataset(config, 2, 2, ["x"], "nowhere", "t", 0)
        running = iter(tq.StreamingDataLoader(dataset, num_workers=2))
        import threading

        threading.Thread(target=lambda: next(running), daemon=True).start()
        while len(multiprocessing.active_children()) < 2:
            pass
        line.send([child.pid for child in multiprocessing.active_children()])
        line.recv()

    process = nursery.start(main, tq.get_client()._session().config)
    pids = process.recv()
    time.sleep(0.5)
    process.signal(signal.SIGKILL)

    def gone(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    until(lambda: all(map(gone, pids)), "the workers end by themselves", 15)
