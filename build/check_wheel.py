"""Checks a wheel that was built for other machines: ``python build/check_wheel.py WHEEL...``.

Its library needs nothing but libc, no newer one than the tag says, shows the functions of ``capi/tq.h`` and nothing
else, is for the machine of the tag and names no folder to look for others; and the wheel is at most LIMIT_BYTES large.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "transfer_queue/_core.so"
LIMIT_BYTES = 9 << 19
LIBC = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
MACHINES = {"x86_64": "X86-64", "aarch64": "AArch64"}


def output(*command: str | Path) -> str:
    """What a tool prints about a library; those of binutils read every machine's."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def exports() -> set[str]:
    """The functions of the header."""
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "capi" / "tq.h").read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b(tq_\w+)\(", header))


def faults_of_library(library: Path, tag: str) -> list[str]:
    """What is wrong with a library for a platform such as ``manylinux_2_28_x86_64``."""
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
    if match is None:
        return [f"{tag} is no platform of manylinux"]
    faults = []
    dynamic = output("readelf", "-dW", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    if foreign := [name for name in needed if not LIBC.fullmatch(name)]:
        faults.append(f"needs {', '.join(foreign)}")
    if re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic):
        faults.append("has a search path of its own, or code that is written to")
    shown = {line.split()[-1].partition("@")[0] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    if shown != exports():
        faults.append(f"shows {sorted(shown - exports())}, lacks {sorted(exports() - shown)}")
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", output("readelf", "-VW", library))
    newest = max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
    if newest > (int(match[1]), int(match[2])):
        faults.append(f"needs glibc {newest[0]}.{newest[1]}")
    if MACHINES.get(match[3], match[3]) not in output("readelf", "-hW", library):
        faults.append(f"is not for {match[3]}")
    return faults


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    found = []
    *_, python, abi, tag = wheel.stem.split("-")
    if (python, abi) != ("py3", "none"):
        found.append(f"is for {python}-{abi}, want py3-none")
    if (size := wheel.stat().st_size) > LIMIT_BYTES:
        found.append(f"has {size:,} bytes, limit {LIMIT_BYTES:,}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        found += faults_of_library(Path(archive.extract(LIBRARY, folder)), tag)
    return found


def main() -> int:
    """Check the wheels that are named; returns the exit status."""
    status = 0
    for name in sys.argv[1:]:
        wheel = Path(name)
        for fault in (wrong := faults(wheel)):
            print(f"{wheel.name}: {fault}", file=sys.stderr)
        if wrong:
            status = 1
        else:
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, ok")
    return status


if __name__ == "__main__":
    sys.exit(main())
