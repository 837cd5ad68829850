"""Samplers in a session: groups, shares, streams, samplers of users, replacing one at run time (contract F12, F15)."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, until
from sessions import workers
from transfer_queue import errors, register_sampler
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)


def _rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, batch_size=[count])


def _where(rank: Any, batch: Any, partition: str = "p", task: str = "t", **more: Any) -> dict[str, Any]:
    return {"dp_rank": rank, "batch_index": batch, "partition_id": partition, "task_name": task, **more}


def _fetch(tq: Any, size: int | None, config: dict[str, Any] | None = None, partition: str = "p", **more: Any) -> Any:
    return tq.get_client().get_meta(["x"], size, partition, task_name="t", sampling_config=config, **more)


def _consumed(tq: Any, partition: str = "p") -> list[int]:
    return list(tq.get_client().get_consumption_status("t", partition)[1].tolist())


class TestGroups:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": GRPOGroupNSampler(n_samples_per_prompt=4), "polling_mode": True}}

    @pytest.mark.parametrize("derived", [False, True])
    def test_partitions_that_recycle_indexes_keep_their_groups(self, tq: Any, derived: bool) -> None:
        class Derived(GRPOGroupNSampler):
            pass

        if derived:
            register_sampler(Derived(4))
        client = tq.get_client()
        old = client.put(_rows(6), partition_id="old")
        groups = [client.put(_rows(4), partition_id="p").global_indexes]
        for cut in (slice(0, 2), slice(2, 5), slice(5, 6)):
            client.clear_samples(old.select_samples(list(range(6))[cut]))
            groups.append(client.put(_rows(4), partition_id="p").global_indexes)
        assert any(b[0] < a[0] for a in groups for b in groups[groups.index(a) :]), "indexes were used again"
        assert _fetch(tq, 8).global_indexes == groups[0] + groups[1]
        assert _fetch(tq, 8).global_indexes == groups[2] + groups[3]

    def test_a_batch_of_half_groups_is_refused_at_once(self, tq: Any) -> None:
        for kind in (ValueError, RuntimeError, errors.InvalidArgumentError):
            with pytest.raises(kind, match="must be a multiple of n_samples_per_prompt"):
                _fetch(tq, 6)
        with pytest.raises(ValueError, match="dp_rank -1 must be greater than or equal to 0"):
            _fetch(tq, 4, _where(-1, 0))
        with pytest.raises(ValueError, match="StreamingTokenBudgetSampler"):
            _fetch(tq, 4, _where(0, 0), token_budget=9)

    def test_eight_threads_of_ranks_get_disjoint_shares(self, tq: Any) -> None:
        client = tq.get_client()
        client.put(_rows(8 * 3 * 8), partition_id="p")
        got: dict[tuple[int, int], list[int]] = {}
        failed: list[BaseException] = []

        def rank(number: int) -> None:
            try:
                for batch in range(3):
                    config = _where(number, batch)
                    got[number, batch] = _fetch(tq, 8, config).global_indexes
                    assert _fetch(tq, 8, config).global_indexes == got[number, batch]
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert not failed, failed
        everything = sorted(index for share in got.values() for index in share)
        assert everything == list(range(8 * 3 * 8))
        for share in got.values():
            assert all(share[at : at + 4] == list(range(share[at], share[at] + 4)) for at in (0, 4))


class TestShares:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": SeqlenBalancedSampler(2, 3), "polling_mode": True}}

    def test_core_and_class_pick_the_same(self, tq: Any) -> None:
        torch.manual_seed(7)
        lengths = torch.randint(1, 9, (36,)).tolist()
        tq.kv_batch_put([str(i) for i in range(36)], "p", _rows(36), [{"total_lengths": n} for n in lengths])

        weights = SimpleNamespace(custom_meta={i: {"total_lengths": n} for i, n in enumerate(lengths)})
        own = SeqlenBalancedSampler(2, 3)
        left = list(range(36))
        for rank, batch in [(2, 0), (0, 2), (1, 0), (0, 0), (0, 1), (2, 2), (1, 1), (1, 2), (2, 1)]:
            want = own(left, 4, **_where(rank, batch), partition=weights)[0]
            assert _fetch(tq, 4, _where(rank, batch)).global_indexes == want
            left = [index for index in left if index not in want]
        assert not left

    def test_lengths_may_be_numbers_of_numpy_and_torch(self, tq: Any) -> None:
        lengths = [np.int64(9), 1, torch.tensor(1), np.float32(9.0), np.uint8(5), 5]
        tags = [{"total_lengths": n} for n in lengths for _ in (0, 1)]
        meta = tq.get_client().put(_rows(12), partition_id="p", custom_meta=tags)
        shares = [_fetch(tq, 4, _where(rank, 0)).get_all_custom_meta() for rank in range(3)]
        assert sorted(sum(float(tag["total_lengths"]) for tag in share) for share in shares) == [20.0, 20.0, 20.0]
        back = [tag["total_lengths"] for tag in _force(tq).get_all_custom_meta()][::2]
        assert [type(n) for n in back] == [type(n) for n in lengths]
        assert meta.size == 12
        first = _fetch(tq, 4, _where(0, 0)).global_indexes
        assert _fetch(tq, 4, _where(np.int64(0), torch.tensor(0))).global_indexes == first


def _force(tq: Any) -> Any:
    return tq.get_client().get_meta(["x"], None, "p", mode="force_fetch")


class TestStreams:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": "StreamingTokenBudgetSampler"}}

    def test_stages_and_ranks_share_a_stream_to_its_end(self, tq: Any) -> None:
        client = tq.get_client()
        lengths = [3, 4, 5, 1, 12, 2, 2, 6, 3, 4]
        got: dict[tuple[int, int], list[list[int]]] = {}
        failed: list[BaseException] = []

        def consume(rank: int, stage: int) -> None:
            try:
                batches = got[rank, stage] = []
                while True:
                    meta = _fetch(tq, None, _where(rank, len(batches)), token_budget=10, timeout=30)
                    if meta.extra_info.get("end_of_stream"):
                        assert meta.size == 0
                        return
                    batches.append(meta.global_indexes)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=consume, args=(r, s)) for r in range(2) for s in range(2)]
        for thread in threads:
            thread.start()
        tag: dict[int, int] = {}
        for at in range(0, len(lengths), 2):
            assert not client.check_production_completed("p")
            assert not client.check_stream_drained("t", "p")
            tags = [{"total_lengths": n} for n in lengths[at : at + 2]]
            meta = client.put(_rows(2), partition_id="p", custom_meta=tags, is_last=at + 2 == len(lengths))
            assert meta.custom_meta == tags
            tag.update(zip(meta.global_indexes, lengths[at : at + 2], strict=True))
        assert client.check_production_completed("p")
        for thread in threads:
            thread.join(40)
        assert not failed, failed
        assert got[0, 0] == got[0, 1]
        assert got[1, 0] == got[1, 1]
        batches = got[0, 0] + got[1, 0]
        assert sorted(index for batch in batches for index in batch) == sorted(tag)
        assert all(sum(tag[i] for i in batch) <= 10 or len(batch) == 1 for batch in batches)
        assert client.check_stream_drained("t", "p")
        assert not client.check_stream_drained("other", "p")
        assert not client.check_stream_drained("t", "nowhere")
        with pytest.raises(TypeError, match="task_name: got NoneType"):
            client.check_stream_drained(None, "p")
        with pytest.raises(TypeError, match="partition_id: got NoneType"):
            client.check_stream_drained("t", None)
        with pytest.raises(ValueError, match="task_name ''"):
            client.check_stream_drained("", "p")

    def test_tags_and_the_last_mark_of_a_put_by_metadata(self, tq: Any) -> None:
        client = tq.get_client()
        meta = client.get_meta(["x"], 2, "p", mode="insert")
        meta.update_custom_meta([{"a": 1}, {"a": 2}])
        again = client.put(_rows(2), metadata=meta, custom_meta=[{"b": 1}, {}], is_last=True)
        assert again is meta
        assert meta.get_all_custom_meta() == [{"a": 1, "b": 1}, {"a": 2}]
        assert _fetch(tq, None, _where(0, 0), token_budget=100).get_all_custom_meta() == [{"a": 1, "b": 1}, {"a": 2}]
        assert _fetch(tq, None, _where(0, 1), token_budget=100).extra_info == {"end_of_stream": True}
        for wrong, kind in [([{}], ValueError), ({}, TypeError), ([1, 2], TypeError)]:
            with pytest.raises(kind, match="custom_meta"):
                client.put(_rows(2), partition_id="q", custom_meta=wrong)
        assert client.get_partition_list() == ["p"]

    def test_a_budget_that_makes_no_sense(self, tq: Any) -> None:
        for budget in (0, -1, "much"):
            with pytest.raises(ValueError, match="token_budget must be a number above 0"):
                _fetch(tq, None, _where(0, 0), token_budget=budget)
        with pytest.raises(ValueError, match="needs dp_rank and batch_index"):
            _fetch(tq, None, token_budget=5)


class Steered(BaseSampler):
    """Does what the fetch says, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, act: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        self.seen = sorted(kwargs)
        if act == "raise":
            raise ZeroDivisionError("sampler bug")
        if act == "value":
            raise ValueError("no such batch")
        if act == "exit":
            raise SystemExit(3)
        if act == "hang until there is":
            while not os.path.exists(kwargs["path"]):
                time.sleep(0.01)
        if act == "one list":
            return ready_indexes
        if act == "strings":
            return ["0"], ["0"]
        if act == "count":
            return [ready_indexes[self.calls % len(ready_indexes)]], []
        if isinstance(act, list):
            return act, act
        chosen = ready_indexes[-batch_size:]
        return chosen, chosen


class TestUsers:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": Steered, "polling_mode": True, "sampler_timeout_s": 0.3}}

    def test_what_it_picks_is_handed_out(self, tq: Any) -> None:
        assert _fetch(tq, 2).size == 0
        tq.get_client().put(_rows(5), partition_id="p")
        assert _fetch(tq, 2).global_indexes == [3, 4]
        assert _consumed(tq) == [0, 0, 0, 1, 1]
        assert _fetch(tq, 2, {"act": [2, 0]}).global_indexes == [2, 0]
        assert _fetch(tq, 2).size == 0, "one is left"
        copy = pickle.loads(pickle.dumps(tq.init()))
        assert copy.controller.sampler is Steered

    @pytest.mark.parametrize(
        ("act", "kind", "text"),
        [
            ("raise", RuntimeError, "sampler Steered failed in sample: ZeroDivisionError: sampler bug"),
            ("value", ValueError, "sampler Steered failed in sample: no such batch"),
            ("exit", RuntimeError, "SystemExit: 3"),
            ("one list", RuntimeError, "returned a list, want two lists"),
            ("strings", RuntimeError, "sampled indexes that are no list of whole numbers"),
            ([0, 1, 0], RuntimeError, "Steered returned sample 0 twice"),
            ([0, 77], RuntimeError, "Steered returned sample 77, which is not ready in partition 'p'"),
            ([-1], RuntimeError, "Steered returned sample -1, which"),
            ([3], RuntimeError, "Steered returned sample 3, which"),
        ],
    )
    def test_what_it_may_not_do_fails_only_its_fetch(self, tq: Any, act: Any, kind: Any, text: str) -> None:
        client = tq.get_client()
        client.put(_rows(3), partition_id="p")
        client.put(_rows(2), partition_id="q")
        with pytest.raises(kind) as raised:
            _fetch(tq, 2, {"act": act})
        assert isinstance(raised.value, RuntimeError)
        assert text.replace("'p'", '"p"') in str(raised.value)
        assert _consumed(tq) == [0, 0, 0]
        assert _fetch(tq, 2).size == 2

    def test_one_that_hangs_is_given_up_and_others_go_on(self, tq: Any, tmp_path: Path) -> None:
        client = tq.get_client()
        client.put(_rows(4), partition_id="p")
        end = tmp_path / "end"
        failed: list[BaseException] = []

        def hang() -> None:
            try:
                _fetch(tq, 2, {"act": "hang until there is", "path": str(end)}, timeout=50)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=hang)
        thread.start()
        while not failed:  # the call hangs all the while
            tq.kv_put("k", "q", {"x": torch.zeros(1)}, timeout=20)
        assert isinstance(failed[0], TimeoutError)
        assert "the sampler Steered gave no answer within 3" in str(failed[0])
        assert _fetch(tq, 2).size == 2, "another thread makes the next call"
        with pytest.raises(TimeoutError, match="the sampler Steered gave no answer within"):
            _fetch(tq, 2, {"act": "hang until there is", "path": str(end)}, timeout=0.1)
        end.touch()
        thread.join()

    def test_calls_that_never_end_do_not_eat_all_threads(self, tq: Any, tmp_path: Path) -> None:
        tq.get_client().put(_rows(2), partition_id="p")
        end = tmp_path / "end"
        hung = 0
        while hung < 200:  # on a busy machine the time of some is over before they begin
            with pytest.raises((TimeoutError, RuntimeError)) as raised:
                _fetch(tq, 2, {"act": "hang until there is", "path": str(end)}, timeout=0.02)
            if not isinstance(raised.value, TimeoutError):
                break
            hung += 1
        assert "8 earlier calls of it have not ended" in str(raised.value)
        assert hung >= 8
        end.touch()
        until(lambda: _fetch_or_none(tq), "they ended")

    def test_it_keeps_its_state_and_is_told_what_the_fetch_says(self, tq: Any) -> None:
        tq.get_client().put(_rows(4), partition_id="p")
        firsts = [_fetch(tq, 1, {"act": "count", "extra": 1}).global_indexes for _ in range(4)]
        assert firsts == [[1], [2], [3], [0]]

    def test_the_partition_it_sees(self, tq: Any) -> None:
        tq.kv_batch_put(["a", "b", "c"], "p", _rows(3), [{"n": 5}, {}, {"n": 7}])
        tq.kv_put("b", "p", {"y": "text"})
        register_sampler(SequentialSampler)
        assert tq.get_client().get_meta(["x"], 1, "p", task_name="other").global_indexes == [0]

        class Reads(SequentialSampler):
            def sample(
                self, ready_indexes: Any, batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
            ) -> Any:
                assert partition.partition_id == "p"
                assert set(ready_indexes) <= partition.global_indexes
                assert partition.keys_mapping == {"a": 0, "b": 1, "c": 2}
                assert partition.revert_keys_mapping[2] == "c"
                assert partition.total_samples_num == 3
                assert (partition.total_fields_num, partition.field_name_mapping) == (2, {"x": 0, "y": 1})
                column = partition.production_status[:3, partition.field_name_mapping["y"]]
                assert (column.dtype, column.tolist()) == (torch.int8, [0, 1, 0])
                assert partition.field_metadata["y"].global_indexes == {1}
                assert partition.field_metadata["x"].dtype == torch.int64
                assert partition.consumption_status["other"][:3].tolist() == [1, 0, 0]
                partition.production_status[:] = 1  # a copy
                partition.keys_mapping.clear()
                assert partition.get_custom_meta([0]) == {0: {"n": 5}}
                chosen = sorted(ready_indexes, key=lambda i: -partition.custom_meta[i].get("n", 0))[:batch_size]
                return chosen, chosen

        register_sampler(Reads())
        assert _fetch(tq, 2).global_indexes == [2, 0]
        assert tq.get_client().get_production_status(["y"], "p")[1].flatten().tolist()[:3] == [0, 1, 0]

    def test_a_partition_that_is_cleared_while_it_looks_is_empty(self, tq: Any) -> None:
        class Clears(SequentialSampler):
            def sample(
                self, ready_indexes: Any, batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
            ) -> Any:
                tq.get_client().clear_partition("p")
                shape = list(partition.production_status.shape)
                assert (partition.global_indexes, partition.keys_mapping, partition.field_metadata) == (set(), {}, {})
                assert (shape, partition.consumption_status, partition.custom_meta) == ([0, 0], {}, {})
                raise ValueError("it was empty")

        tq.kv_batch_put(["a", "b"], "p", _rows(2))
        register_sampler(Clears())
        with pytest.raises(ValueError, match="it was empty"):
            _fetch(tq, 2)


def _fetch_or_none(tq: Any) -> Any:
    try:
        return _fetch(tq, 1)
    except RuntimeError:
        return None


class TestAtRunTime:
    def test_a_sampler_is_replaced_while_fetches_wait(self, tq: Any) -> None:
        client = tq.get_client()
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(_fetch(tq, 2, timeout=30)))
        thread.start()
        register_sampler(Steered)
        client.put(_rows(4), partition_id="p")
        thread.join(30)
        assert got[0].global_indexes == [2, 3]
        register_sampler("SequentialSampler")
        assert _fetch(tq, 2).global_indexes == [0, 1]
        for wrong, kind in [("Nobody", ValueError), (3, TypeError), (object(), TypeError)]:
            with pytest.raises(kind):
                register_sampler(wrong)

    def test_another_process_registers_its_own(self, tq: Any, nursery: Nursery) -> None:
        def other(line: Any) -> None:
            import transfer_queue as tq
            from transfer_queue import register_sampler

            class EverySecond(tq.BaseSampler):
                def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
                    chosen = ready_indexes[::2][:batch_size]
                    return chosen, chosen

            register_sampler(EverySecond())

        tq.get_client().put(_rows(5), partition_id="p")
        nursery.start(other).result()
        assert _fetch(tq, 2).global_indexes == [0, 2]


class TestASubclassOfOurs:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        class Watched(SeqlenBalancedSampler):
            pass

        return {"controller": {"sampler": Watched(2, 2), "polling_mode": True}}

    def test_it_balances_as_its_parent_and_outlives_clears(self, tq: Any) -> None:
        def put(*lengths: int) -> list[int]:
            tags = [{"total_lengths": n} for n in lengths]
            return list(tq.get_client().put(_rows(len(lengths)), partition_id="p", custom_meta=tags).global_indexes)

        put(9, 11, 1, 1, 6, 6, 7, 3)
        assert _fetch(tq, 4, _where(0, 0)).global_indexes == [4, 5, 6, 7]
        late = _fetch(tq, 4, _where(1, 0))
        assert late.global_indexes == [0, 1, 2, 3]
        tq.get_client().clear_samples(late.select_samples([0, 1]))
        assert _fetch(tq, 4, _where(1, 0)).global_indexes == [2, 3]
        assert put(5, 5) == [0, 1]
        assert _fetch(tq, 4, _where(1, 0)).global_indexes == [2, 3], "0 and 1 are other samples now"
        tq.get_client().clear_partition("p")
        put(1, 1, 1, 1)
        assert sorted(_fetch(tq, 2, _where(1, 0)).global_indexes + _fetch(tq, 2, _where(0, 0)).global_indexes) == [
            *range(4)
        ]


class TestChoosing:
    @pytest.mark.parametrize(
        ("given", "kind", "text"),
        [
            ("Nobody", ValueError, "could not find sampler"),
            (3, TypeError, "want a sampler"),
            (object, TypeError, "want a sampler"),
        ],
    )
    def test_what_is_no_sampler_is_refused_before_anything_starts(
        self, runtime_dir: Any, given: Any, kind: Any, text: str
    ) -> None:
        import transfer_queue as tq

        with pytest.raises(kind, match=text):
            tq.init({"controller": {"sampler": given}})
        assert not workers()

    @pytest.mark.parametrize("given", ["RankAwareSampler", RankAwareSampler, RankAwareSampler(), "Steered", Steered()])
    def test_by_name_class_and_instance(self, runtime_dir: Any, given: Any) -> None:
        import transfer_queue as tq

        returned = tq.init({"controller": {"sampler": given, "polling_mode": True}})
        try:
            tq.get_client().put(_rows(2), partition_id="p")
            assert _fetch(tq, 2, _where(0, 0)).size == 2
            again = pickle.loads(pickle.dumps(returned))
            assert type(again.controller.sampler) is type(given)
            tq.get_client().clear_partition("p")
        finally:
            tq.close()

    def test_another_process_attaches_to_a_session_with_a_sampler_it_cannot_import(
        self, runtime_dir: Any, nursery: Nursery
    ) -> None:
        import transfer_queue as tq

        def other(line: Any) -> int:
            import transfer_queue as tq

            conf = tq.init()
            meta = tq.get_client().get_meta(["x"], 1, "p", task_name="t")
            assert type(conf.controller.sampler).__name__ == "Steered"
            return int(meta.global_indexes[0])

        tq.init({"controller": {"sampler": Steered()}})
        try:
            tq.get_client().put(_rows(3), partition_id="p")
            assert nursery.start(other).result() == 2
        finally:
            tq.close()
