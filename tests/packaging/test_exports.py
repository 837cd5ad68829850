"""The shared library shows exactly what capi/tq.h declares, and needs nothing but libc."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

LIBC = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")


@pytest.fixture(scope="module")
def library() -> Path:
    spec = importlib.util.find_spec("transfer_queue")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "_core.so"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic(library: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.*)\]", output("readelf", "-dW", library))


def test_exports_are_the_functions_of_the_header(library: Path, root: Path) -> None:
    header = re.sub(r"/\*.*?\*/", "", (root / "capi" / "tq.h").read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\b(tq_\w+)\(", header))
    shown = {line.split()[-1].partition("@")[0] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    assert "tq_abi_version" in declared
    assert shown == declared


def test_needs_only_libc(library: Path) -> None:
    needed = dynamic(library, "NEEDED")
    assert needed
    assert [name for name in needed if not LIBC.fullmatch(name)] == []


def test_soname_names_no_folder_and_no_version(library: Path) -> None:
    assert dynamic(library, "SONAME") == ["_core.so"]
    assert dynamic(library, "RUNPATH") + dynamic(library, "RPATH") == []


def test_code_is_never_written_to_and_stack_never_executed(library: Path) -> None:
    assert "TEXTREL" not in output("readelf", "-dW", library)
    (stack,) = re.findall(r"GNU_STACK.*", output("readelf", "-lW", library))
    assert "RWE" not in stack


def test_holds_no_path_of_the_machine_that_built_it(library: Path, root: Path) -> None:
    data = library.read_bytes()
    assert str(root).encode() not in data
    assert str(Path.home()).encode() + b"/go" not in data
