"""Units of memory; sizes read from the output of programs and formatted for messages."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

SIZE = r"(?:\d{1,15}(?:\.\d{1,6})? ?(?:bytes|[KMGT]i?B|B))"
"""Pattern of a size with its unit: `18.91 GiB`, `970 MiB`, `512 bytes`, `12.18GB`."""

_UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_UNITS |= {"K": KIB, "M": MIB, "G": GIB, "T": TIB}
_IMPOSSIBLE_BYTES = 1 << 50


def size_bytes(text: str) -> int | None:
    """Bytes of a number and its unit, such as `SIZE` matches, `16G` or `1,024 MiB`; None if it has another form, or no
    machine has that much.

    `GB` counts as GiB: torch, Ray and the trainers divide by 1024³ and print either. NVML reports an
    unknown size as 17179869184 GiB, which is None here.
    """
    number = text.rstrip("bytesKMGTi B")
    unit = text[len(number) :].strip()
    if len(unit) == 2 and unit.endswith("B"):
        unit = f"{unit[0]}iB"
    try:
        size = round(float(number.replace(",", "")) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        return None
    return size if size < _IMPOSSIBLE_BYTES else None


def human_bytes(size: int) -> str:
    """`18.91 GiB`, `970 MiB`, `12 KiB`, `7 bytes`."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / KIB:.0f} KiB" if size >= KIB else f"{size} bytes"
