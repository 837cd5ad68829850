"""Durable units: what a unit that is started again has, what it has lost, and whom it refuses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery, until
from transfer_queue import errors
from unit_hosts import Hosts, unitless

LARGE = 2000  # int64: 16,000 bytes, which go to disk


@pytest.fixture(params=["relaxed", "strict"])
def durability(request: pytest.FixtureRequest) -> str:
    """Each test with both."""
    kind: str = request.param
    return kind


@pytest.fixture
def hosts(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path, durability: str
) -> Iterator[Hosts]:
    """A session and its durable unit ``unit-a``."""
    with unitless(monkeypatch) as tq:
        made = Hosts(tq, nursery, tmp_path / "disk", durability)
        made.start("unit-a")
        yield made


def _put(tq: Any, *keys: str, value: int = 0) -> None:
    """A value on disk and one in memory for each key."""
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((LARGE,), value + i), "n": torch.tensor([value + i])})


def _values(tq: Any, *keys: str) -> list[int]:
    """The values on disk."""
    rows = tq.kv_batch_get(list(keys), "p", select_fields=["x"])["x"].unbind()
    assert all((row == row[0]).all() and row.shape == (LARGE,) for row in rows)
    return [int(row[0]) for row in rows]


def test_what_was_on_disk_is_there_again_and_the_rest_is_lost_by_key(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a", "b", "c")
    tq.kv_put("d", "p", fields={"n": torch.tensor([4])}, tag={"only": "memory"})
    tq.kv_put("e", "p", tag={"only": "tags"})
    client = tq.get_client()
    (meta,) = [client.get_meta(["x"], 3, "p", task_name="train")]
    assert meta.size == 3
    hosts.kill("unit-a")
    with pytest.raises(errors.UnavailableError, match="unit-a"):
        _values(tq, "a")
    hosts.start("unit-a")

    assert _values(tq, "c", "a", "b") == [2, 0, 1]
    assert tq.list_lost() == {"p": {key: ["n"] for key in "abcd"}}
    assert tq.list_lost("p") == tq.list_lost()
    assert tq.list_lost("q") == {}
    assert asyncio.run(tq.async_list_lost("p")) == tq.list_lost()
    (unit,) = tq.list_units()
    assert (unit.unit_id, unit.state, unit.lost_cells, unit.cells) == ("unit-a", "ACTIVE", 4, 3)
    for read in (
        lambda: tq.kv_batch_get(["a", "b"], "p"),
        lambda: tq.kv_batch_get(["a", "d"], "p", select_fields=["n"]),
        lambda: tq.kv_batch_get(["a"], "p", select_fields=["n"], copy=False),
        lambda: tq.kv_update("a", "p", {"n": torch.tensor([1])}, "add"),
    ):
        with pytest.raises(errors.DataLostError, match=r'partition "p": lost .*field "n" of keys "a"'):
            read()  # type: ignore[no-untyped-call]
    assert tq.kv_list("p")["p"] == {"a": {}, "b": {}, "c": {}, "d": {"only": "memory"}, "e": {"only": "tags"}}
    assert client.get_production_status(["n"], "p")[1].sum() == 0
    assert client.get_production_status(["x"], "p")[1].sum() == 3
    assert client.get_consumption_status("train", "p")[1].sum() == 3, "what was handed out stays handed out"

    tq.kv_put("a", "p", fields={"n": torch.tensor([7])})
    assert tq.kv_batch_get(["a"], "p")["n"].values().tolist() == [7]
    tq.kv_clear(["b"], "p", fields=["n"])
    tq.kv_clear(["c"], "p")
    assert tq.list_lost() == {"p": {"d": ["n"]}}
    assert list(tq.kv_batch_get(["b"], "p").keys()) == ["x"]


def test_a_watch_tells_what_was_lost(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a", "b")

    async def watched() -> list[Any]:
        watch = tq.kv_watch("p")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(hosts.kill, "unit-a")
        await asyncio.to_thread(hosts.start, "unit-a")
        changes = [await asyncio.wait_for(first, 20), await asyncio.wait_for(anext(watch), 20)]
        await watch.aclose()
        return changes

    assert asyncio.run(watched()) == [("lost", "a", ["n"], None), ("lost", "b", ["n"], None)]


def test_what_was_cleared_or_overwritten_meanwhile_does_not_come_back(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a", "b", "c", "d")
    _put(tq, "b", value=10)  # overwritten on disk
    tq.kv_put("c", "p", fields={"x": torch.tensor([1])})  # a small one, in memory, in the place of one on disk
    tq.kv_clear(["d"], "p")
    hosts.kill("unit-a")
    with pytest.raises(errors.UnavailableError):
        tq.kv_clear(["a"], "p")
    tq.kv_clear(["a"], "p")  # the unit is known to be gone, so there is nothing to wait for
    hosts.start("unit-a")
    assert tq.list_lost() == {"p": {"b": ["n"], "c": ["n", "x"]}}
    assert _values(tq, "b") == [10]
    (unit,) = tq.list_units()
    assert (unit.cells, unit.samples, unit.disk_used_bytes) == (1, 2, 8 * LARGE)
    hosts.kill("unit-a")
    hosts.start("unit-a")
    assert _values(tq, "b") == [10]
    assert tq.list_units()[0].cells == 1, "what was dropped stays so"


def test_a_unit_that_closes_keeps_what_was_in_memory_too(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a", "b")
    tq.kv_put(
        "c",
        "p",
        fields={"o": {"any": ("object", 1)}, "none": torch.empty(0), "bf": torch.ones(3, dtype=torch.bfloat16)},
    )
    before = tq.kv_batch_get(["a", "b"], "p")
    hosts.stop("unit-a")
    hosts.start("unit-a")
    assert tq.list_lost() == {}
    after = tq.kv_batch_get(["a", "b"], "p")
    assert sorted(after.keys()) == ["n", "x"]
    assert all(torch.equal(after[name].values(), before[name].values()) for name in ("n", "x"))
    one = tq.kv_batch_get(["c"], "p")
    assert one["o"][0] == {"any": ("object", 1)}
    assert one["none"].unbind()[0].shape == (0,)
    assert one["bf"].dtype == torch.bfloat16


def test_values_without_a_byte_are_there_again(hosts: Hosts) -> None:
    """They come back each as what it was, whatever is put beside them; nothing is the same as never written."""
    tq = hosts.tq
    fields: dict[str, Any] = {"t": torch.empty(2, 0, 3), "b": b"", "s": "", "x": torch.full((LARGE,), 7)}
    tq.kv_put("a", "p", fields=fields)
    tq.kv_put("b", "p", fields={"t": torch.ones(2, 1, 3), "s": "lost"})
    tq.kv_batch_put(["c", "d"], "p", fields=TensorDict({"e": torch.empty(2, 0)}, batch_size=[2]), dedup=["e"])
    tq.kv_put("e", "p", fields={"s": "lost"})
    tq.kv_put("e", "p", fields={"s": ""})
    tq.kv_put("f", "p", fields={"s": ""})
    tq.kv_clear(["f"], "p")
    (before,) = tq.list_units()
    hosts.kill("unit-a")
    hosts.start("unit-a")

    assert tq.list_lost() == {"p": {"b": ["s", "t"]}}
    (unit,) = tq.list_units()
    assert (unit.cells, unit.disk_cells, unit.disk_used_bytes) == (7, 7, 8 * LARGE)
    assert before.disk_cells == 7
    row = tq.kv_batch_get(["a"], "p")
    assert row["t"].unbind()[0].shape == (2, 0, 3)
    assert (row["b"][0], row["s"][0]) == (b"", "")
    assert _values(tq, "a") == [7]
    assert tq.kv_batch_get(["e"], "p")["s"][0] == ""
    assert [e.shape for e in tq.kv_batch_get(["c", "d"], "p")["e"].unbind()] == [(0,), (0,)]
    tq.kv_clear(["a", "b", "c", "d", "e"], "p")
    (unit,) = tq.list_units()
    assert (unit.cells, unit.disk_cells) == (0, 0)


def test_spilled_values_survive(hosts: Hosts) -> None:
    """Small values that were moved to disk to make room; and all of the small ones that stayed in memory are named."""
    tq = hosts.tq
    hosts.start("unit-b", limit=1 << 18)
    hosts.kill("unit-a")
    until(lambda: _unit(tq, "unit-a").state != "ACTIVE", "the death is known")
    keys = [f"k{i}" for i in range(400)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "p", fields={"x": torch.full((250,), i)})
    assert _unit(tq, "unit-b").spilled_bytes > 0
    on_disk = _unit(tq, "unit-b").disk_cells  # or a few more, if it still spills
    hosts.kill("unit-b")
    hosts.start("unit-b", limit=1 << 18)
    lost = set(tq.list_lost()["p"])
    assert 0 < len(lost) <= 400 - on_disk < 400
    for i, key in enumerate(keys):
        if key not in lost:
            assert tq.kv_batch_get([key], "p")["x"].values().unique().tolist() == [i]


def _unit(tq: Any, name: str) -> Any:
    (found,) = [unit for unit in tq.list_units() if unit.unit_id == name]
    return found


def test_nobody_else_gets_the_folder(hosts: Hosts) -> None:
    with pytest.raises(errors.AlreadyExistsError, match="in use"):
        hosts.start("unit-a", join=False)
    _put(hosts.tq, "a")
    assert _values(hosts.tq, "a") == [0]
    hosts.durability = "none"
    hosts.start("unit-a", join=False)  # scratch, in a folder of its own


def test_another_session_is_refused_and_nothing_is_removed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tq = hosts.tq
    _put(tq, "a")
    hosts.kill("unit-a")
    tq.close()  # which cannot reach the unit
    before = _contents(hosts.folder("unit-a"))
    tq.init({"client": {"timeout_s": 30}})
    with pytest.raises(
        errors.AlreadyExistsError, match=r'unit "unit-a": .*default\.units/unit-a holds 1 values of session'
    ):
        hosts.start("unit-a")
    for child in hosts.children.values():
        child.signal(9)
        child.wait()
    assert {name: data for name, data in _contents(hosts.folder("unit-a")).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    shutil.rmtree(hosts.folder("unit-a"))
    hosts.start("unit-a")
    _put(tq, "a", value=5)
    assert _values(tq, "a") == [5]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_end_of_a_session_leaves_nothing(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a", "b")
    assert hosts.files("unit-a", "values")
    tq.close()
    hosts.stop("unit-a")
    assert [path.name for path in hosts.path.rglob("*")] == ["transfer_queue_ssd_offload"]


def test_a_unit_of_another_name_begins_empty(hosts: Hosts) -> None:
    tq = hosts.tq
    _put(tq, "a")
    hosts.kill("unit-a")
    hosts.start("unit/../b c")
    assert tq.kv_batch_get(["a"], "p", select_fields=["y"], timeout=5) is not None
    with pytest.raises(errors.UnavailableError, match="unit-a"):
        _values(tq, "a")
    _put(tq, "b", value=3)
    assert _values(tq, "b") == [3]
    assert hosts.folder("unit%2F..%2Fb%20c").is_dir()


def test_a_stream_of_samples_goes_on_when_lost_ones_are_written_again(hosts: Hosts) -> None:
    """A fetch waits for what was lost; writing it again serves it."""
    tq = hosts.tq
    client = tq.get_client()
    _put(tq, "a", "b")
    hosts.kill("unit-a")
    hosts.start("unit-a")
    with pytest.raises(TimeoutError):
        client.get_meta(["x", "n"], 2, "p", task_name="t", timeout=0.5)
    for i, key in enumerate("ab"):
        tq.kv_put(key, "p", fields={"n": torch.tensor([20 + i])})
    meta = client.get_meta(["x", "n"], 2, "p", task_name="t", timeout=5)
    data = client.get_data(meta)
    assert data["n"].values().tolist() == [20, 21]


_DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], type[Exception], str]] = {
    "foreign values": ("values", lambda data: b"something else" * 1000, errors.CorruptionError, "values-"),
    "foreign index": ("index", lambda data: b"something else" * 1000, errors.CorruptionError, "index-"),
    "newer values": ("values", lambda data: _newer(data), errors.VersionMismatchError, "format version 2"),
    "newer index": ("index", lambda data: _newer(data), errors.VersionMismatchError, "format version 2"),
    "empty values": ("values", lambda data: b"", errors.CorruptionError, 'field "x"'),
    "empty index": ("index", lambda data: b"", errors.CorruptionError, "is empty"),
    "flipped index": ("index", lambda data: _flip(data, 64 + 40), errors.CorruptionError, "index-"),
    "truncated header": ("index", lambda data: data[:50], errors.CorruptionError, "index-"),
}


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def _newer(data: bytes) -> bytes:
    """The header of a later version: it has its own checksum, CRC32C of what is before it."""
    head = bytearray(data[:64])
    head[10:12] = (2).to_bytes(2, "little")
    head[60:64] = _crc32c(bytes(head[:60])).to_bytes(4, "little")
    return bytes(head) + data[64:]


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("durability", ["relaxed"], indirect=True)
@pytest.mark.parametrize("name", _DAMAGE)
def test_a_unit_refuses_what_it_cannot_read_and_removes_nothing(hosts: Hosts, name: str) -> None:
    kind, damage, error, text = _DAMAGE[name]
    tq = hosts.tq
    _put(tq, "a", "b", "c")
    hosts.kill("unit-a")
    path = hosts.files("unit-a", kind)[-1]
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    before = _contents(hosts.folder("unit-a"))
    with pytest.raises(error, match=text):
        hosts.start("unit-a")
    assert _contents(hosts.folder("unit-a")) == before
    path.write_bytes(whole)
    hosts.start("unit-a")
    assert _values(tq, "a", "b", "c") == [0, 1, 2]


@pytest.mark.parametrize("durability", ["relaxed"], indirect=True)
def test_something_else_in_the_folder_is_left_alone(hosts: Hosts) -> None:
    _put(hosts.tq, "a")
    hosts.kill("unit-a")
    other = hosts.folder("unit-a") / "notes.txt"
    other.write_text("mine")
    with pytest.raises(errors.AlreadyExistsError, match=r"notes\.txt"):
        hosts.start("unit-a")
    assert other.read_text() == "mine"
    other.unlink()
    hosts.start("unit-a")
    assert _values(hosts.tq, "a") == [0]


@pytest.mark.parametrize("durability", ["relaxed"], indirect=True)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_value_is_named_and_the_others_are_read(hosts: Hosts, damage: str) -> None:
    tq = hosts.tq
    _put(tq, "a", "b", "c")
    hosts.kill("unit-a")
    path = hosts.files("unit-a", "values")[-1]
    whole = path.read_bytes()
    at = whole.rindex(torch.full((LARGE,), 2).numpy().tobytes())
    if damage == "flipped":
        path.write_bytes(_flip(whole, at + 8 * LARGE - 1))
    elif damage == "truncated":
        path.write_bytes(whole[: at + 100])
    else:
        path.unlink()
    hosts.start("unit-a")
    with pytest.raises(errors.CorruptionError, match=r'partition "p": key "[abc]": field "x": .*damaged') as raised:
        _values(tq, "a", "b", "c")
    assert damage == "missing" or 'key "c"' in str(raised.value)
    if damage != "missing":
        assert _values(tq, "a", "b") == [0, 1]
    _put(tq, "c", value=9)
    assert _values(tq, "c") == [9]


def test_batches_span_units(hosts: Hosts) -> None:
    """A batch lies on two units, of which one is started again: its rows and the others are read together."""
    tq = hosts.tq
    hosts.start("unit-b")
    keys = [f"k{i}" for i in range(8)]
    for key in keys:
        _put(tq, key)
    batch = TensorDict({"x": torch.arange(8).unsqueeze(1).expand(8, LARGE).contiguous()}, batch_size=[8])
    tq.kv_batch_put(keys, "p", batch)
    assert all(unit.disk_cells for unit in tq.list_units())
    for name in ("unit-a", "unit-b"):
        hosts.kill(name)
        hosts.start(name)
        assert _values(tq, *keys) == list(range(8))
