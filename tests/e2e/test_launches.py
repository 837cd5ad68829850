"""Every way to start a process attaches: spawn, forkserver, subprocess, and what torchrun starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processes import program, until

# A training script as its users write it; run once, it starts the others.
_SCRIPT = """
import multiprocessing, os, subprocess, sys
import torch
import transfer_queue as tq


def put(name):
    conf = tq.init()
    tq.kv_put(name, "p", {"x": torch.full((3,), float(len(name)))}, tag={"rank": os.environ.get("RANK")})
    assert conf.mark == "the owner's", conf
    tq.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        put(sys.argv[1] + os.environ.get("RANK", ""))
        sys.exit(0)
    rank = subprocess.Popen(
        [sys.executable, __file__, "torchrun"], env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    )
    started = [multiprocessing.get_context(way).Process(target=put, args=(way,)) for way in ("spawn", "forkserver")]
    for process in started:
        process.start()
    put("script")
    for process in started:
        process.join()
        assert process.exitcode == 0
    assert rank.wait() == 0
    put("script again")
    print("done")
"""


def test_launches(runtime_dir: Path, tmp_path: Path) -> None:
    import transfer_queue as tq

    tq.init({"mark": "the owner's"})
    try:
        path = tmp_path / "train.py"
        path.write_text(_SCRIPT)
        with program(str(path)) as process:
            output, _ = process.communicate(timeout=170)
        assert process.returncode == 0, output
        want = ["torchrun1", "spawn", "forkserver", "script", "script again"]
        listed = tq.kv_list("p")["p"]
        assert sorted(listed) == sorted(want)
        assert listed["torchrun1"] == {"rank": "1"}
        assert tq.kv_batch_get(want, "p")["x"].values().tolist() == [float(len(n)) for n in want for _ in range(3)]
        until(lambda: _clients() == 1, "all have left")
    finally:
        tq.close()


def _clients() -> Any:
    from transfer_queue import _calls, _requests, _session

    session = _session.current()
    return _calls.run(session.handle, _requests.summary(session))[3]


def test_an_adapter_that_is_shipped_to_a_process_that_never_called_init(tq: Any, nursery: Any) -> None:
    """It keeps the client of another process, or looks functions up when it is called (clients.md 30)."""

    class Adapter:
        def __init__(self, client: Any) -> None:
            self.client = client

        def use(self) -> Any:
            import transfer_queue as tq

            return self.client.get_partition_list(), tq.kv_list("p"), tq.get_client().get_partition_list()

    tq.kv_put("a", "p", tag={})
    adapter = Adapter(tq.get_client())
    assert nursery.start(lambda line, adapter: adapter.use(), adapter).result() == (["p"], {"p": {"a": {}}}, ["p"])
