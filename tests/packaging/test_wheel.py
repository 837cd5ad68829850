"""A wheel built from the files that git does not ignore, and used without Go, compiler and torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(300)  # a build with cold caches, three environments

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

LOAD = """
import ctypes, importlib.metadata, importlib.util, pathlib, shutil
assert not shutil.which("go") and not shutil.which("gcc") and not shutil.which("cc")
folder = pathlib.Path(importlib.util.find_spec("transfer_queue").origin).parent
core = ctypes.CDLL(str(folder / "_core.so"))
core.tq_abi_version.restype = ctypes.c_uint32
print(importlib.metadata.version("TransferQueue"), core.tq_abi_version())
"""


def works(python: Path, version: str) -> bool:
    code = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == version


def pythons() -> dict[str, Path]:
    """A working interpreter of each version that this machine has."""
    found: dict[str, Path] = {}
    for version in VERSIONS:
        candidates = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        candidates += [Path(path) for path in [shutil.which(f"python{version}")] if path]
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            candidates.append(Path(sys.executable))
        for candidate in candidates:
            if works(candidate, version):
                found[version] = candidate
                break
    return found


PYTHONS = pythons()


def copy_sources(root: Path, target: Path) -> None:
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "-co",
        "--exclude-standard",
    ]  # the checkout may belong to another user
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    copy_sources(root, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def setup_py(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tq_setup", root / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in message}


def version_of(root: Path) -> str:
    return (root / "python/transfer_queue/version/version").read_text().strip()


def test_tag_serves_every_python_of_the_platform(wheel: Path) -> None:
    name, _, python, abi, platform = wheel.stem.split("-")
    assert name == "transferqueue"
    assert (python, abi) == ("py3", "none")
    assert re.fullmatch(r"(manylinux_\d+_\d+|linux)_\w+", platform)


def test_tag_names_the_newest_glibc_symbol(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("transfer_queue/_core.so", tmp_path)
    text = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True).stdout
    newest = max((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", text))
    tag = re.search(r"-manylinux_(\d+)_(\d+)_", wheel.name)
    assert tag is not None
    assert newest <= (int(tag[1]), int(tag[2])) <= max(newest, (2, 28))


def test_holds_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"transfer_queue"}
    tracked = {str(path.relative_to(source / "python")) for path in (source / "python").rglob("*.py")}
    data = ("_core.so", "_core_licenses.txt", "py.typed", "config.yaml", "version/version")
    assert tracked | {f"transfer_queue/{name}" for name in data} <= set(names)
    assert not [name for name in names if name.endswith((".go", ".h", ".c", ".pyc"))]


def test_passes_the_check_of_wheels_that_are_given_away(wheel: Path, root: Path) -> None:
    command = [sys.executable, root / "build" / "check_wheel.py", wheel]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith(wheel.name)


def test_that_check_names_what_is_wrong(wheel: Path, root: Path, tmp_path: Path) -> None:
    library = tmp_path / "transfer_queue" / "_core.so"
    library.parent.mkdir()
    source = 'extern "C" int other() { return 0; }'
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,/elsewhere", "-x", "c++", "-", "-o", library]
    subprocess.run(["g++", *flags], input=source, text=True, check=True)
    foreign = tmp_path / "transferqueue-1-cp311-cp311-manylinux_2_17_aarch64.whl"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.write(library, "transfer_queue/_core.so")
        archive.writestr("ballast", bytes(5 << 20))
    renamed = tmp_path / re.sub(r"manylinux_\d+_\d+_\w+$", "manylinux_2_5_aarch64", wheel.stem)
    renamed = renamed.with_name(renamed.name + ".whl")
    shutil.copy(wheel, renamed)
    command = [sys.executable, root / "build" / "check_wheel.py", foreign, renamed]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    for fault in ("needs glibc 2.", "is not for aarch64"):
        assert f"{renamed.name}: {fault}" in checked.stderr
    faults = ("is for cp311-cp311", "has 5,", "needs libstdc++.so.6", "has a search path", "shows ['other'], lacks [")
    for fault in faults:
        assert f"{foreign.name}: {fault}" in checked.stderr


def test_metadata(wheel: Path, root: Path) -> None:
    data = metadata(wheel)
    assert data["Name"] == ["TransferQueue"]
    assert data["Version"] == [version_of(root)]
    assert data["Requires-Python"] == [">=3.10"]
    assert data["License-Expression"] == ["Apache-2.0"]
    assert sorted(data["Requires-Dist"]) == ["cloudpickle", "msgspec", "numpy", "omegaconf", "tensordict", "torch"]


def test_licences_of_what_is_linked_in(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("transfer_queue/_core_licenses.txt").decode()
    assert "github.com/vmihailenco/msgpack/v5 v" in text
    assert re.search(r"^Go\n==\n.*The Go Authors", text, re.MULTILINE | re.DOTALL)


def test_a_module_deleted_since_the_last_build_is_not_shipped(wheel: Path, source: Path, tmp_path: Path) -> None:
    (gone,) = source.glob(".out/py/lib*/transfer_queue/__init__.py")
    gone.with_name("gone.py").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, capture_output=True, check=True)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        assert "transfer_queue/gone.py" not in archive.namelist()


def test_some_python_is_found() -> None:
    assert PYTHONS


@pytest.mark.parametrize("version", PYTHONS)
def test_installed_library_loads_without_go_and_compiler(version: str, wheel: Path, root: Path, tmp_path: Path) -> None:
    subprocess.run([PYTHONS[version], "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    env = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    install = [sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, env={**os.environ, "HOME": str(tmp_path)}, check=True)
    loaded = subprocess.run([python, "-c", LOAD], env=env, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == [version_of(root), "2"]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (None, "there is none in PATH"),
        ("go version go1.19.8 linux/amd64", "is 1.19.8"),
        ("nonsense", "is not a Go that answers"),
    ],
)
def test_missing_or_old_go_is_named(
    answer: str | None, wanted: str, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if answer is not None:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_py, "GO_FOLDERS", (str(tmp_path / "none"),))
    minimum = ".".join(map(str, setup_py.wanted_go()))
    with pytest.raises(setup_py.PlatformError, match=re.escape(wanted)) as caught:
        setup_py.find_go()
    assert f"needs Go {minimum} or newer" in str(caught.value)


def test_missing_compiler_is_named(setup_py: ModuleType, tmp_path: Path) -> None:
    go = setup_py.find_go()
    with pytest.raises(setup_py.PlatformError, match="there is no gcc in PATH"):
        setup_py.check_compiler(go, {"PATH": str(tmp_path), "HOME": str(tmp_path), "CC": "gcc"})


def test_platform_without_glibc_is_kept(setup_py: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "_core.so"
    library.write_bytes(b"\x7fELF no versions")
    assert setup_py.manylinux(library, "linux_x86_64") == "linux_x86_64"
    library.write_bytes(b"\x7fELF".ljust(20) + b"\0GLIBC_2.3.4\0GLIBC_2.34\0GLIBC_2.2.5\0")
    assert setup_py.manylinux(library, "linux_aarch64") == "manylinux_2_34_aarch64"


@pytest.mark.parametrize(
    ("newest", "machine", "tag"),
    [
        (b"2.2.5", 62, "2_17_x86_64"),
        (b"2.17", 62, "2_17_x86_64"),
        (b"2.25", 183, "2_28_aarch64"),
        (b"2.28", 62, "2_28_x86_64"),
        (b"2.29", 183, "2_29_aarch64"),
    ],
)
def test_tag_is_a_platform_that_pip_knows_and_of_the_library_itself(
    newest: bytes, machine: int, tag: str, setup_py: ModuleType, tmp_path: Path
) -> None:
    library = tmp_path / "_core.so"
    library.write_bytes(b"\x7fELF".ljust(18) + bytes([machine, 0]) + b"\0GLIBC_2.2.5\0GLIBC_" + newest + b"\0")
    assert setup_py.manylinux(library, "linux_x86_64") == f"manylinux_{tag}"
