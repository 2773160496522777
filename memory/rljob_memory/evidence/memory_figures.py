"""Memory figures that programs print as they run: allocated and reserved memory, whatever the program calls them.

Read from the sources of verl, AReaL, slime, NeMo-RL, Megatron, DeepSpeed, Fast-LLM and axolotl: lines that name
allocated memory with a unit. Reserved memory alone does not show if tensors or the allocator's cache grow. Figures of
other programs are read by their names (`named_figure`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, KIB, MIB

# Memory figures by their names alone, of programs that nobody has read the source of.
#
# A figure is a name that speaks of memory, and a number next to it, with a unit on one of them: `memory: 12.30GiB`
# (torchtitan), `Peak Mem. 45.3 GiB` (prime-rl), `max mem: 12345` (DETR, in MiB), `'memory(GiB)': 53.07` (ms-swift),
# `"gpu_mem_gb": 45.2`, `VRAM 71.2/80 GB`. Names that speak of a limit, of what is free or of a share are left out.


class Measure(StrEnum):
    """The memory that a figure counts."""

    TENSORS = "memory in tensors"
    GPU = "GPU memory"
    """Tensors, what torch reserved, or what the driver reports: the name does not tell."""
    RESERVED = "memory that torch reserved"
    HOST = "host memory"


@dataclass(frozen=True, slots=True)
class _NamedFigure:
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
_NAMED_NUMBER = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,6})?|\d{1,15}(?:\.\d{1,16})?)"
_NAMED_UNIT = r"(?P<unit>[KMGT]i?B|[KMG]i\b|[KMG]\b|bytes|[kmg]i?b)"
_VALUE = re.compile(
    r"(?P<after>(?:[A-Za-z]{1,24})?(?:[ _./-][A-Za-z]{1,24}){0,4}\.?)(?P<key>[ ]?\(?\[?[A-Za-z]{0,8}\]?\)?)"
    rf"['\"]?\s{{0,4}}(?:is|of|at)?\s{{0,4}}(?P<sign>[:=|]?)\s{{0,6}}['\"]?(?:np\.float\d\d\()?(?<![\d.]){_NAMED_NUMBER}\s?{_NAMED_UNIT}?(?:\s?/\s?[\d.,]{{1,12}}\s?"
    r"(?P<of_unit>[KMGT]i?B|bytes)?)?(?P<percent>\s?%)?(?![\w.]*[A-Za-z]|\.?\d)(?P<ends>(?=\s*(?:[,|;)}}\]]|$)))?"
)
_FIGURE_FIRST = re.compile(rf"(?<![\w.=:]){_NAMED_NUMBER}\s?{_NAMED_UNIT} (?:of )?(?P<before>(?:[A-Za-z]+ ){{0,2}})$")
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
_NAMED_PEAK = re.compile(r"peak|max|maximum|highest|high")
_A_RATE = re.compile(r"\s?(?:/|per\b)\s?s")
_OF_AN_AGENT = re.compile(r"\b(?:reward|epsilon|episode|replay)", re.IGNORECASE)
_MOST_NAMES = 24
"""Figures of one line that are looked at."""
_LEAST_MIB, _MOST_MIB = 256, 400_000
_MOST_GIB = 2_000
_LEAST_BYTES = 1 << 27
_NAMED_FACTORS = {"k": KIB, "m": MIB, "g": GIB, "t": GIB * KIB}


def named_figure(text: str) -> _NamedFigure | None:
    """The first figure of GPU memory in the line, tensors before others; else the first one of host memory."""
    names = islice(_MEMORY.finditer(text), _MOST_NAMES)
    found = [figure for match in names if (figure := _figure(text, match))]
    for measure in (Measure.TENSORS, Measure.GPU, Measure.RESERVED, Measure.HOST):
        of_it = [figure for figure in found if figure.measure is measure]
        if of_it:
            return next((figure for figure in of_it if not figure.is_peak), of_it[0])
    if device := _DEVICE_FIRST.search(text) or _USED_OF.search(text):
        return _NamedFigure(
            device.start(), _named_size(device["number"], device["unit"], "") or 0, Measure.GPU, is_peak=False
        )
    return None


def _figure(text: str, name: re.Match[str]) -> _NamedFigure | None:
    before = _BEFORE.search(text, max(name.start() - 90, 0), name.start())
    start = before.start() if before else name.start()
    value = _VALUE.match(text, name.end())
    if value is None:
        first = _FIGURE_FIRST.search(text, max(name.start() - 60, 0), name.start())
        if first is None:
            return None
        words = _words(f"{first['before']} {name[0]}")
        return _checked(words, first.start(), _named_size(first["number"], first["unit"], ""))
    if value["percent"] or _A_RATE.match(text, value.end()):
        return None
    written = text[start : value.start("number")]
    words = _words(_USED_OF_TOTAL.sub("used", written))
    unit = value["unit"] or value["of_unit"]
    if not (
        unit
        or value["sign"]
        or value["ends"] is not None
        or any(_has(words, each) for each in (_GPU, _TENSORS, _NAMED_PEAK))
    ):
        return None
    if not unit and _OF_AN_AGENT.search(text) and not any(_has(words, each) for each in (_GPU, _NAMED_PEAK)):
        return None  # An agent's memory counts what it has seen.
    return _checked(words, start, _named_size(value["number"], unit, written))


def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORDS.findall(name))


def _has(words: frozenset[str], any_of: re.Pattern[str]) -> bool:
    return any(any_of.fullmatch(word) for word in words)


def _checked(words: frozenset[str], start: int, size: int | None) -> _NamedFigure | None:
    if size is None or _has(words, _LEFT_OUT):
        return None
    if _has(words, _HOST) and not _has(words, _GPU):
        measure = Measure.HOST
    elif _has(words, _TENSORS):
        measure = Measure.TENSORS
    else:
        measure = Measure.RESERVED if _has(words, _RESERVED) else Measure.GPU
    return _NamedFigure(start, size, measure, _has(words, _NAMED_PEAK))


def _named_size(number: str, unit: str | None, name: str) -> int | None:
    """Bytes. A number without any unit counts bytes, MiB or GiB by its size, as programs print them."""
    value = float(number.replace(",", ""))
    if unit is None and (named := _UNIT_OF_NAME.findall(name.replace("_", " ").replace("/", " "))):
        unit = named[-1]
    if unit is not None:
        return round(value * _NAMED_FACTORS.get(unit[0].lower(), 1))
    if "." in number:
        return round(value * GIB) if 1 < value < _MOST_GIB else None
    if value >= _LEAST_BYTES:
        return round(value)
    return round(value * MIB) if _LEAST_MIB <= value <= _MOST_MIB else None


# Lines of known forms, read from the sources of their programs.

_DEEPSPEED = re.compile(r"\bMA (\d{1,9}(?:\.\d{1,6})?) GB\s+Max_MA [\d.]{1,16} GB\s+CA (\d{1,9}(?:\.\d{1,6})?) GB")
_NUMBER = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,6})?|\d{1,15}(?:\.\d{1,6})?)"
_UNIT = r"(?:[KMG]i?B|bytes|[kmg]i?b)"
_KEY_FIRST = re.compile(
    # `actor/perf/max_memory_allocated_gb:12.3`, `allocated: 3.75 GiB`, `| allocated: 3.1`, `'reserved_GB': 4`
    r"(?P<before>[\w/.() -]{0,40}?)(?<![A-Za-z])(?P<what>allocated|alloc\b|reserved|cached)(?P<after>[\w ()/]{0,20}?)"
    rf"['\"]?\s{{0,4}}[:=]?\s{{0,4}}['\"]?(?:np\.float\d\d\()?{_NUMBER}\s?"
    rf"(?P<unit>{_UNIT}\b)?"
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
_MOST_PLAIN_CHARACTERS = 200
_MOST_CHARACTERS_BEFORE = 400
"""A number belongs to words that are so near: a pattern that looked through all of a long line would take minutes."""
_UNIT_IN_TEXT = re.compile(rf"[_( ]({_UNIT})\b\)?")
_PEAK = re.compile(r"max|peak", re.IGNORECASE)
_STEP = re.compile(
    r"\b(?:global_?step|step|iteration|iter|it|batch)s?['\"]?[ :=#/]{1,3}\[?\s{0,4}(\d{1,9})\b"
    r"|\bafter (\d{1,9}) iterations"
    # mmcv and mmengine: `Epoch [1][240/3712]`
    r"|\bepoch(?:\(\w{1,8}\))?\s{0,3}\[\d{1,6}\]\[\s{0,6}(\d{1,9})/",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"\bepoch['\"]?[ :=#]{1,3}\[?(\d{1,6})\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][A-Za-z_]+")
_MOST_WORDS = 6
_END_OF_NAME = re.compile(r"\d")
_CSV_OF_NVIDIA_SMI = re.compile(r"(?P<used>\d{1,7}) MiB, {1,4}(?P<total>\d{3,7}) MiB")
_INDEX = re.compile(r"(?:^|, )(\d{1,2}), ")
_BARS = re.compile(r"(?=\s{1,4}\d{1,3}%\|)")
_WHILE_IT_IS_MADE = re.compile(r"\b(?:load|init|creat|build|shard|layer|warm)", re.IGNORECASE)
_LENGTH = re.compile(
    r"\b(?:response_length|completion_length|completions/mean_length|seq(?:uence)?_?len(?:gth)?|total_length|num_tokens"
    r"|mean_length|batch_tokens|max_len(?:gth)?)(?:/(?:mean|max))?['\"]?\s?[:=]\s?['\"]?(?:np\.float\d\d\()?(\d{1,9}(?:\.\d{1,6})?)",
    re.IGNORECASE,
)
"""Lengths of the sequences of a step: memory that grows with them is no leak."""
_FACTORS = {"k": KIB, "m": MIB, "g": GIB}


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The memory figures of one line."""

    place: str
    """Words before the figures: lines with the same ones were printed at the same point of the program's work."""

    sample: MemorySample

    measure: Measure = Measure.TENSORS

    is_peak: bool = False
    """A maximum, perhaps since the start of the program: it never falls."""


def length_of(text: str) -> float | None:
    """Tokens of the step's sequences, if the line has them beside its memory."""
    found = _LENGTH.search(text)
    return float(found[1]) if found else None


def lines_of_bars(text: str) -> list[str]:
    """The states of a progress bar that one line contains, each on its own; otherwise the line as it is."""
    return [part for part in _BARS.split(text) if part] if text.count("%|") > 1 else [text]


def memory_figures(text: str) -> MemoryFigures | None:
    """The figures in a line of a log; None if it names no allocated memory with a unit."""
    if match := _DEEPSPEED.search(text):
        return MemoryFigures("", _sample(text, round(float(match[1]) * GIB), round(float(match[2]) * GIB)))
    if match := _PLAIN_BYTES.search(text, max(len(text) - _MOST_PLAIN_CHARACTERS, 0)):
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
    return MemoryFigures(" ".join(words), _sample(text, allocated, reserved), is_peak=is_peak)


def figures_by_name(text: str) -> MemoryFigures | None:
    """The figure of GPU memory, else of host memory, whose name and unit `named_figure` understands.

    The words before it belong to its place only if the line names a step: else they may be any text.
    """
    if (smi := _CSV_OF_NVIDIA_SMI.search(text)) and int(smi["used"]) <= int(smi["total"]):
        index = _INDEX.search(text, 0, smi.start())
        gpu = f"nvidia-smi GPU {index[1]}" if index else "nvidia-smi"
        return MemoryFigures(gpu, MemorySample(allocated_bytes=int(smi["used"]) * MIB), Measure.GPU)
    figure = named_figure(text)
    if figure is None:
        return None
    has_step = _step(text) is not None
    end = _END_OF_NAME.search(text, figure.start)
    name = text[0 if has_step else figure.start : end.start() if end else None]
    words = _WORD.findall(name)[-_MOST_WORDS:]
    if not has_step and (made := _WHILE_IT_IS_MADE.search(text)):
        words.insert(0, made[0].lower())
    sample = _sample(text, figure.size_bytes, 0)
    if figure.measure is Measure.HOST:
        sample = replace(sample, allocated_bytes=0, rss_bytes=figure.size_bytes)
    return MemoryFigures(" ".join(words), sample, figure.measure, figure.is_peak)


def _sample(text: str, allocated: int, reserved: int) -> MemorySample:
    return MemorySample(step=_step(text), allocated_bytes=allocated, reserved_bytes=reserved)


def _step(text: str) -> int | None:
    """The step that the line names, else its epoch."""
    if found := _STEP.search(text):
        return int(found[1] or found[2] or found[3])
    return int(found[1]) if (found := _EPOCH.search(text)) else None


def _size(match: re.Match[str], text: str) -> int | None:
    """Bytes; None if neither the number, nor its name, nor the text before it has a unit. GB counts as GiB."""
    unit = match["unit"]
    if unit is None:
        end = match.start("number")
        named = _UNIT_IN_TEXT.findall(text, max(end - _MOST_CHARACTERS_BEFORE, 0), end)
        unit = named[-1] if named else None
    if unit is None:
        return None
    return round(float(match["number"].replace(",", "")) * _FACTORS.get(unit[0].lower(), 1))
