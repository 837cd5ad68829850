"""Values on local disk: what goes there, what comes back, what a failure leaves, and whose folders are touched."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue
from disks import offload
from processes import until
from transfer_queue import errors

MIB = 1 << 20


def files(path: Path) -> list[Path]:
    """Everything of units below the folder of a user."""
    return [file for file in path.rglob("*") if file.is_file()]


def unit(tq: Any) -> Any:
    """The only unit."""
    (only,) = tq.list_units()
    return only


class TestThreshold:
    """Values of 4 KiB and more go to disk."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return offload(tmp_path / "deep" / "er", 4096)

    def test_every_kind_of_value_comes_back_from_disk(self, tq: Any, tmp_path: Path) -> None:
        """One column may lie in both tiers. Nothing but the payload counts, and all of it is freed."""
        text = ["a", "b" * 5000, "c" * 4090]
        ragged = torch.nested.nested_tensor([torch.arange(n) for n in (3, 600, 512)], layout=torch.jagged)
        data: dict[str, Any] = {
            "ragged": ragged,
            "dense": torch.rand(3, 2000),
            "text": NonTensorStack(*text),
            "one": torch.arange(3),
        }
        tq.kv_batch_put(["a", "b", "c"], "p", TensorDict(data, batch_size=[3]))
        info = unit(tq)
        assert info.disk_cells == 2 + 3 + 1
        assert info.disk_used_bytes == 8 * (600 + 512) + 3 * 8000 + 5000
        assert info.memory_used_bytes == 8 * 3 + 1 + 4090 + 3 * 8
        got = tq.kv_batch_get(["c", "a", "b"], "p")
        assert torch.equal(got["dense"].to_padded_tensor(0.0), data["dense"][[2, 0, 1]])
        assert [row.tolist() for row in got["ragged"].unbind()] == [list(range(n)) for n in (512, 3, 600)]
        assert list(got["text"]) == [text[2], text[0], text[1]]
        assert got["one"].tolist() == [2, 0, 1]
        assert files(tmp_path)
        tq.kv_clear(["a", "b"], "p")
        assert unit(tq).disk_used_bytes == 8 * 512 + 8000

    def test_views_of_values_on_disk_keep_their_bytes(self, tq: Any) -> None:
        """A view outlives the value it shows."""
        value = torch.arange(100_000)
        tq.kv_put("a", "p", fields={"x": value})
        view = tq.kv_batch_get("a", "p", copy=False)["x"]
        tq.kv_clear("a", "p")
        tq.kv_put("b", "p", fields={"x": -value})
        assert torch.equal(view.values(), value)

    def test_a_put_that_fails_leaves_nothing(self, tq: Any, tmp_path: Path) -> None:
        """A parser that fails at the second field changes no byte, memory or disk."""
        tq.kv_put("a", "p", fields={"x": torch.arange(1000), "y": torch.arange(2)})
        before = unit(tq)

        def fail(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            if len(old) == 2:
                raise RuntimeError("no")
            return old + new

        with pytest.raises(RuntimeError, match="no"):
            tq.kv_update(
                "a", "p", {"x": torch.ones(1000, dtype=torch.int64), "y": torch.ones(2, dtype=torch.int64)}, fail
            )
        after = unit(tq)
        assert (after.disk_used_bytes, after.memory_used_bytes) == (before.disk_used_bytes, before.memory_used_bytes)
        assert torch.equal(tq.kv_batch_get("a", "p")["x"].values(), torch.arange(1000))

    def test_updates_of_one_value_on_disk_are_not_lost(self, tq: Any) -> None:
        """Fifty concurrent additions give fifty."""
        tq.kv_put("a", "p", fields={"x": torch.zeros(1000)})

        def add() -> None:
            for _ in range(10):
                tq.kv_update("a", "p", {"x": torch.ones(1000)}, "add")

        threads = [threading.Thread(target=add) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tq.kv_batch_get("a", "p")["x"].values().unique().tolist() == [50]


class TestLittleMemory:
    """A unit with a memory limit of one MiB and a disk."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return offload(tmp_path, memory_limit_bytes=MIB, put_wait_s=20)

    def test_values_larger_than_memory_go_to_disk(self, tq: Any) -> None:
        """They are put, read, updated and freed, with the limit held."""
        value = torch.arange(MIB)
        tq.kv_put("large", "p", fields={"x": value, "small": torch.arange(3)})
        info = unit(tq)
        assert (info.disk_used_bytes, info.memory_used_bytes) == (8 * MIB, 24)
        got = tq.kv_batch_get("large", "p")
        assert torch.equal(got["x"].values(), value)
        view = tq.kv_batch_get("large", "p", select_fields=["x"], copy=False)["x"]
        tq.kv_update("large", "p", {"x": value}, "add")
        assert torch.equal(view.values(), value)
        assert torch.equal(tq.kv_batch_get("large", "p")["x"].values(), 2 * value)
        assert unit(tq).memory_used_bytes <= MIB

    def test_eight_clients_find_what_they_wrote_while_cells_move(self, tq: Any) -> None:
        """Twelve times more than memory: every value is read exactly, by threads that put, get, update and clear."""
        wrong: list[Any] = []

        def work(number: int) -> None:
            last: dict[str, int] = {}
            for step in range(60):
                key = f"{number}-{step * 7 % 12}"
                if step % 6 == 5 and key in last:
                    tq.kv_clear(key, f"p{number}")
                    del last[key]
                elif step % 4 == 3 and key in last:
                    tq.kv_update(key, f"p{number}", {"x": torch.full((16_384,), 1)}, "add")
                    last[key] += 1
                else:
                    tq.kv_put(key, f"p{number}", fields={"x": torch.full((16_384,), step)})
                    last[key] = step
                if last and step % 3 == 0:
                    seen = next(iter(last))
                    got = tq.kv_batch_get(seen, f"p{number}")["x"].values()
                    if got.shape != (16_384,) or not (got == last[seen]).all():
                        wrong.append((seen, last[seen], got))
            for key, want in last.items():
                got = tq.kv_batch_get(key, f"p{number}")["x"].values()
                if got.shape != (16_384,) or not (got == want).all():
                    wrong.append((key, want, got))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert unit(tq).memory_used_bytes <= MIB
            time.sleep(0.01)
        assert not wrong
        info = unit(tq)
        assert info.spilled_bytes > 0
        for number in range(8):
            tq.get_client().clear_partition(f"p{number}")
        info = unit(tq)
        assert (info.memory_used_bytes, info.disk_used_bytes, info.disk_cells) == (0, 0, 0)

    def test_what_was_consumed_goes_first(self, tq: Any) -> None:
        """Cells of samples that the only task has fetched move to disk, although they were read last."""

        def put(name: str, rows: int) -> None:
            data = TensorDict({"x": torch.ones(rows, 16_384)}, batch_size=[rows])
            tq.kv_batch_put([f"{name}{n}" for n in range(rows)], "p", data)

        put("consumed", 6)
        tq.get_client().get_meta(["x"], 6, "p", task_name="train", mode="fetch")
        put("wanted", 8)
        tq.kv_batch_get([f"consumed{n}" for n in range(6)], "p")
        put("last", 2)
        until(lambda: unit(tq).disk_cells >= 5, "cells move until the low watermark is reached")
        tq.kv_clear([f"consumed{n}" for n in range(6)], "p")
        assert unit(tq).disk_cells == 0


class TestFullDisk:
    """A unit whose memory and disk both have a limit."""

    @pytest.fixture
    def conf(self, tmp_path: Path) -> dict[str, Any]:
        return offload(tmp_path, 1000, memory_limit_bytes=MIB, disk_limit_bytes=100_000, put_wait_s=0.2)

    def test_a_put_that_does_not_fit_says_why_and_a_clear_makes_room(self, tq: Any) -> None:
        """The error names what is used, the limit and the tier; nothing has changed; what is there can be read."""
        rows = TensorDict({"x": torch.ones(9, 10_000, dtype=torch.uint8)}, batch_size=[9])
        tq.kv_batch_put([str(n) for n in range(9)], "p", rows)
        with pytest.raises(
            errors.ResourceExhaustedError, match=r"unit disk: 20000 bytes needed, 90000 of 100000 used.*disk_limit"
        ):
            tq.kv_batch_put(
                ["a", "b"], "p", TensorDict({"x": torch.ones(2, 10_000, dtype=torch.uint8)}, batch_size=[2])
            )
        assert sorted(tq.kv_list("p")["p"]) == [str(n) for n in range(9)]
        assert unit(tq).disk_used_bytes == 90_000
        assert tq.kv_batch_get("8", "p")["x"].values().sum() == 10_000
        with pytest.raises(errors.ResourceExhaustedError, match="unit disk"):
            tq.kv_batch_update(["0", "1"], "p", rows[:2], "add")
        assert tq.kv_batch_get("0", "p")["x"].values().unique().tolist() == [1]
        tq.kv_clear(["0"], "p")
        tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 10_000, dtype=torch.uint8)}, batch_size=[2]))
        assert unit(tq).disk_used_bytes == 100_000


class TestFolders:
    """Whose folders are used, refused and removed."""

    def opened(self, path: Path) -> None:
        try:
            transfer_queue.init(offload(path, 10))
        finally:
            transfer_queue.close()

    def test_a_clean_end_leaves_the_folder_of_the_user_and_nothing_in_it(
        self, runtime_dir: Path, tmp_path: Path
    ) -> None:
        """Also with values that nobody has cleared, and beside files of somebody else."""
        (tmp_path / "mine.txt").write_text("keep")
        transfer_queue.init(offload(tmp_path, 10))
        transfer_queue.kv_put("a", "p", fields={"x": torch.arange(1000)})
        child = tmp_path / "transfer_queue_ssd_offload"
        (run,) = child.iterdir()
        assert [path.name for path in run.iterdir()] == ["unit-0"]
        assert os.stat(child).st_mode & 0o777 == 0o700
        transfer_queue.close()
        assert list(child.iterdir()) == []
        assert [path.name for path in files(tmp_path)] == ["mine.txt"]

    def test_a_path_that_is_a_file_is_refused(self, runtime_dir: Path, tmp_path: Path) -> None:
        """So is one below a file; the file stays."""
        file = tmp_path / "file"
        file.write_text("keep")
        for path in (file, file / "below"):
            with pytest.raises(ValueError, match=r"ssd_offload\.path.*not a directory"):
                self.opened(path)
        assert file.read_text() == "keep"

    def test_a_child_that_leads_elsewhere_is_refused(self, runtime_dir: Path, tmp_path: Path) -> None:
        """A symbolic link in the place of the folder of units is not followed."""
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "transfer_queue_ssd_offload").symlink_to(elsewhere)
        with pytest.raises(ValueError, match="symbolic link"):
            self.opened(tmp_path)
        assert list(elsewhere.iterdir()) == []

    def test_what_a_dead_process_has_left_is_removed_and_what_is_in_use_is_not(
        self, runtime_dir: Path, tmp_path: Path, nursery: Any
    ) -> None:
        """A new session on the same path gives the space of killed ones back."""
        live, dead = nursery.start(hold, str(tmp_path), "live"), nursery.start(hold, str(tmp_path), "dead")
        assert live.recv() == dead.recv() == "open"
        dead.signal(signal.SIGKILL)
        dead.wait()
        child = tmp_path / "transfer_queue_ssd_offload"
        assert len(list(child.iterdir())) == 2
        old = time.time() - 120
        for run in child.iterdir():
            os.utime(run, (old, old))
        transfer_queue.init(offload(tmp_path, 10))
        try:
            assert len(list(child.iterdir())) == 2, "the live one and this one"
            live.send("read")
            assert live.recv() == 999
        finally:
            transfer_queue.close()
        live.send("end")
        assert live.result() is None
        assert list(child.iterdir()) == []


def hold(line: Any, path: str, namespace: str) -> None:
    """Hold a session with a value on disk."""
    import torch

    import transfer_queue as tq

    section = {"num_data_storage_units": 1, "ssd_offload": {"enabled": True, "path": path, "threshold_bytes": 10}}
    tq.init({"namespace": namespace, "backend": {"SimpleStorage": section}})
    tq.kv_put("a", "p", fields={"x": torch.arange(1000)})
    line.send("open")
    while line.recv() == "read":
        line.send(int(tq.kv_batch_get("a", "p")["x"].values()[-1]))
    tq.close()
