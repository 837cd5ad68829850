"""Programs that attach to a session of another host, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Attaches once after the other, as the lines of its input say, and tells what came of it.
_ATTACH = """
import json, os, sys, transfer_queue as tq
for line in sys.stdin:
    conf, environment = json.loads(line)
    for name in ("TQ_TOKEN", "TQ_TOKEN_FILE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        tq.init({"client": {"timeout_s": 3}, **conf})
        print(json.dumps(["", str(tq.kv_list())]))
        tq.close()
    except Exception as error:
        kinds = [kind.__name__ for kind in (ValueError, ConnectionError, RuntimeError) if isinstance(error, kind)]
        print(json.dumps([kinds[0], str(error)]))
"""


def attach(attempts: list[tuple[dict[str, Any], dict[str, str]]], **environment: str) -> list[str]:
    """What each attempt, a configuration and variables of the environment, printed or was told."""
    done = subprocess.run(
        [sys.executable, "-c", _ATTACH],
        input="".join(json.dumps(attempt) + "\n" for attempt in attempts),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [": ".join(json.loads(line)) for line in done.stdout.splitlines()]
