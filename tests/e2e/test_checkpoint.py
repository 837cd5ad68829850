"""Checkpoints and dumps as users see them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict

from processes import Nursery


def _table(**columns: Any) -> TensorDict:
    rows = len(next(iter(columns.values())))
    return TensorDict(columns, batch_size=[rows])


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


class TestSave:
    def test_metadata_that_is_no_json_is_refused_before_anything_is_written(self, tq: Any, tmp_path: Path) -> None:
        for metadata in ({"x": object()}, {"x": {1, 2}}, [1], "text"):
            with pytest.raises(TypeError, match="metadata"):
                tq.save_checkpoint(tmp_path / "c", metadata=metadata)
        assert _names(tmp_path) == []
        tq.save_checkpoint(tmp_path / "c", metadata={"nested": {"list": [1, None, "ü"]}})
        written = json.loads((tmp_path / "c" / "metadata.json").read_text())
        assert written["user_metadata"] == {"nested": {"list": [1, None, "ü"]}}
        assert written["storage_saved"] is True

    def test_what_programs_patch_is_what_a_save_goes_through(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_put("k", "p", {"x": torch.arange(3)})
        tq.save_checkpoint(tmp_path / "c", metadata={"n": 1})
        tq.kv_put("k", "p", {"x": torch.arange(9)})
        failing = mock.Mock(side_effect=RuntimeError("disk full"))
        with (
            mock.patch("transfer_queue.client.TransferQueueClient.save_storage_checkpoint", failing),
            pytest.raises(RuntimeError, match="disk full"),
        ):
            tq.save_checkpoint(tmp_path / "c", metadata={"n": 2})
        failing.assert_called_once()
        assert _names(tmp_path) == ["c"]
        assert json.loads((tmp_path / "c" / "metadata.json").read_text())["user_metadata"] == {"n": 1}
        tq.load_checkpoint(tmp_path / "c")
        assert tq.kv_batch_get("k", "p")["x"].unbind()[0].tolist() == [0, 1, 2]

    def test_without_storage_is_overridden_with_a_warning(
        self, tq: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            tq.save_checkpoint(tmp_path / "c", include_storage=False)
        assert "include_storage" in caplog.text

    def test_a_folder_of_the_user_is_not_replaced(self, tq: Any, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("years of work")
        with pytest.raises(FileExistsError, match=r"thesis\.tex"):
            tq.save_checkpoint(tmp_path / "home")
        assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"

    def test_files_beside_a_checkpoint_are_not_lost_with_it(self, tq: Any, tmp_path: Path) -> None:
        tq.save_checkpoint(tmp_path / "c", metadata={"n": 1})
        (tmp_path / "c" / "model.safetensors").write_text("weights")
        client = tq.get_client()
        for save in (tq.save_checkpoint, client.save_storage_checkpoint, client.save_controller_checkpoint):
            with pytest.raises(FileExistsError):
                save(tmp_path / "c")
        assert (tmp_path / "c" / "model.safetensors").read_text() == "weights"
        assert json.loads((tmp_path / "c" / "metadata.json").read_text())["user_metadata"] == {"n": 1}

    def test_a_place_that_cannot_be_written(self, tq: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            tq.save_checkpoint(tmp_path / "file" / "c")
        with pytest.raises(TypeError, match="path"):
            tq.save_checkpoint(7)
        with pytest.raises(ValueError, match="path"):
            tq.save_checkpoint("")

    def test_saves_to_one_place_take_turns(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_put("k", "p", {"x": torch.arange(1 << 20)})
        errors: list[BaseException] = []

        def save(n: int) -> None:
            try:
                tq.save_checkpoint(tmp_path / "c", metadata={"n": n})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert _names(tmp_path) == ["c"]
        assert json.loads((tmp_path / "c" / "metadata.json").read_text())["user_metadata"]["n"] in range(4)
        tq.load_checkpoint(tmp_path / "c")

    def test_memory_does_not_grow_with_the_data(self, tq: Any, tmp_path: Path) -> None:
        """1 GiB: less than 64 MiB on top (the target is 256 MiB for 4 GiB, in steady state)."""
        shared = Path("/dev/shm")
        roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 << 30
        place = (shared if roomy else tmp_path) / f"tq-test-{os.getpid()}"
        for batch in range(8):
            rows = torch.randint(0, 2**62, (128, 1 << 17))
            tq.kv_batch_put([f"{batch}-{i}" for i in range(128)], "p", _table(x=rows))
        del rows
        most, stop = [0], threading.Event()
        before = _resident()

        def watch() -> None:
            while not stop.wait(0.005):
                most[0] = max(most[0], _resident() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            tq.save_checkpoint(place)
        finally:
            stop.set()
            watcher.join()
            shutil.rmtree(place, ignore_errors=True)
        assert most[0] < 64 << 20


def _resident() -> int:
    """Bytes of this process that are neither files nor shared memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class TestLoad:
    def test_what_is_missing_is_named(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_put("k", "p", {"x": torch.arange(3)})
        tq.save_checkpoint(tmp_path / "c")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            tq.load_checkpoint(tmp_path / "nowhere")
        for part in ("metadata.json", "controller_state.tq", "storage/index.tq", "storage/values-0.tq"):
            path = tmp_path / "c" / part
            content = path.read_bytes()
            path.unlink()
            with pytest.raises(FileNotFoundError, match=path.name):
                tq.load_checkpoint(tmp_path / "c")
            path.write_bytes(content)
        tq.load_checkpoint(tmp_path / "c")

    def test_metadata_that_contradicts_the_rest_is_refused_by_name(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_batch_put(["a", "b"], "p", _table(x=torch.arange(2)))
        tq.save_checkpoint(tmp_path / "c", metadata={"loss": float("nan"), "text": 'a "NaN"'})
        path = tmp_path / "c" / "metadata.json"
        written = json.loads(path.read_text())
        assert written["partitions"] == {"p": 2}
        tq.kv_put("later", "p", {"x": torch.tensor(7)})
        contradictions: list[tuple[dict[str, Any], Any, str]] = [
            ({"format_version": 2}, tq.errors.VersionMismatchError, "format_version 2"),
            ({"storage_saved": False}, tq.errors.CorruptionError, "storage_saved"),
            ({"partitions": {"p": 3}}, tq.errors.CorruptionError, 'partition "p": 3 samples, but 2'),
            ({"partitions": {"p": 2, "q": 1}}, tq.errors.CorruptionError, 'partition "q"'),
            ({"partitions": {}}, tq.errors.CorruptionError, 'partition "p"'),
            ({"user_metadata": 5}, tq.errors.CorruptionError, "user_metadata"),
        ]
        for change, error, what in contradictions:
            path.write_text(json.dumps({**written, **change}))
            with pytest.raises(error, match=what) as raised:
                tq.load_checkpoint(tmp_path / "c")
            assert str(path) in str(raised.value)
            assert list(tq.kv_list("p")["p"]) == ["a", "b", "later"]
        for text in ("", "[]", "{", "no json"):
            path.write_text(text)
            with pytest.raises(tq.errors.CorruptionError, match=r"metadata\.json"):
                tq.load_checkpoint(tmp_path / "c")
        for kept in ({}, {"user_metadata": {"mine": 1}}, written):
            path.write_text(json.dumps(kept))
            tq.load_checkpoint(tmp_path / "c")
            assert list(tq.kv_list("p")["p"]) == ["a", "b"]

    def test_a_checkpoint_of_somebody_else(self, tq: Any, tmp_path: Path) -> None:
        tq.save_checkpoint(tmp_path / "c")
        (tmp_path / "c" / "controller_state.tq").write_bytes(b"\x80\x04K\x01.")
        with pytest.raises(tq.errors.CorruptionError, match="controller_state"):
            tq.load_checkpoint(tmp_path / "c")

    def test_metadata_from_before_the_save_reaches_the_sample_again(self, tq: Any, tmp_path: Path) -> None:
        client = tq.get_client()
        old = client.put(_table(x=torch.arange(4).reshape(2, 2)), partition_id="p")
        tq.save_checkpoint(tmp_path / "c")
        client.clear_samples(old)
        new = client.put(_table(x=torch.arange(4).reshape(2, 2) + 50), partition_id="p")
        assert new.global_indexes == old.global_indexes
        tq.load_checkpoint(tmp_path / "c")
        assert client.get_data(old)["x"].unbind()[1].tolist() == [2, 3]
        with pytest.raises(tq.errors.StorageKeyNotFoundError):
            client.get_data(new)

    def test_every_session_that_is_attached_may_save_and_load(self, tq: Any, nursery: Nursery, tmp_path: Path) -> None:
        tq.kv_put("k", "p", {"x": torch.arange(3)}, tag={"n": 1})
        assert nursery.start(_save_and_load, str(tmp_path)).result() == {"p": {"k": {"n": 1}}}
        assert _names(tmp_path) == ["c"]
        tq.load_checkpoint(tmp_path / "c")

    def test_limits_hold(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_batch_put([str(i) for i in range(64)], "p", _table(x=torch.randint(0, 2**62, (64, 1 << 17))))
        with pytest.raises(TimeoutError):
            tq.save_checkpoint(tmp_path / "c", timeout=0.002)
        assert _names(tmp_path) == []
        assert all(unit.leases == 0 for unit in tq.list_units())

    def test_async_twins(self, tq: Any, tmp_path: Path) -> None:
        async def everything() -> dict[str, Any]:
            await tq.async_kv_put("k", "p", {"x": torch.arange(3)}, tag={"n": 1})
            await tq.async_save_checkpoint(tmp_path / "c", metadata={"n": 1})
            await tq.async_dump_data_by_key(tmp_path / "d", ["k"], "p")
            await tq.async_kv_clear("k", "p")
            await tq.async_load_checkpoint(tmp_path / "c")
            await tq.async_kv_clear("k", "p")
            assert "k" in await tq.async_read_row_index(tmp_path / "d")
            loaded: dict[str, Any] = await tq.async_load_data_by_key(tmp_path / "d")
            return loaded

        assert asyncio.run(everything()) == {"k": {"n": 1}}
        assert tq.kv_batch_get("k", "p")["x"].unbind()[0].tolist() == [0, 1, 2]

    def test_a_save_that_is_cancelled_leaves_nothing(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_batch_put([str(i) for i in range(64)], "p", _table(x=torch.randint(0, 2**62, (64, 1 << 17))))

        async def cancelled() -> None:
            for delay in (0.0, 0.001, 0.01, 0.03):
                saving = asyncio.ensure_future(tq.async_save_checkpoint(tmp_path / "c"))
                await asyncio.sleep(delay)
                saving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await saving

        asyncio.run(cancelled())
        assert _names(tmp_path) == []
        assert all(unit.leases == 0 for unit in tq.list_units())


def _save_and_load(line: Any, folder: str) -> Any:
    import transfer_queue as tq

    os.chdir(folder)
    tq.save_checkpoint("c")  # relative to this process, not to the owner
    tq.kv_clear("k", "p")
    tq.load_checkpoint("c")
    return tq.kv_list()


class TestParts:
    def test_controller_and_storage_apart(self, tq: Any, tmp_path: Path) -> None:
        client = tq.get_client()
        tq.kv_put("k", "p", {"x": torch.arange(3)}, tag={"n": 1})
        client.save_controller_checkpoint(tmp_path / "state")
        client.save_storage_checkpoint(tmp_path / "values")
        tq.kv_put("k", "p", {"x": torch.arange(5)}, tag={"n": 2})
        with pytest.raises(tq.errors.InvalidStateError, match="load_storage_checkpoint"):
            client.load_controller_checkpoint(tmp_path / "state")
        assert tq.kv_list("p") == {"p": {"k": {"n": 2}}}
        client.load_storage_checkpoint(tmp_path / "values")
        client.load_controller_checkpoint(tmp_path / "state")
        assert tq.kv_list("p") == {"p": {"k": {"n": 1}}}
        assert tq.kv_batch_get("k", "p")["x"].unbind()[0].tolist() == [0, 1, 2]


class TestDump:
    def test_the_index_tells_what_is_there(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_put("a", "p", {"x": torch.arange(3), "y": "text"}, tag={"n": 1})
        tq.kv_put("t", "p", tag={"only": "tags"})
        report = tq.dump_data_by_key(tmp_path / "d", ["t", "a", "t"], "p")
        assert report["keys"] == ["t", "a"]
        assert report["rows_with_data"] == 1
        index = tq.read_row_index(tmp_path / "d")
        assert list(index) == ["t", "a"]
        assert index["a"]["fields"] == ["x", "y"]
        assert (index["a"]["partition_id"], index["a"]["tag"]) == ("p", {"n": 1})
        assert index["t"]["fields"] == []
        tq.kv_clear(["a", "t"], "p")
        assert tq.load_data_by_key(tmp_path / "d") == {"t": {"only": "tags"}, "a": {"n": 1}}
        assert tq.kv_batch_get("a", "p")["y"][0] == "text"

    def test_what_is_missing_is_told_by_the_function_that_misses_it(self, tq: Any, tmp_path: Path) -> None:
        for read in (tq.read_row_index, tq.load_data_by_key):
            with pytest.raises(FileNotFoundError, match=f"^{read.__name__}: .*no_dump"):
                read(tmp_path / "no_dump")

    def test_nothing_in_a_dump_runs_when_it_is_loaded(self, tq: Any, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        tq.kv_put("k", "p", {"x": _Trap(str(mark))}, tag={"t": _Trap(str(mark))})
        mark.unlink(missing_ok=True)  # the reply of the put has shown the tag
        tq.dump_data_by_key(tmp_path / "d", "k", "p")
        tq.read_row_index(tmp_path / "d")
        tq.load_data_by_key(tmp_path / "d")
        tq.save_checkpoint(tmp_path / "c")
        tq.load_checkpoint(tmp_path / "c")
        assert not mark.exists()
        assert tq.kv_list("p")["p"]["k"] == {"t": "sprung"}
        assert mark.exists()

    def test_a_damaged_dump_changes_nothing(self, tq: Any, tmp_path: Path) -> None:
        tq.kv_put("k", "p", {"x": torch.arange(100)})
        tq.dump_data_by_key(tmp_path / "d", "k", "p")
        tq.kv_put("k", "p", {"x": torch.arange(5)})
        for path in list((tmp_path / "d").rglob("*.tq")):
            content = path.read_bytes()
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            with pytest.raises(tq.errors.CorruptionError, match=path.name):
                tq.load_data_by_key(tmp_path / "d")
            path.write_bytes(content)
        assert tq.kv_batch_get("k", "p")["x"].unbind()[0].tolist() == list(range(5))


class _Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return _spring, (self.mark,)


def _spring(mark: str) -> str:
    open(mark, "a").close()
    return "sprung"


def test_readers_and_writers_go_on_while_a_checkpoint_is_saved(tq: Any, tmp_path: Path) -> None:
    """Calls begin and end while it is saved, and what is read is always whole."""
    tq.kv_batch_put([str(i) for i in range(256)], "p", _table(x=torch.randint(0, 2**62, (256, 1 << 17))))
    rounds, stop = [0], threading.Event()

    def use() -> None:
        while not stop.is_set():
            tq.kv_batch_put(["a", "b"], "q", _table(x=torch.full((2, 8), rounds[0])))
            assert tq.kv_batch_get(["a", "b"], "q")["x"].values().unique().tolist() == [rounds[0]]
            rounds[0] += 1

    user = threading.Thread(target=use)
    user.start()
    before = rounds[0]
    try:
        tq.save_checkpoint(tmp_path / "c")
    finally:
        during = rounds[0] - before
        stop.set()
        user.join()
    assert during > 2, "more than were under way at its ends"
    tq.load_checkpoint(tmp_path / "c")
    assert len(tq.kv_list("p")["p"]) == 256


class TestSampler:
    @pytest.fixture
    def conf(self) -> dict[str, Any]:
        return {"controller": {"sampler": _alternating()}}

    def test_the_state_of_a_sampler_that_python_runs(self, tq: Any, tmp_path: Path) -> None:
        client = tq.get_client()
        client.put(_table(x=torch.arange(20).reshape(10, 2)), partition_id="p")

        def pick() -> list[int]:
            picked: list[int] = client.get_meta(["x"], 1, "p", task_name="t").global_indexes
            return picked

        assert [pick(), pick(), pick()] == [[0], [9], [1]]
        tq.save_checkpoint(tmp_path / "c")
        after = [pick(), pick()]
        assert after == [[8], [2]]
        tq.load_checkpoint(tmp_path / "c")
        assert [pick(), pick()] == after


def _alternating() -> Any:
    """A sampler that takes the first and the last sample in turns."""
    import transfer_queue

    class Alternating(transfer_queue.BaseSampler):
        def sample(self, ready_indexes: list[int], batch_size: int, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
            calls = self._states["calls"] = self._states.get("calls", 0) + 1
            chosen = ready_indexes[:batch_size] if calls % 2 else ready_indexes[-batch_size:]
            return chosen, chosen

    return Alternating()
