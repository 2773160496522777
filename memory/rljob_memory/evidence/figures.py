"""Reads memory figures of unknown programs by their names.

A figure is a name that speaks of memory, and a number next to it, with a unit on one of them: `memory: 12.30GiB`
(torchtitan), `Peak Mem. 45.3 GiB` (prime-rl), `max mem: 12345` (DETR, in MiB), `'memory(GiB)': 53.07` (ms-swift),
`"gpu_mem_gb": 45.2`, `VRAM 71.2/80 GB`, `1.2 GiB allocated`. Names of a limit, of free memory or of a share do not
count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import islice

from rljob_memory.evidence.signatures import pattern
from rljob_memory.sizes import GIB, KIB, MIB


class Measure(StrEnum):
    """The memory that a figure counts."""

    TENSORS = "memory in tensors"
    GPU = "GPU memory"
    """Tensors, memory that torch reserved, or memory that the driver reports: the name leaves it open."""
    RESERVED = "memory that torch reserved"
    HOST = "host memory"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a line, and its meaning."""

    start: int
    """Place of its name in the line."""
    size_bytes: int
    measure: Measure
    is_peak: bool


_NAME = re.compile(
    r"(?:(?<![A-Za-z])(?:mem|[vV]?[rR][aA][mM]|[Hh][Bb][Mm]|[rR][sS][sS])|(?:Mem|MEM))(?:ory|ORY)?s?(?![a-rt-z\d])"
    r"|(?<![A-Za-z])(?:alloc(?:ated)?|reserved|(?:Max_)?MA|CA)(?![A-Za-z])"
)
_END_OF_NAME = re.compile(r"[^\w/. (-]|\d[. ]|\W\W\W")
_LONGEST_NAME = 60
_USED_OF_TOTAL = re.compile(r"[Uu]sed ?/ ?[Tt]otal")
_NUMBER = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,6})?|\d{1,15}(?:\.\d{1,16})?)"
_UNIT = r"(?P<unit>[KMGT]i?B|[KMG]i\b|[KMG]\b|bytes|[kmg]i?b)"
_VALUE = re.compile(
    r"(?P<after>(?:[A-Za-z]{1,24})?(?:[ _./-][A-Za-z]{1,24}){0,4}\.?[ ]?\(?\[?[A-Za-z]{0,8}\]?\)?)"
    rf"['\"]?\s{{0,4}}(?:is|of|at)?\s{{0,4}}(?P<sign>[:=|]?)\s{{0,6}}['\"]?(?:np\.float\d\d\()?(?<![\d.]){_NUMBER}"
    rf"\s?{_UNIT}?(?:\s?/\s?[\d.,]{{1,12}}\s?(?P<of_unit>[KMGT]i?B|bytes)?)?(?P<percent>\s?%|\s?(?:/|per\b)\s?s)?"
    r"(?![\w.]*[A-Za-z]|\.?\d)(?P<ends>(?=\s*(?:[,|;)}\]]|$)))?"
)
_NUMBER_FIRST = re.compile(rf"(?<![\w.=:'\"]){_NUMBER}\s?{_UNIT} (?:of )?(?P<before>(?:[A-Za-z]+ ){{0,2}})$")
_DEVICE_OR_USED = re.compile(
    r"(?:(?<![\w-])(?:gpu|GPU|cuda|CUDA)[ :_#]?\d{0,2}\s?[:=]\s?|(?<!ram )(?<!disk )(?<!cpu )\b[Uu]sed\W{1,3})"
    r"(?P<number>\d{1,6}(?:\.\d{1,6})?)\s?(?P<unit>[MG]i?B)(?=\s{0,4}(?:[,|;)\]/]|$|used|in use|gpu|(?:out )?of \d))"
)
"""`GPU0: 45.2GB`, `used 45.2 GiB of 79.1 GiB`."""
_UNIT_OF_HEAD = re.compile(r"\(([KMGT]i?B|bytes)\)")
"""Unit of all figures after it: `memory (MB) | allocated: 2048.0 | reserved: 4096.0`."""
_UNIT_OF_NAME = re.compile(r"(?:^|[^A-Za-z])([KMG]i?B?|bytes|[kmg]i?b)(?:[^A-Za-z]|$)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_MOST_FIGURES = 24
"""Maximum number of figures that are read from one line."""
_LEAST_MIB, _MOST_MIB = 256, 400_000
_MOST_GIB = 2_000
_LEAST_BYTES = 1 << 27
_FACTORS = {"k": KIB, "m": MIB, "g": GIB, "t": GIB * KIB}


def figures_of(text: str) -> list[Figure]:
    """The figures of the line that count most: of tensors, else of GPU memory, of reserved memory, of host memory."""
    found = [figure for match in islice(_NAME.finditer(text), _MOST_FIGURES) if (figure := _figure(text, match))]
    for measure in (Measure.TENSORS, Measure.GPU, Measure.RESERVED, Measure.HOST):
        if counted := [figure for figure in found if figure.measure is measure]:
            best = next((figure for figure in counted if not figure.is_peak), counted[0])
            reserved = [each for each in found if each.measure is Measure.RESERVED and each.is_peak == best.is_peak]
            return [best, *(reserved[:1] if measure is Measure.TENSORS else [])]
    if device := _DEVICE_OR_USED.search(text):
        return [Figure(device.start(), _size(device["number"], device["unit"], "") or 0, Measure.GPU, is_peak=False)]
    return []


def _figure(text: str, name: re.Match[str]) -> Figure | None:
    before = _END_OF_NAME.split(text[max(name.start() - _LONGEST_NAME, 0) : name.start()])[-1]
    first = (
        _NUMBER_FIRST.search(text, max(name.start() - _LONGEST_NAME, 0), name.start()) if before[-1:] == " " else None
    )
    value = _VALUE.match(text, name.end())
    if first is not None and (value is None or not value["sign"]):
        meaning = _meaning(f"{first['before']} {name[0]}")
        size = _size(first["number"], first["unit"], "")
        return Figure(first.start(), size, *meaning[:2]) if meaning and size is not None else None
    if value is None or value["percent"]:
        return None
    start = name.start() - len(before)
    written = text[start : value.start("number")]
    meaning = _meaning(written)
    unit = value["unit"] or value["of_unit"]
    if unit is None and (heads := _UNIT_OF_HEAD.findall(text, 0, start)):
        unit = heads[-1]
    size = _size(value["number"], unit, written)
    if meaning is None or size is None:
        return None
    measure, is_peak, names_a_gpu = meaning
    name_suffices = is_peak or names_a_gpu or measure is Measure.TENSORS
    if not (unit or value["sign"] or value["ends"] is not None or name_suffices):
        return None
    if not unit and pattern("agent").search(text) and not (names_a_gpu or is_peak):
        return None  # An agent's memory counts its observations.
    return Figure(start, size, measure, is_peak)


@lru_cache(1024)
def _meaning(name: str) -> tuple[Measure, bool, bool] | None:
    """The measure of a figure with this name, if it is a peak, and if the name speaks of a GPU; None if it is another
    number. Logs repeat their names."""
    words = frozenset(word.lower() for word in _WORDS.findall(_USED_OF_TOTAL.sub("used", name)))
    if _has(words, pattern("other_numbers")):
        return None
    names_a_gpu = _has(words, pattern("gpu_figure"))
    if _has(words, pattern("host_figure")) and not names_a_gpu:
        measure = Measure.HOST
    elif _has(words, pattern("tensors_figure")):
        measure = Measure.TENSORS
    else:
        measure = Measure.RESERVED if _has(words, pattern("reserved_figure")) else Measure.GPU
    return measure, _has(words, pattern("peak_figure")), names_a_gpu


def _has(words: frozenset[str], any_of: re.Pattern[str]) -> bool:
    return any(any_of.fullmatch(word) for word in words)


def _size(number: str, unit: str | None, name: str) -> int | None:
    """Bytes. A number without any unit counts bytes, MiB or GiB by its size, as programs print them."""
    value = float(number.replace(",", ""))
    if unit is None and (named := _UNIT_OF_NAME.findall(name.replace("_", " ").replace("/", " "))):
        unit = named[-1]
    if unit is not None:
        return round(value * _FACTORS.get(unit[0].lower(), 1))
    if "." in number:
        return round(value * GIB) if 1 < value < _MOST_GIB else None
    if value >= _LEAST_BYTES:
        return round(value)
    return round(value * MIB) if _LEAST_MIB <= value <= _MOST_MIB else None
