"""Memory figures by their names alone, of programs that nobody has read the source of.

A figure is a name that speaks of memory, and a number next to it, with a unit on one of them: `memory: 12.30GiB`
(torchtitan), `Peak Mem. 45.3 GiB` (prime-rl), `max mem: 12345` (DETR, in MiB), `'memory(GiB)': 53.07` (ms-swift),
`"gpu_mem_gb": 45.2`, `VRAM 71.2/80 GB`. Names that speak of a limit, of what is free or of a share are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from rljob_memory.sizes import GIB, KIB, MIB


class Measure(StrEnum):
    """The memory that a figure counts."""

    TENSORS = "memory in tensors"
    GPU = "GPU memory"
    """Tensors, what torch reserved, or what the driver reports: the name does not tell."""
    RESERVED = "memory that torch reserved"
    HOST = "host memory"


@dataclass(frozen=True, slots=True)
class NamedFigure:
    """A number of a line, and what it is."""

    start: int
    """Place of its name in the line."""
    size_bytes: int
    measure: Measure
    is_peak: bool


_MEMORY = re.compile(
    r"(?:(?<![A-Za-z])(?:mem|[vV]?[rR][aA][mM]|[Hh][Bb][Mm]|[rR][sS][sS])|(?:Mem|MEM))(?:ory|ORY)?s?(?![a-rt-z\d])"
    r"|(?<![A-Za-z])alloc(?:ated)?(?![a-z])"
)
_DEVICE_FIRST = re.compile(
    r"(?<![\w-])(?:gpu|GPU|cuda|CUDA)[ :_#]?\d{0,2}\s?[:=]\s?(?P<number>\d{1,6}(?:\.\d{1,6})?)\s?(?P<unit>[MG]i?B?)"
    r"(?=\s{0,4}(?:[,|;)\]/]|$|used|in use|gpu|GPU|cuda))"
)
"""`GPU0: 45.2GB`"""
_USED_OF = re.compile(
    r"(?<!ram )(?<!disk )(?<!cpu )\b[Uu]sed\W{1,3}(?P<number>\d{1,6}(?:\.\d{1,6})?)\s?(?P<unit>[MG]i?B) (?:out )?of \d"
)
"""`used 45.2 GiB of 79.1 GiB`"""
_BEFORE = re.compile(r"(?:[A-Za-z][\w/.-]{0,40}[ (]{1,2}){0,3}[\w/.-]{0,30}$")
"""The words of the name in front of the one for memory."""
_NUMBER = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,6})?|\d{1,15}(?:\.\d{1,16})?)"
_UNIT = r"(?P<unit>[KMGT]i?B|[KMG]i\b|[KMG]\b|bytes|[kmg]i?b)"
_VALUE = re.compile(
    r"(?P<after>(?:[A-Za-z]{1,24})?(?:[ _./-][A-Za-z]{1,24}){0,4}\.?)(?P<key>[ ]?\(?\[?[A-Za-z]{0,8}\]?\)?)"
    rf"['\"]?\s{{0,4}}(?:is|of|at)?\s{{0,4}}(?P<sign>[:=|]?)\s{{0,6}}['\"]?(?:np\.float\d\d\()?(?<![\d.]){_NUMBER}\s?{_UNIT}?(?:\s?/\s?[\d.,]{{1,12}}\s?"
    r"(?P<of_unit>[KMGT]i?B|bytes)?)?(?P<percent>\s?%)?(?![\w.]*[A-Za-z]|\.?\d)(?P<ends>(?=\s*(?:[,|;)}}\]]|$)))?"
)
_FIGURE_FIRST = re.compile(rf"(?<![\w.=:]){_NUMBER}\s?{_UNIT} (?:of )?(?P<before>(?:[A-Za-z]+ ){{0,2}})$")
_UNIT_OF_NAME = re.compile(r"(?:^|[^A-Za-z])([KMG]i?B?|bytes|[kmg]i?b)(?:[^A-Za-z]|$)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USED_OF_TOTAL = re.compile(r"[Uu]sed ?/ ?[Tt]otal")
_LEFT_OUT = re.compile(
    r"free|avail(?:able)?|limit|total|capacity|util\w*|per|percent|pct|frac(?:tion)?|ratio|rate|delta|shared?|shm|swap\w*"
    r"|efficient|bandwidth|bank|clock|bus|speed|budget|kv|token\w*|prompt|need\w*|requir\w*|request\w*|estimate\w*|expected"
    r"|sav(?:e|es|ed|ing)|disk|copy|error|leak|optimized|freed|released|offload|threshold|target|headroom|pool|transfer"
    r"|blocks?|retr(?:y|ies)|counts?|num|size|len|entries|samples?|calls|mapped|transfers|bw|dataset|data|files?|buffer|replay"
    r"|virtual|vms|store|lpddr|model|params|weights?"
)
_HOST = re.compile(r"cpu|host|sys|system|ram|[rp]ss|process|psutil|node|machine|main|pinned|physical|python")
_GPU = re.compile(r"gpu|cuda|vram|device|card|hbm|npu|xpu|hip|nvml")
_TENSORS = re.compile(r"alloc|allocated|active")
_RESERVED = re.compile(r"reserved?|cached?")
_PEAK = re.compile(r"peak|max|maximum|highest|high")
_A_RATE = re.compile(r"\s?(?:/|per\b)\s?s")
_OF_AN_AGENT = re.compile(r"\b(?:reward|epsilon|episode|replay)", re.IGNORECASE)
_MOST_NAMES = 24
"""Figures of one line that are looked at."""
_LEAST_MIB, _MOST_MIB = 256, 400_000
_MOST_GIB = 2_000
_LEAST_BYTES = 1 << 27
_FACTORS = {"k": KIB, "m": MIB, "g": GIB, "t": GIB * KIB}


def named_figure(text: str) -> NamedFigure | None:
    """The first figure of GPU memory in the line, tensors before others; else the first one of host memory."""
    names = islice(_MEMORY.finditer(text), _MOST_NAMES)
    found = [figure for match in names if (figure := _figure(text, match))]
    for measure in (Measure.TENSORS, Measure.GPU, Measure.RESERVED, Measure.HOST):
        of_it = [figure for figure in found if figure.measure is measure]
        if of_it:
            return next((figure for figure in of_it if not figure.is_peak), of_it[0])
    if device := _DEVICE_FIRST.search(text) or _USED_OF.search(text):
        return NamedFigure(device.start(), _size(device["number"], device["unit"], "") or 0, Measure.GPU, is_peak=False)
    return None


def _figure(text: str, name: re.Match[str]) -> NamedFigure | None:
    before = _BEFORE.search(text, max(name.start() - 90, 0), name.start())
    start = before.start() if before else name.start()
    value = _VALUE.match(text, name.end())
    if value is None:
        first = _FIGURE_FIRST.search(text, max(name.start() - 60, 0), name.start())
        if first is None:
            return None
        words = _words(f"{first['before']} {name[0]}")
        return _checked(words, first.start(), _size(first["number"], first["unit"], ""))
    if value["percent"] or _A_RATE.match(text, value.end()):
        return None
    written = text[start : value.start("number")]
    words = _words(_USED_OF_TOTAL.sub("used", written))
    unit = value["unit"] or value["of_unit"]
    if not (
        unit or value["sign"] or value["ends"] is not None or any(_has(words, each) for each in (_GPU, _TENSORS, _PEAK))
    ):
        return None
    if not unit and _OF_AN_AGENT.search(text) and not any(_has(words, each) for each in (_GPU, _PEAK)):
        return None  # An agent's memory counts what it has seen.
    return _checked(words, start, _size(value["number"], unit, written))


def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORDS.findall(name))


def _has(words: frozenset[str], any_of: re.Pattern[str]) -> bool:
    return any(any_of.fullmatch(word) for word in words)


def _checked(words: frozenset[str], start: int, size: int | None) -> NamedFigure | None:
    if size is None or _has(words, _LEFT_OUT):
        return None
    if _has(words, _HOST) and not _has(words, _GPU):
        measure = Measure.HOST
    elif _has(words, _TENSORS):
        measure = Measure.TENSORS
    else:
        measure = Measure.RESERVED if _has(words, _RESERVED) else Measure.GPU
    return NamedFigure(start, size, measure, _has(words, _PEAK))


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
