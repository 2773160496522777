"""Facts of a log around its failures: memory over time, the engine, GPUs in tables, programs and their options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from rljob_api.memory_failure import GpuProcess
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.figures import Measure, figures_of
from rljob_memory.evidence.lines import LogLine, parse_line
from rljob_memory.evidence.model_facts import noted
from rljob_memory.evidence.signatures import load_table, pattern, sizes_of
from rljob_memory.programs import PROGRAMS
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, KIB, MIB, size_bytes

WORDS = (
    *("mem", "alloc", "vram", "hbm", "rss", "gib", "mib", " gb", "sleep", "kv cache", "vllm", "engine", "/dev/shm"),
    *("batch", "offload", "max_", "param", "dtype", "vocab_size", "==", " v0.", " v1.", "llm", "sglang", "model"),
)
"""Every line with a fact has one of these, in lower case."""


def note(builder: EvidenceBuilder, line: LogLine, raw_above: Sequence[bytes] = ()) -> None:
    """Add the facts in a line to `builder`. `raw_above`: the lines above it, the nearest last."""
    builder.model = noted(builder.model, line.text)
    _note_programs(builder, line)
    _note_engine(builder, line)
    _note_tables(builder, line, raw_above)
    _note_figures(builder, line)


# Memory over time, by the place in the program that prints it.

_EPOCH = re.compile(r"\bepoch['\"]?[ :=#]{1,3}\[?(\d{1,6})\b", re.IGNORECASE)
_OF_A_SHORTAGE = (
    "out of memory",
    "outofmemory",
    "error",
    "exception",
    "fail",
    "unable to",
    "cannot",
    "can't",
    "could not",
)
_OF_A_FIGURE = ("mem", "ram", "hbm", "rss", "alloc", "reserved", "ma ", "used", "gpu", "cuda")
_NUMBER = re.compile(r"\d")
_WORD = re.compile(r"[A-Za-z][A-Za-z_]+")
_MOST_WORDS = 6


def step_of(text: str) -> int | None:
    """The step that the line names, else its epoch."""
    found = pattern("step").search(text) or _EPOCH.search(text)
    return next((int(group) for group in found.groups() if group), None) if found else None


def _note_figures(builder: EvidenceBuilder, line: LogLine) -> None:
    text, lower = line.text, line.lower
    if not any(word in lower for word in _OF_A_FIGURE) or any(word in lower for word in _OF_A_SHORTAGE):
        return
    figures = [] if pattern("smi_query").search(text) or pattern("smi_use").search(text) else figures_of(text)
    if not figures:
        return
    first, step = figures[0], step_of(text)
    # Lines with the same words before the figure were printed at the same point of the program's work.
    begin = 0 if step is not None or first.measure is Measure.TENSORS else first.start
    number = _NUMBER.search(text, first.start)
    words = _WORD.findall(text[begin : number.start() if number else None])[-_MOST_WORDS:]
    if step is None and (made := pattern("made").search(text)):
        words.insert(0, made[0].lower())
    sample = MemorySample(step=step, allocated_bytes=first.size_bytes)
    if first.measure is Measure.HOST:
        sample = MemorySample(step=step, rss_bytes=first.size_bytes)
    elif len(figures) > 1:
        sample = replace(sample, reserved_bytes=figures[1].size_bytes)
    length = pattern("length").search(text)
    name = " ".join(filter(None, (line.writer, *words))) or "log"
    tokens = float(length[1]) if length else None
    builder.add_sample(name, sample, first.measure, is_peak=first.is_peak, length=tokens)


# The engine: vLLM's and SGLang's own log.

_ENGINES_WORDS = ("leep", "ccupation", "wake up", "took", "weight", "KV Cache", "KV cache", "Capture", "Graph")


@cache
def _engine_lines() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    """Patterns of lines, and the values that such a line sets, beside those of its named groups."""
    return tuple((re.compile(entry.pop("pattern")), entry) for entry in load_table("engine.yaml"))


def _note_engine(builder: EvidenceBuilder, line: LogLine) -> None:
    text = line.text
    may_be_one = "llm" in line.lower or "engine" in line.lower or line.writer
    if not builder.engine.seen and may_be_one and pattern("engine").search(f"{line.writer} {text}"):
        builder.engine = replace(builder.engine, seen=True)
    if not any(word in text for word in _ENGINES_WORDS):
        return
    for of_the_engine, values in _engine_lines():
        if found := of_the_engine.search(text):
            levels = {int(level) for name, level in found.groupdict().items() if level and name.startswith("level")}
            if levels and builder.engine.sleep_level is not None:
                levels.add(builder.engine.sleep_level)
            level = {"sleep_level": levels.pop() if len(levels) == 1 else 0} if levels else {}
            builder.engine = replace(builder.engine, seen=True, **values | sizes_of(found) | level)


# Tables: of nvidia-smi, of HAMi's shared GPUs, of `df`.


def _note_tables(builder: EvidenceBuilder, line: LogLine, raw_above: Sequence[bytes]) -> None:
    text = line.text
    if "MiB |" in text and (match := pattern("smi_process").search(text)):
        builder.add_gpu_process(int(match[1]), GpuProcess(pid=int(match[2]), used_bytes=int(match[3]) * MIB))
    elif "MiB /" in text and (match := pattern("smi_use").search(text)):
        builder.add_gpu_use(int(match[1]) * MIB, int(match[2]) * MIB)
        heads = (pattern("smi_head").match(parse_line(above).text) for above in reversed(raw_above))
        gpu = next((head[1] for head in heads if head), "")
        _add_use(builder, gpu, int(match[1]))
    elif "MiB, " in text and (match := pattern("smi_query").search(text)):
        _add_use(builder, match["gpu"], int(match["used"]))
    elif "orig free=" in text and (match := pattern("hami_use").search(text)):
        free, total, own = (int(size) for size in match.groups())
        builder.add_gpu_use(max(total - free - own, 0), total)
    elif "/dev/shm" in text and (host := shared_memory_of(text)) is not None:
        builder.add_host(host)


def _add_use(builder: EvidenceBuilder, gpu: str, used_mib: int) -> None:
    builder.add_sample(f"nvidia-smi GPU {gpu}".strip(), MemorySample(allocated_bytes=used_mib * MIB), Measure.GPU)


def shared_memory_of(line: str) -> MemorySample | None:
    """The sizes in a line of `df` about /dev/shm, with or without `-h`; None for other lines."""
    match = pattern("df").match(line)
    if match is None:
        return None
    used, size = _df_bytes(match["used"]) or 0, _df_bytes(match["size"]) or 0
    return MemorySample(shared_memory_used_bytes=used, shared_memory_bytes=size)


def _df_bytes(text: str) -> int | None:
    """A number without a unit counts KiB; a unit means the binary one."""
    return int(text) * KIB if text.isdigit() else size_bytes(f"{text}iB")


# The programs that wrote the log, their versions, and the values of their options.

_LEAVES = sorted({leaf for program in PROGRAMS.values() for leaf in program.names_in_logs}, key=len, reverse=True)
_VALUE = re.compile(
    rf"(?<![A-Za-z0-9])(?P<name>{'|'.join(map(re.escape, _LEAVES))})['\"]?(?:\s{{0,4}}[:=]\s{{0,4}}|\s)['\"]?"
    r"(?P<value>-?\d[\w.]{0,15}|[Tt]rue|[Ff]alse|None|null|adamw\w{0,20}|paged_\w{1,20})(?![\w.])"
)
"""`gpu_memory_utilization=0.85`, `'gpu_memory_utilization': 0.85`, `--vllm_gpu_memory_utilization 0.85`."""
_FLAG = re.compile(rf"(?<=--)(?P<name>(?:\w{{1,20}}\.)?(?:{'|'.join(map(re.escape, _LEAVES))}))(?=\s+--|\s*$)")
_VERSION = re.compile(
    rf"\b(?P<name>{'|'.join(map(re.escape, PROGRAMS))})[ =@_-]+v?(?P<version>\d+\.\d+(?:\.\d+)?)\b"
    r"|LLM engine \(v(?P<vllm>\d+\.\d+[\w.+-]{0,40})\)|(?i:PyTorch) version\s*:\s*(?P<torch>\d+\.\d+[\w.+-]{0,30})",
    re.I,
)
_FULL_NAMES = frozenset(
    option.full_name for program in PROGRAMS.values() for option in program.options if option.full_name != option.leaf
)
_SECTION = re.compile(r"(?:\w{1,40}\.){1,8}$")
_VALUES_WORDS = (
    *("emory_util", "batch_size", "offload", "fraction", "max_", "sleep", "checkpointing", "tokens", "enable"),
    *("dynamic", "micro", "liger", "zero_stage", "parallel", "strategy", "workers"),
)
"""Nearly every option has one of these."""
_MOST_VALUES = 4
"""Different values of one option that are kept: with more than one, none is called the present value."""
_MARKS = tuple((mark, key) for key, program in PROGRAMS.items() for mark in program.recognize)


def _note_programs(builder: EvidenceBuilder, line: LogLine) -> None:
    text = line.text
    if ("rljob" in text or "OutOfMemory: " in text) and pattern("rljob").search(text):
        builder.is_of_rljob = True
    if "egatron" in text and pattern("megatron").search(text):
        builder.backend = "megatron"
    if "ray::" in text and (owner := pattern("ray_owner").match(text)):
        builder.host_owners[owner["task"]] += round(float(owner["gb"]) * GIB)
    for mark, key in _MARKS:
        if (mark in text or mark in line.writer) and key not in builder.programs:
            builder.programs.append(key)
    if 'File "' in text and pattern("training_script").search(text):
        builder.trains = True
    if "==" in text or " v" in text or "(v" in text or "version" in text:
        for match in _VERSION.finditer(text):
            name = (match["name"] or ("vllm" if match["vllm"] else "torch")).lower()
            builder.versions.setdefault(name, match["version"] or match["vllm"] or match["torch"])
    if ("=" in text or ":" in text or "--" in text) and any(part in text for part in _VALUES_WORDS):
        for match in _VALUE.finditer(text):
            section = _SECTION.search(text, 0, match.start())
            full_name = f"{section[0]}{match['name']}" if section else ""
            if full_name:
                builder.option_spellings.setdefault(match["name"], full_name)
            for name in (match["name"], full_name) if full_name in _FULL_NAMES else (match["name"],):
                values = builder.options.setdefault(name, [])
                if match["value"] not in values and len(values) < _MOST_VALUES:
                    values.append(match["value"])
        for match in _FLAG.finditer(text) if "--" in text else ():
            builder.options.setdefault(match["name"].rpartition(".")[2], ["True"])
