"""Writes small.txt: checksums of torch's conversions between float32 and the small floating point types.

Run it with the Python whose torch is the reference: ``python generate.py > small.txt``. Each line is

    name decode CRC      float32 bits of all codes in order, every NaN as 0x7fc00000
    name encode TOP CRC  codes of the float32 values whose bits 28 to 31 are TOP (hexadecimal), whose bits 24 to 27
                         count up, and whose lower bits are those of `patterns`; every NaN as the type's first NaN code

All numbers are little endian.
"""

import zlib

import numpy as np
import torch

TYPES = {
    "float16": (np.uint16, 0x7C01),
    "bfloat16": (np.uint16, 0x7F81),
    "float8_e4m3fn": (np.uint8, 0x7F),
    "float8_e5m2": (np.uint8, 0x7D),
    "float8_e4m3fnuz": (np.uint8, 0x80),
    "float8_e5m2fnuz": (np.uint8, 0x80),
    "float8_e8m0fnu": (np.uint8, 0xFF),
}


def patterns(name: str) -> np.ndarray:
    """Lower 24 bits that meet every way of rounding: all bits 16 to 23, and below them each tie with its neighbours."""
    upper = np.arange(256, dtype=np.uint32) << 16
    lower = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF}
    if name == "float16":  # keeps three more bits than the upper half holds
        for bit in range(16):
            lower |= {1 << bit, (1 << bit) - 1, (1 << bit) + 1, 0x10000 - (1 << bit), 3 << bit & 0xFFFF}
            lower |= {high << 13 | 1 << bit for high in range(8)} | {high << 13 for high in range(8)}
    return (upper[:, None] | np.array(sorted(lower), dtype=np.uint32)).reshape(-1)


def main() -> None:
    """Prints the lines of all types."""
    for name, (code, nan) in TYPES.items():
        dtype = getattr(torch, name)
        codes = torch.from_numpy(np.arange(np.iinfo(code).max + 1).astype(code)).view(dtype)
        values = codes.float().numpy()
        bits = values.view(np.uint32).copy()
        bits[np.isnan(values)] = 0x7FC00000
        print(name, "decode", f"{zlib.crc32(bits.tobytes()):08x}")
        for top in range(16):
            heads = np.arange(top << 4, (top + 1) << 4, dtype=np.uint32) << 24
            floats = torch.from_numpy((heads[:, None] | patterns(name)).reshape(-1).view(np.float32))
            made = floats.to(dtype)
            out = made.view(torch.uint8 if code is np.uint8 else torch.uint16).numpy().copy()
            out[np.isnan(made.float().numpy())] = nan
            print(name, "encode", f"{top:x}", f"{zlib.crc32(out.tobytes()):08x}")


if __name__ == "__main__":
    main()
