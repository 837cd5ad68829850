"""Samplers on plain lists: promises, forgetting, checkpoints, the choice, Karmarkar-Karp against a slow second one."""

from __future__ import annotations

import itertools
import pickle
import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from transfer_queue import _plain, _sampler_jobs
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    StreamingTokenBudgetSampler,
    describe,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    resolve,
)


def ask(rank: int, batch: int, **more: Any) -> dict[str, Any]:
    return {"task_name": "t", "partition_id": "p", "dp_rank": rank, "batch_index": batch, **more}


def lengths(*values: int) -> SimpleNamespace:
    return SimpleNamespace(custom_meta={index: {"total_lengths": n} for index, n in enumerate(values)})


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_promised_to_two_ranks_in_whatever_order_they_ask(seed: int) -> None:
    rng = random.Random(seed)
    ranks, batches, size = 3, 4, 2
    sampler: Any = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=ranks)
    ready = list(range(ranks * batches * size))
    weights = lengths(*[rng.randint(1, 9) for _ in ready])
    order = list(itertools.product(range(ranks), range(batches)))
    rng.shuffle(order)
    shares = {}
    for rank, batch in order:
        sampled, consumed = sampler(list(ready), size, **ask(rank, batch), partition=weights)
        assert sampled == consumed
        assert len(sampled) == size
        shares[rank, batch] = sampled
        ready = [index for index in ready if index not in consumed]
        if rng.random() < 0.3:
            fresh = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=ranks)
            fresh.load_checkpoint(_plain.unpack(_plain.pack(sampler.save_checkpoint(), "state")))
            sampler = fresh
    assert not ready
    for (rank, batch), share in shares.items():
        assert sampler.has_cached_result("p", "t", ask(rank, batch))
        assert sampler([], size, **ask(rank, batch))[0] == share


def test_a_reset_ends_promises_and_keeps_answers() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    first = sampler([0, 1], 1, **ask(0, 0))[0]
    assert sampler([0, 1], 1, **ask(0, 1))[0] == []
    sampler.consumption_reset("p", "t")
    assert sampler([0, 1], 1, **ask(0, 1))[0] == first
    assert sampler([], 1, **ask(1, 0))[0] == [1]


@pytest.mark.parametrize("make", [RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler])
def test_cleared_samples_leave_the_answers(make: Any) -> None:
    sampler = make()
    assert sampler([3, 4, 5], 3, **ask(0, 0))[0] == [3, 4, 5]
    sampler.samples_cleared("other", [3])
    sampler.samples_cleared("p", [4])
    assert sampler([4], 3, **ask(0, 0))[0] == [3, 5]
    sampler.samples_cleared("p", [3, 5])
    assert not sampler.has_cached_result("p", "t", ask(0, 0))
    assert sampler([4], 1, **ask(0, 0))[0] == [4]
    sampler.clear_cache("p")
    assert sampler([7], 1, **ask(0, 0))[0] == [7]


def test_what_a_caller_does_to_its_answer_changes_nothing() -> None:
    for sampler in (RankAwareSampler(), GRPOGroupNSampler(), SeqlenBalancedSampler()):
        sampled, consumed = sampler([1, 2], 2, **ask(0, 0))
        sampled.clear()
        consumed.append(9)
        assert sampler([], 2, **ask(0, 0)) == ([1, 2], [1, 2])


def test_groups_are_dealt_out_by_their_length() -> None:
    """Groups weigh 20, 2, 12 and 10."""
    sampler = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    weights = lengths(9, 11, 1, 1, 6, 6, 7, 3)
    shares = [sampler(list(range(8)), 4, **ask(rank, 0), partition=weights)[0] for rank in (0, 1)]
    assert shares == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert sampler([], 4, **ask(2, 0))[0] == []


def test_batches_that_are_no_whole_groups() -> None:
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt 2"):
        SeqlenBalancedSampler(n_samples_per_prompt=2)([1, 2, 3], 3, **ask(0, 0))
    uneven = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    shares = [uneven(list(range(6)), 3, **ask(rank, 0), partition=lengths(9, 1, 1, 1, 1, 1))[0] for rank in (0, 1)]
    assert sorted(map(sorted, shares)) == [[0], [1, 2, 3, 4, 5]]


def slow_karmarkar_karp(values: list[int], k: int, equal: bool) -> list[list[int]]:
    """All orders from tuples, the whole list sorted in every round."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    step = k if equal else 1

    def largest_first(sets: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return sorted(sets, reverse=True)

    states = []
    for at in range(0, len(order), step):
        sets = [(values[i], 1, ((i, values[i]),)) for i in order[at : at + step]]
        states.append(largest_first([*sets, *[(0, 0, ())] * (k - len(sets))]))
    while len(states) > 1:
        states.sort(key=lambda s: (s[0][0] - s[-1][0], s[0]), reverse=True)
        one, two = states[0], states[1]
        joined = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(one, two[::-1], strict=True)]
        states = [largest_first(joined), *states[2:]]
    return [sorted(i for i, _ in s[2]) for s in states[0]]


@pytest.mark.parametrize("seed", range(60))
def test_karmarkar_karp_against_a_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    k, equal = rng.randint(1, 5), rng.random() < 0.5
    count = k * rng.randint(1, 6) + (0 if equal else rng.randint(0, 3))
    values = [rng.randint(1, 6) for _ in range(count)]
    got = karmarkar_karp(values, k, equal)
    assert got == slow_karmarkar_karp(values, k, equal)
    assert sorted(itertools.chain(*got)) == list(range(count))
    assert got == get_seqlen_balanced_partitions(values, k, equal)


def test_karmarkar_karp_refuses_what_cannot_be_dealt_out() -> None:
    with pytest.raises(AssertionError, match="evenly"):
        karmarkar_karp([1, 2, 3], 2, True)
    with pytest.raises(AssertionError, match="too few"):
        get_seqlen_balanced_partitions([1], 2, False)


def test_groups_in_put_order_when_the_partition_says_so() -> None:
    partition: Any = SimpleNamespace(put_order={0: 8, 1: 9, 2: 3, 6: 4, 7: 6}, custom_meta={})
    assert GRPOGroupNSampler(2)([0, 1, 2, 6, 7], 4, partition=partition)[0] == [2, 6, 0, 1]
    shares = [SeqlenBalancedSampler(2, 2)([0, 1, 2, 6, 7], 2, **ask(r, 0), partition=partition)[0] for r in (0, 1)]
    assert sorted(shares) == [[0, 1], [2, 6]]
    stream = StreamingTokenBudgetSampler()
    assert stream([0, 1, 2, 6, 7], 1, **ask(0, 0), token_budget=3, partition=partition)[0] == [2, 6, 7]


def test_a_stream_on_lists() -> None:
    sampler: Any = StreamingTokenBudgetSampler()
    weights = lengths(4, 3, 3, 50, 2)
    assert sampler([0, 1], 1, **ask(0, 0), token_budget=10, partition=weights)[0] == []
    ready = [0, 1, 2, 3, 4]
    assert sampler(ready, 1, **ask(0, 0), token_budget=10, partition=weights)[0] == [0, 1, 2]
    assert sampler([3, 4], 1, **ask(1, 0), token_budget=10, partition=weights)[0] == [3]
    assert sampler([4], 1, **ask(0, 1), token_budget=10, partition=weights)[0] == []
    weights.production_completed = True
    assert sampler([4], 1, **ask(0, 1), token_budget=10, partition=weights)[0] == [4]
    assert sampler([], 1, **ask(0, 2), token_budget=10, partition=weights)[0] == []
    assert sampler.is_end("p", "t", 0, 2)
    fresh: Any = StreamingTokenBudgetSampler()
    fresh.load_checkpoint(_plain.unpack(_plain.pack(sampler.save_checkpoint(), "state")))
    assert fresh.is_end("p", "t", 0, 2)
    assert fresh([], 1, **ask(0, 0), token_budget=10)[0] == [0, 1, 2]
    assert fresh([5], 1, **ask(0, 2), token_budget=10)[0] == []
    fresh.samples_cleared("p", [0, 1, 2, 3, 4])
    assert not fresh.is_end("p", "t", 0, 2)
    assert fresh([6, 7], 2, task_name="t", partition_id="p")[0] == [6, 7], "without a budget by groups"


def test_a_stream_refuses_what_makes_no_sense() -> None:
    sampler: Any = StreamingTokenBudgetSampler()
    with pytest.raises(ValueError, match="needs dp_rank"):
        sampler([1], 1, token_budget=3)
    with pytest.raises(ValueError, match="token_budget must be positive"):
        sampler([1], 1, **ask(0, 0), token_budget=0)
    with pytest.raises(ValueError, match="balance_unit_multiplier must be positive"):
        StreamingTokenBudgetSampler(balance_unit_multiplier=0)


class Child(GRPOGroupNSampler):
    """Found by its name although it is a grandchild of the base."""


def test_samplers_are_found_by_name_class_and_instance() -> None:
    instance = RankAwareSampler()
    assert resolve(instance) is instance
    assert type(resolve(SequentialSampler)) is SequentialSampler
    for name in ("GRPOGroupNSampler", "SeqlenBalancedSampler", "StreamingTokenBudgetSampler", "Child"):
        assert type(resolve(name)).__name__ == name


def test_what_is_no_sampler() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"could not find sampler 'Nobody', have .*RankAwareSampler"
    ) as raised:
        resolve("Nobody")
    assert isinstance(raised.value, ValueError)
    for wrong in (3, None, object, dict, lambda ready, size: (ready, ready)):
        with pytest.raises(WrongTypeError, match="want a sampler"):
            resolve(wrong)
    assert issubclass(WrongTypeError, TypeError)
    with pytest.raises(TypeError, match="abstract"):
        resolve(BaseSampler)


def test_only_the_very_types_run_in_the_core() -> None:
    assert describe(SeqlenBalancedSampler(2, 3)) == {
        "name": "SeqlenBalancedSampler",
        "group": 2,
        "ranks": 3,
        "pickled": None,
    }
    assert describe(SequentialSampler())["pickled"] is None
    assert describe(Child(2))["pickled"]
    used = RankAwareSampler()
    used([1], 1, **ask(0, 0))
    assert describe(used)["pickled"], "it remembers something"


def test_an_object_that_cannot_be_pickled() -> None:
    odd = Child()
    odd.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"controller.sampler cannot be pickled: TypeError"):
        describe(odd)


def call(method: str, **more: Any) -> _sampler_jobs._Call:
    empty: dict[str, Any] = {
        "partition": "p",
        "task": "t",
        "size": 2,
        "sampling": None,
        "ready": None,
        "births": None,
        "final": False,
        "state": None,
        "limit_ms": 1000,
        "news": None,
    }
    return _sampler_jobs._Call(sampler=1, method=method, **{**empty, **more})


def ready(*indexes: int) -> bytes:
    return array("q", indexes).tobytes()


def asked(loaded: _sampler_jobs._Loaded, batch: int, *indexes: int, **more: Any) -> list[int]:
    sampling = msgspec.msgpack.encode(ask(0, batch))
    answer = loaded.run(call("sample", ready=ready(*indexes), sampling=sampling, **more), 0)
    return array("q", msgspec.msgpack.decode(answer)[1]).tolist()


def test_the_state_of_an_object_crosses_as_plain_values() -> None:
    loaded, fresh = (_sampler_jobs._Loaded(RankAwareSampler()) for _ in range(2))
    assert asked(loaded, 0, 5, 6, 7) == [5, 6]
    state = msgspec.msgpack.decode(loaded.run(call("save"), 0))[4]
    fresh.run(call("load", state=state), 0)
    assert asked(fresh, 0) == [5, 6], "though nothing is ready"
    loaded.sampler._states["odd"] = Child()
    with pytest.raises(TypeError, match=r"the state of the sampler\['_states'\]\['odd'\] is a value of type .*Child"):
        loaded.run(call("save"), 0)
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's texts
        fresh.run(call("load", state=b"\xc1"), 0)
    assert asked(fresh, 0) == [5, 6]


class Told(RankAwareSampler):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def clear_cache(self, partition_id: str) -> None:
        self.told.append((partition_id, "cleared"))

    def samples_cleared(self, partition_id: str, indexes: Any) -> None:
        self.told.append((partition_id, indexes))

    def consumption_reset(self, partition_id: str, task_name: str | None) -> None:
        self.told.append((partition_id, task_name))


def test_news_are_told_once_and_in_order() -> None:
    sampler = Told()
    loaded = _sampler_jobs._Loaded(sampler)
    first = [1, "p", False, ready(1, 4), msgspec.msgpack.encode(["t", ""])]
    second = [2, "q", True, None, None]
    asked(loaded, 0, news=[first])
    asked(loaded, 0, news=[first, second])
    asked(loaded, 0, news=[first, second])
    assert sampler.told == [("p", "t"), ("p", None), ("p", [1, 4]), ("q", "cleared")]


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "a": [1, -1, 2**63, 2**64, -(2**80), 1.5, None, True, b"b", "ü"],
        ("t", 1): ((), (1, [2, (3,)])),
        0: {frozenset({1, 2}): {"x"}, None: set()},
    }
    back = _plain.unpack(_plain.pack(value, "it"))
    assert back == value
    assert [type(v) for v in back["a"]] == [type(v) for v in value["a"]]


def test_what_is_not_plain_is_refused_with_its_place() -> None:
    for wrong in (object(), Child(), lambda: 0, 1j):
        with pytest.raises(TypeError, match=r"it\['a'\]\[1\] is a value of type .*, which cannot be saved"):
            _plain.pack({"a": [0, wrong]}, "it")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xd4\x07\x00", b"\x93\x01"])
def test_bytes_that_are_no_plain_value(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's texts
        _plain.unpack(data)


class Counted(SequentialSampler):
    """Counts how often it was loaded."""

    loads = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Counted.loads += 1


def test_a_sampler_that_was_loaded_ahead_is_the_one_that_is_called() -> None:
    samplers, pickled, before = _sampler_jobs.Samplers(0), pickle.dumps(Counted()), Counted.loads
    samplers.prepare(pickled)
    first = samplers._of(1, pickled)
    assert (samplers._of(1, pickled), Counted.loads) == (first, before + 1)
    assert samplers._of(2, pickled) is not first  # registered again: it begins anew


def test_a_sampler_that_cannot_be_loaded_ahead_fails_when_it_is_called() -> None:
    samplers, missing = _sampler_jobs.Samplers(0), b"cno_such_module\nSampler\n."
    samplers.prepare(missing)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        samplers._of(1, missing)
