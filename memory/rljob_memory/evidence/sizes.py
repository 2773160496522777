"""Sizes as programs print them, and bytes as people read them."""

from __future__ import annotations

from rljob_memory.estimate import GIB, MIB

KIB = 1 << 10
TIB = 1 << 40

SIZE = r"(?:\d{1,15}(?:\.\d{1,6})? ?(?:bytes|[KMGT]i?B|B))"
"""Pattern of a size with its unit: `18.91 GiB`, `970 MiB`, `512 bytes`, `12.18GB`."""

_UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_IMPOSSIBLE_BYTES = 1 << 50


def size_bytes(text: str) -> int | None:
    """Bytes of a text that matches `SIZE`; None where no machine has as much.

    `GB` counts as GiB: torch, Ray and the trainers divide by 1024³ and print either. NVML's 17179869184 GiB, its way
    to say that it does not know, is one of the impossible ones.
    """
    number = text.rstrip("bytesKMGTi B")
    unit = text[len(number) :].strip()
    if len(unit) == 2 and unit.endswith("B"):
        unit = f"{unit[0]}iB"
    size = round(float(number) * _UNITS[unit])
    return size if size < _IMPOSSIBLE_BYTES else None


def human_bytes(size: int) -> str:
    """`18.91 GiB`, `970 MiB`, `12 KiB`, `7 bytes`."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / KIB:.0f} KiB" if size >= KIB else f"{size} bytes"
