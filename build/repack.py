"""Packs wheels anew, smaller: the same files in the same order, compressed harder.

``python build/repack.py WHEEL...`` needs zopfli, which finds 4 % more than zlib's best in the core and takes half a minute for
it. What it writes is plain deflate, which every installer reads.
"""

from __future__ import annotations

import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

LARGE = 64 << 10  # from here on time is spent on a file


def deflate(content: bytes) -> bytes:
    """The content as raw deflate, by zlib."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def deflate_hard(content: bytes) -> bytes:
    """The content as raw deflate, by zopfli where it is large."""
    if len(content) < LARGE:
        return deflate(content)
    import zopfli.zlib  # type: ignore[import-not-found]  # noqa: PLC0415

    packed: bytes = zopfli.zlib.compress(content, numiterations=1)
    return packed[2:-4]  # without the head and the sum of the format zlib


def entry(info: zipfile.ZipInfo, packed: bytes) -> tuple[bytes, bytes]:
    """What both headers of a file have in common, and its name."""
    year, month, day, hour, minute, second = info.date_time
    date, time = (year - 1980) << 9 | month << 5 | day, hour << 11 | minute << 5 | second // 2
    name = info.filename.encode()
    flags = 0 if info.filename.isascii() else 0x800
    sizes = (info.CRC, len(packed), info.file_size, len(name), 0)
    return struct.pack("<5H3L2H", 20, flags, zipfile.ZIP_DEFLATED, time, date, *sizes), name


def repack(wheel: Path, pack: Callable[[bytes], bytes]) -> None:
    """Replace a wheel by one whose files were compressed by ``pack``, in one step."""
    body, index = bytearray(), bytearray()
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
        for info in infos:
            packed = pack(archive.read(info))
            common, name = entry(info, packed)
            rest = struct.pack("<3H2L", 0, 0, info.internal_attr, info.external_attr, len(body))
            index += b"PK\1\2" + struct.pack("<H", info.create_system << 8 | 20) + common + rest + name
            body += b"PK\3\4" + common + name + packed
    end = struct.pack("<4H2LH", 0, 0, len(infos), len(infos), len(index), len(body), 0)
    smaller = wheel.with_suffix(".new")
    smaller.write_bytes(body + index + b"PK\5\6" + end)
    with zipfile.ZipFile(smaller) as made, zipfile.ZipFile(wheel) as archive:
        if any(made.read(info.filename) != archive.read(info) for info in infos):
            raise ValueError(f"{wheel.name}: the new archive differs")
    os.replace(smaller, wheel)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        repack(Path(argument), deflate_hard)
