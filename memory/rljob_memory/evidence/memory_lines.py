"""Memory figures that programs print as they run: allocated and reserved memory, whatever the program calls them.

Read from the sources of verl, AReaL, slime, NeMo-RL, Megatron, DeepSpeed, Fast-LLM and axolotl: lines that name
allocated memory with a unit. Reserved memory alone does not show if tensors or the allocator's cache grow. Figures of
other programs are read by their names (`named_figures`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rljob_memory.evidence.named_figures import Measure, named_figure
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, KIB, MIB

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
