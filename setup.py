"""Builds the Go core into ``transfer_queue/_core.so``. Everything else about the package is in ``pyproject.toml``.

The library is loaded with ctypes and knows nothing of CPython: one wheel ``py3-none-<platform>`` serves every Python.
It is built in ``.out/core`` and put in place by rename: a process that has the old one loaded keeps its image.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, PlatformError

ROOT = Path(__file__).resolve().parent
OUT = ROOT / ".out"
LIBRARY = "transfer_queue/_core.so"
NOTICES = "transfer_queue/_core_licenses.txt"
TAGS = "netgo,osusergo"
EXPORTS = ROOT / "build" / "exports.map"

# Packages that run when a process starts or connects, or call the system: without inlining the wheel is 4 % smaller.
COLD = ("crypto/...", "encoding/json", "encoding/asn1", "encoding/pem", "math/big", "net", "vendor/...")

# Where the installers of go.dev put Go, which a login shell often has in PATH and a build started by a tool does not.
GO_FOLDERS = ("/usr/local/go/bin",)


def wanted_go() -> tuple[int, ...]:
    """The version in the ``go`` line of go.mod."""
    line = re.search(r"^go (\d+(?:\.\d+)*)$", (ROOT / "go.mod").read_text(), re.MULTILINE)
    if line is None:
        raise PlatformError("go.mod: no line `go <version>`")
    return tuple(int(part) for part in line[1].split("."))


def find_go() -> str:
    """The first Go of PATH and GO_FOLDERS that is new enough."""
    wanted = wanted_go()
    wanted_text = ".".join(map(str, wanted))
    found = []
    for folder in (*os.environ.get("PATH", os.defpath).split(os.pathsep), *GO_FOLDERS):
        go = shutil.which("go", path=folder) if folder else None
        if go is None:
            continue
        # In ROOT, so that a Go that may fetch the toolchain which go.mod names answers with that one's version.
        text = subprocess.run([go, "version"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
        version = re.search(r"\bgo(\d+(?:\.\d+)*)", text)
        if version and tuple(int(part) for part in version[1].split(".")) >= wanted:
            return go
        found.append(f"{go} is {version[1] if version else 'not a Go that answers'}")
    have = "; ".join(dict.fromkeys(found)) or "there is none in PATH or " + ", ".join(GO_FOLDERS)
    raise PlatformError(
        f"building TransferQueue needs Go {wanted_text} or newer, but {have}. Install it from https://go.dev/dl/, or a "
        "wheel of TransferQueue, which needs no Go."
    )


def check_compiler(go: str, env: dict[str, str]) -> None:
    """Raises unless the C compiler that Go will call exists; Go itself reports that as an error in runtime/cgo."""
    command = subprocess.run([go, "env", "CC"], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    name = (command.split() or ["gcc"])[0]
    if shutil.which(name, path=env.get("PATH")) is None:
        raise PlatformError(
            f"building TransferQueue needs a C compiler, but there is no {name} in PATH. Install one (Debian, Ubuntu: "
            "apt-get install gcc libc6-dev), or a wheel of TransferQueue, which needs no compiler."
        )


def libzmq(env: dict[str, str]) -> str:
    """Lets cgo find libzmq and returns the build tags of the core with it, or without where there is none.

    TQ_LIBZMQ is the folder of a static one (what env.sh sets), ``system``, or ``none``. Without it the static one is
    made from its pinned source, see build/libzmq.py, or else the system's is taken.
    """
    choice = env.get("TQ_LIBZMQ", "")
    if not choice:
        made = subprocess.run(
            [sys.executable, "build/libzmq.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        choice = made.stdout.strip() if made.returncode == 0 else "system"
    if choice == "system":
        probe = ["g++", "-x", "c++", "-", "-o", os.devnull, "-lzmq"]
        source = "#include <zmq.h>\nint main() { return zmq_errno(); }\n"
        if subprocess.run(probe, env=env, input=source, text=True, capture_output=True, check=False).returncode != 0:
            print("warning: built without libzmq: sessions serve one host only. It needs g++, and pip or libzmq3-dev.")
            choice = "none"
    if choice == "none":
        return TAGS
    env["TQ_LIBZMQ"], env["PKG_CONFIG"] = choice, str(ROOT / "build" / "pkg-config")
    key = f"-DTQ_LIBZMQ_KEY=0x{choice.rpartition('-')[2]}" if choice != "system" else "-DTQ_LIBZMQ_KEY=0"
    if key not in env.get("CGO_CFLAGS", ""):  # Go's cache does not see what pkg-config prints
        env["CGO_CFLAGS"] = f"{env.get('CGO_CFLAGS', '-g -O2')} {key}"
    return f"{TAGS},zmq"


def link_flags() -> str:
    """Go splits -extldflags itself, hence the quotes around what holds a path."""
    external = [
        f'"-Wl,--version-script={EXPORTS}"',
        "-Wl,--gc-sections",
        "-Wl,-s",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,_core.so",
        "-Wl,-z,now",
        "-Wl,-z,defs",
        "-static-libgcc",
    ]
    return f"-s -w '-extldflags={' '.join(external)}'"


def build_core() -> Path:
    """Builds the library, or finds it up to date, and returns where it lies."""
    folder = OUT / "core" / os.environ.get("GOARCH", "")  # a build for others is not in the way of that for here
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "_core.so"
    env = {**os.environ, "CGO_ENABLED": "1", "GOWORK": "off"}
    go = find_go()
    check_compiler(go, env)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # go build does not replace its output in one step
        if library.exists() and library.stat().st_mtime < EXPORTS.stat().st_mtime:
            library.unlink()  # Go does not see that what the linker reads has changed
        command = [go, "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false", f"-tags={libzmq(env)}"]
        command += [f"-gcflags={package}=-l" for package in COLD]
        command += ["-ldflags=" + link_flags(), "-o", str(library), "./capi"]
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        if status != 0:
            raise ExecError(f"go build ./capi: exit status {status}, see the lines above")
    return library


def licences(name: str, folder: Path) -> list[Path]:
    """The licence files of a module or of Go itself, which Debian keeps in another place."""
    files = sorted(path for path in folder.glob("LICEN[CS]E*") if path.is_file())
    if name == "Go" and not files:
        files = sorted(Path("/usr/share/doc").glob("golang-*-go/copyright"))
    return files


def write_notices(target: Path) -> None:
    """Collects the licences of Go, of the modules that are linked into the library, and of a static libzmq."""
    go, env = find_go(), dict(os.environ)
    tags = libzmq(env)
    template = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}{{end}}{{end}}"
    query = [go, "list", "-deps", f"-tags={tags}", "-f", template, "./capi"]
    modules = subprocess.run(query, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    goroot = subprocess.run([go, "env", "GOROOT"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    parts = []
    for line in [f"Go\t{goroot}", *sorted({line for line in modules if line})]:
        name, _, folder = line.partition("\t")
        texts = (path.read_text(errors="replace") for path in licences(name, Path(folder)))
        parts += [f"{name}\n{'=' * len(name)}\n\n{text.strip()}\n" for text in texts]
    if os.path.isabs(env.get("TQ_LIBZMQ", "")):
        texts = (Path(env["TQ_LIBZMQ"], name).read_text() for name in ("COPYING.LESSER", "COPYING"))
        parts.append("libzmq 4.3.4\n============\n\n" + "\n\n".join(texts))
    target.write_text("\n\n".join(parts))


def put(source: Path, target: Path) -> None:
    """Replaces target by a copy of source in one step, and does nothing when they are equal."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.so")
    shutil.copyfile(source, partial)
    partial.chmod(0o755)
    os.replace(partial, target)


# Platforms that pip has names for on every host, by their oldest glibc.
POLICIES = ((2, 17), (2, 28))

# Number of the machine in the head of an ELF file, and its name in a tag.
MACHINES = {62: "x86_64", 183: "aarch64"}


def manylinux(library: Path, platform: str) -> str:
    """The platform tag of a library: the oldest glibc that has its symbols, or platform itself without glibc.

    The machine is the library's, which may be built for another one than this.
    """
    data = library.read_bytes()
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", data)
    if not platform.startswith("linux_") or not versions:
        return platform
    oldest = max((int(major), int(minor)) for major, minor in versions)
    major, minor = next((policy for policy in POLICIES if policy >= oldest), oldest)
    machine = MACHINES.get(int.from_bytes(data[18:20], "little"), platform.removeprefix("linux_"))
    return f"manylinux_{major}_{minor}_{machine}"


class BuildCore(build_ext):
    """build_ext with Go in the place of the C compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        return LIBRARY

    def build_extension(self, ext: Extension) -> None:
        put(build_core(), Path(self.build_lib, LIBRARY))
        if not self.editable_mode:
            write_notices(Path(self.build_lib, NOTICES))

    def copy_extensions_to_source(self) -> None:
        put(Path(self.build_lib, LIBRARY), ROOT / "python" / LIBRARY)


class CoreWheel(bdist_wheel):
    """A wheel for every Python 3 of one platform."""

    def run(self) -> None:
        # setuptools only adds to this folder: a module deleted since the last build would be shipped again.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = Path(self.get_finalized_command("build").build_lib, LIBRARY)
        if not self.plat_name_supplied and library.exists():
            platform = manylinux(library, platform)
        return "py3", "none", platform


if __name__ == "__main__":
    os.chdir(ROOT)
    OUT.mkdir(exist_ok=True)  # egg_info wants its folder to exist
    setup(
        ext_modules=[Extension("transfer_queue._core", [])],
        cmdclass={"build_ext": BuildCore, "bdist_wheel": CoreWheel},
    )
