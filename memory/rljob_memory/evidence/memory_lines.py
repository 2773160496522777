"""Memory figures that programs print as they run: allocated and reserved memory, whatever the program calls them.

Read from the sources of verl, AReaL, slime, NeMo-RL, Megatron, DeepSpeed, Fast-LLM and axolotl. A line counts if it
names allocated memory with a unit. Reserved memory alone does not show if tensors or the allocator's cache grow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, KIB, MIB

_DEEPSPEED = re.compile(r"\bMA (\d{1,9}(?:\.\d{1,6})?) GB\s+Max_MA [\d.]{1,16} GB\s+CA (\d{1,9}(?:\.\d{1,6})?) GB")
_NUMBER = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,6})?|\d{1,15}(?:\.\d{1,6})?)"
_UNIT = r"(?:[KMG]i?B|bytes|[kmg]i?b)"
_KEY_FIRST = re.compile(
    # `actor/perf/max_memory_allocated_gb:12.3`, `allocated: 3.75 GiB`, `| allocated: 3.1`, `'reserved_GB': 4`
    r"(?P<before>[\w/.() -]{0,40}?)(?<![A-Za-z])(?P<what>allocated|alloc\b|reserved|cached)(?P<after>[\w ()/]{0,20}?)"
    rf"['\"]?\s{{0,4}}[:=]?\s{{0,4}}['\"]?{_NUMBER}\s?(?P<unit>{_UNIT}\b)?"
)
_NUMBER_FIRST = re.compile(
    rf"(?<![=\d.,])(?<![\w'\"]:)(?<!= ){_NUMBER}\s?(?P<unit>{_UNIT}) (?P<before>(?:max |peak )?)"
    r"(?P<what>allocated|reserved|cached)\b(?! ?[=:])"
)
_PLAIN_BYTES = re.compile(
    r"\b(?:CUDA|GPU|cuda|gpu) mem(?:ory)?\b"
    r"(?!.*(?:total|free|limit|avail|reserv|cache|peak|max|capacity|util|budget))"
    r"[^:=]{0,60}[:=] {0,4}(?P<number>\d{8,14})\s*$",
    re.IGNORECASE,
)
"""`torch.cuda.memory_allocated()`, printed as it is: other sources of such numbers have units."""
_UNIT_IN_TEXT = re.compile(rf"[_( ]({_UNIT})\b\)?")
_PEAK = re.compile(r"max|peak", re.IGNORECASE)
_STEP = re.compile(r"\b(?:global_?step|step|iteration)s?[ :=#/]{1,3}(\d{1,9})\b|\bafter (\d{1,9}) iterations", re.I)
_WORD = re.compile(r"[A-Za-z][A-Za-z_]+")
_MOST_WORDS = 6
_FACTORS = {"k": KIB, "m": MIB, "g": GIB}


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The memory figures of one line."""

    place: str
    """Words before the figures: lines with the same ones were printed at the same point of the program's work."""

    sample: MemorySample


def memory_figures(text: str) -> MemoryFigures | None:
    """The figures in a line of a log; None if it names no allocated memory."""
    if match := _DEEPSPEED.search(text):
        return MemoryFigures("", _sample(text, round(float(match[1]) * GIB), round(float(match[2]) * GIB)))
    if match := _PLAIN_BYTES.search(text):
        words = _WORD.findall(text[: match.start("number")])[-_MOST_WORDS:]
        return MemoryFigures(" ".join(words), _sample(text, int(match["number"]), 0))
    if "lloc" not in text:
        return None
    for pattern in (_NUMBER_FIRST, _KEY_FIRST):
        sizes: dict[tuple[str, bool], int] = {}
        first = len(text)
        for match in pattern.finditer(text):
            size = _size(match, text)
            if size is None:
                continue
            what = "allocated" if match["what"].startswith("alloc") else "reserved"
            sizes.setdefault((what, bool(_PEAK.search(match["before"]))), size)
            first = min(first, match.start("what"), match.start("number"))
        if any(what == "allocated" for what, _ in sizes):
            break  # A number between two names belongs to the first or to the second, throughout the line.
    allocated = sizes.get(("allocated", False), sizes.get(("allocated", True)))
    if allocated is None:
        return None
    is_peak = ("allocated", False) not in sizes
    reserved = sizes.get(("reserved", is_peak), 0)
    words = _WORD.findall(text[:first])[-_MOST_WORDS:]
    return MemoryFigures(" ".join(words), _sample(text, allocated, reserved))


def _sample(text: str, allocated: int, reserved: int) -> MemorySample:
    found = _STEP.search(text)
    step = int(found[1] or found[2]) if found else None
    return MemorySample(step=step, allocated_bytes=allocated, reserved_bytes=reserved)


def _size(match: re.Match[str], text: str) -> int | None:
    """Bytes; None if neither the number, nor its name, nor the text before it has a unit. GB counts as GiB."""
    unit = match["unit"]
    if unit is None:
        named = _UNIT_IN_TEXT.findall(text[: match.start("number")])
        unit = named[-1] if named else None
    if unit is None:
        return None
    return round(float(match["number"].replace(",", "")) * _FACTORS.get(unit[0].lower(), 1))
