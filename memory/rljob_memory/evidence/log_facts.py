"""Facts in a log beside failures: the engine's sleep, memory over time, processes on the GPU, /dev/shm, versions."""

from __future__ import annotations

import re
from dataclasses import replace

from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import GpuProcess
from rljob_memory.evidence.host import shared_memory_of
from rljob_memory.evidence.log_lines import LogLine
from rljob_memory.evidence.memory_figures import Measure, figures_by_name, length_of, lines_of_bars, memory_figures
from rljob_memory.evidence.model_facts import noted
from rljob_memory.programs import PROGRAMS
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB

_GB = r"(\d{1,9}(?:\.\d{1,6})?)"
_SLEPT = re.compile(rf"Sleep mode freed (-?[\d.]{{1,9}}) GiB memory, {_GB} GiB memory is still in use")
_BACKED_UP = re.compile(rf"sleep freed {_GB} GiB memory in total, of which {_GB} GiB is backed up in CPU")
_ENGINE_WEIGHTS = re.compile(
    rf"(?:Model loading|Loading model weights) took {_GB} Gi?B|model weights take {_GB} ?GiB"
    rf"|Load weight end\..{{0,200}}mem usage={_GB} GB"
)
_ENGINE_GRAPHS = re.compile(
    rf"Graph capturing finished in .{{1,20}} took {_GB} GiB|Capture cuda graph end\..{{0,80}}mem usage={_GB} GB"
)
_SLEEP_LEVEL = re.compile(r"/sleep\?(?:\S{0,80}&)?level=(\d)|\bsleep\(level=(\d)\)")
_WOKE = re.compile(r"seconds to wake up|/resume_memory_occupation HTTP/\S+\" 200")
_FELL_ASLEEP = re.compile(r"seconds to fall asleep|/release_memory_occupation HTTP/\S+\" 200")
_KV_CACHE = re.compile(
    rf"(?:Available KV cache memory: |memory reserved for KV Cache is ){_GB} ?GiB|KV Cache is allocated.{{0,80}}"
    rf"K size: {_GB} GB, V size: {_GB} GB"
)
_ENGINE = re.compile(r"-packages/vllm/|\bvLLM\b|(?<!/)(?:\b|_)vllm\b(?!/)|EngineCore|LLMRayActor|VllmWorker|AsyncVLLM")
_ENGINE_VERSION = re.compile(r"LLM engine \(v(\d+\.\d+[\w.+-]{0,40})\)")
_TORCH_VERSION = re.compile(r"PyTorch version\s*:\s*(\d+\.\d+[\w.+-]{0,30})")
_GPU_PROCESS = re.compile(r"^\|?\s+(\d{1,3})\s+(?:\S+\s+\S+\s+)?(\d{1,10})\s+(?:C|C\+G)\s+\S.{0,80}?\s(\d{1,7})MiB \|")
_GPU_USE = re.compile(r"^\|.{10,60}\| +(\d{1,7})MiB / +(\d{1,7})MiB \|")
"""Memory in use and in total, of one GPU in the table of nvidia-smi."""
_GPU_HEAD = re.compile(r"^\|\s{1,4}(\d{1,3}) {1,4}\S")
"""The line above, with the GPU's number and name."""
_SHARED_GPU = re.compile(r"orig free=(\d{1,15}) total=(\d{1,15}) limit=\d{1,15} usage=(\d{1,15})")
"""HAMi's report of what is free on the GPU that it shares, and of the process's own use."""
_SHORTAGE = re.compile(
    r"out ?of ?memory|\w(?:Error|Exception)\b|\b(?:fail|unable to|cannot|can't|could not)", re.IGNORECASE
)
_LOADING = re.compile(
    r"[Ll]oading (?:\w{1,40} ){0,3}shards:.{0,60}?(?P<percent>\d{1,3})%"
    r"|(?P<begins>Starting to load model|Load weight begin)"
    r"|(?P<ends>[Ll]oading (?:model )?weights took|Model loading took|Load weight end)"
)
"""Progress of the weights' loading: transformers, vLLM, SGLang."""
_MAY_BE_A_REPORT = re.compile(
    r"err|exce|kill|fail|exhaust|\bout\b|abort|fatal|oom|cannot|can't|unable|not enough|insuff|\bno\b|signal|evict|low"
    r"|limit|full|[^\x00-\x7f]",
    re.IGNORECASE,
)
_MOST_SERIES_BY_NAME = 128
"""The rest is kept for figures of known forms: a log of prose has many numbers beside words for memory."""
_BARRIER = re.compile(r"using GPU 0 to perform barrier as devices used by this process are currently unknown")


def note(builder: EvidenceBuilder, line: LogLine) -> bool:
    """Add the facts in a line to `builder`. True if the line cannot contain anything else."""
    text = line.text
    builder.model = noted(builder.model, text)
    return (
        _note_probe_line(builder, text)
        or _note_engine(builder, text)
        or _note_memory(builder, line)
        or _note_process(builder, line)
        or _note_version(builder, text)
    )


def loads_weights(text: str) -> bool | None:
    """True after a line that shows weights being loaded, False after one that shows them loaded; None after others."""
    if "oad" not in text:
        return None
    shown = None
    for match in _LOADING.finditer(text):
        shown = int(match["percent"]) < 100 if match["percent"] else bool(match["begins"])
    return shown


def note_engine_seen(builder: EvidenceBuilder, line: LogLine) -> None:
    """Record that a vLLM engine appears in the log, if the line mentions one."""
    if not builder.engine.seen and (_ENGINE.search(line.text) or _ENGINE.search(line.writer)):
        builder.engine = replace(builder.engine, seen=True)


def _note_engine(builder: EvidenceBuilder, text: str) -> bool:
    if match := _SLEPT.search(text):
        try:
            freed = float(match[1])
        except ValueError:
            return False
        builder.engine = replace(
            builder.engine,
            seen=True,
            asleep=True,
            freed_bytes=max(round(freed * GIB), 0),
            still_in_use_bytes=round(float(match[2]) * GIB),
        )
        return True
    if match := _BACKED_UP.search(text):
        builder.engine = replace(builder.engine, seen=True, backed_up_bytes=round(float(match[2]) * GIB))
        return True
    if match := _SLEEP_LEVEL.search(text):
        level = int(match[1] or match[2])
        known = builder.engine.sleep_level
        builder.engine = replace(builder.engine, seen=True, sleep_level=level if known in (None, level) else 0)
        return True
    if _FELL_ASLEEP.search(text):
        builder.engine = replace(builder.engine, seen=True, asleep=True)
        return True
    if _WOKE.search(text):
        builder.engine = replace(builder.engine, seen=True, asleep=False)
        return True
    if match := _ENGINE_WEIGHTS.search(text):
        builder.engine = replace(builder.engine, weights_bytes=_sum_bytes(match))
    if match := _ENGINE_GRAPHS.search(text):
        builder.engine = replace(builder.engine, graphs_bytes=_sum_bytes(match))
    if match := _KV_CACHE.search(text):
        builder.engine = replace(builder.engine, seen=True, kv_cache_bytes=_sum_bytes(match))
        return True
    return False


def _sum_bytes(match: re.Match[str]) -> int:
    return round(sum(float(size) for size in match.groups() if size) * GIB)


def _note_memory(builder: EvidenceBuilder, line: LogLine) -> bool:
    """True if the line has figures and nothing else. One with a figure by its name may report a failure as well."""
    if _SHORTAGE.search(line.text):
        return False
    is_known = has_step = False
    for text in lines_of_bars(line.text):
        known = memory_figures(text)
        figures = known or figures_by_name(text)
        if figures is None:
            continue
        name = f"{line.writer} {figures.place}".strip() or "log"
        if known or name in builder.series or len(builder.series) < _MOST_SERIES_BY_NAME:
            length = length_of(text)
            builder.add_sample(name, figures.sample, figures.measure, is_peak=figures.is_peak, length=length)
        is_known |= known is not None
        has_step |= figures.sample.step is not None
    return is_known or (has_step and not _MAY_BE_A_REPORT.search(line.text))


def _note_process(builder: EvidenceBuilder, line: LogLine) -> bool:
    text = line.text
    if match := _GPU_PROCESS.search(text):
        builder.add_gpu_process(int(match[1]), GpuProcess(int(match[2]), int(match[3]) * MIB))
        return True
    if match := _GPU_USE.search(text):
        used = int(match[1]) * MIB
        builder.add_gpu_use(used, int(match[2]) * MIB)
        gpu = next((found[1] for above in reversed(line.above) if (found := _GPU_HEAD.match(above))), "")
        builder.add_sample(f"nvidia-smi GPU {gpu}".strip(), MemorySample(allocated_bytes=used), Measure.GPU)
        return True
    if match := _SHARED_GPU.search(text):
        free, total, own = (int(size) for size in match.groups())
        builder.add_gpu_use(max(total - free - own, 0), total)
        return True
    if (host := shared_memory_of(text)) is not None:
        builder.add_host(host)
        return True
    if _BARRIER.search(text):
        builder.barrier_on_gpu_0 = True
        return True
    return False


def _note_version(builder: EvidenceBuilder, text: str) -> bool:
    if match := _ENGINE_VERSION.search(text):
        builder.versions["vllm"] = match[1]
        return True
    if match := _TORCH_VERSION.search(text):
        builder.versions["torch"] = match[1]
        return True
    return False


# Reads the account that the probe adds to a termination message: `rljob_probe.account` writes these lines.

_MARK = "rljob-probe: "
_LARGEST_BLOCK = re.compile(r"largest free block (\d{1,15}) bytes")
_ENGINE_OF_PROBE = re.compile(r"engine in this process: KV cache (\d{1,15}) bytes, (awake|asleep)")
_OTHERS = re.compile(r"other processes with a GPU in this container: (.{1,500})")
_STEPS = re.compile(r"allocated/reserved GiB after steps: ([\d./ ]{1,2000})")
_PAIR = re.compile(r"(\d{1,6}\.\d\d)/(\d{1,6}\.\d\d)")
_MOST_SIBLINGS = 16


def _note_probe_line(builder: EvidenceBuilder, text: str) -> bool:
    """Add the facts of a line of the probe to `builder`; False if it is not one."""
    if _MARK not in text:
        return False
    if match := _LARGEST_BLOCK.search(text):
        builder.largest_free_block_bytes = int(match[1])
    elif match := _ENGINE_OF_PROBE.search(text):
        builder.engine = replace(
            builder.engine, seen=True, in_process=True, asleep=match[2] == "asleep", kv_cache_bytes=int(match[1])
        )
    elif match := _OTHERS.search(text):
        names = [name.strip() for name in match[1].split(",")]
        builder.siblings = () if names == ["none"] else tuple(names[:_MOST_SIBLINGS])
    elif match := _STEPS.search(text):
        for step, (allocated, reserved) in enumerate(_PAIR.findall(match[1])):
            sample = MemorySample(
                step=step,
                phase="update",
                allocated_bytes=round(float(allocated) * GIB),
                reserved_bytes=round(float(reserved) * GIB),
            )
            builder.add_sample("the process", sample)
    return True


# The programs that wrote a log, their versions, and the values of their options.

_LEAVES = sorted({leaf for program in PROGRAMS.values() for leaf in program.names_in_logs}, key=len, reverse=True)
_VALUE = re.compile(
    rf"(?<![A-Za-z0-9])(?P<name>{'|'.join(map(re.escape, _LEAVES))})['\"]?(?:\s{{0,4}}[:=]\s{{0,4}}|\s)['\"]?"
    r"(?P<value>-?\d[\w.]{0,15}|[Tt]rue|[Ff]alse|None|null|adamw\w{0,20}|paged_\w{1,20})(?![\w.])"
)
"""`gpu_memory_utilization=0.85`, `'gpu_memory_utilization': 0.85`, `--vllm_gpu_memory_utilization 0.85`."""
_VERSION = re.compile(
    rf"\b(?P<name>{'|'.join(map(re.escape, PROGRAMS))})[ =@_-]+v?(?P<version>\d+\.\d+(?:\.\d+)?)\b", re.I
)
_MOST_VALUES = 4
"""Different values of one option that are kept: with more than one, none is called the present value."""


_FULL_NAMES = frozenset(
    option.full_name for program in PROGRAMS.values() for option in program.options if option.full_name != option.leaf
)
_SECTION = re.compile(r"(?:\w{1,40}\.){1,8}$")
_MAY_HAVE_VALUES = (
    "emory_util",
    "batch_size",
    "offload",
    "fraction",
    "max_",
    "sleep",
    "checkpointing",
    "tokens",
    "enable",
    "dynamic",
    "micro",
    "liger",
    "zero_stage",
)
"""Nearly every option has one of these. Looking for words is several times faster than a regular expression."""
_TRAINING_SCRIPT = re.compile(
    r"File \"(?:[^\"]{0,300}/)?(?:\w{1,40}_)?(?:(?:pre)?train|fine_?tune|sft|rlhf|dpo|grpo|ppo)(?:_\w{1,40})?\.py\""
)
"""In a traceback of any process."""
_MARKS = tuple((mark, key) for key, program in PROGRAMS.items() for mark in program.recognize)


_OF_RLJOB = re.compile(
    r"\brljob_(?:trainer|memory|probe)\b|\brljob\.dev/|^rljob(?:-probe)?: |^rljob \d{4}-|^warning: OutOfMemory: "
)
"""Frames, labels, marks and messages of RLJob."""


def note_programs(builder: EvidenceBuilder, line: LogLine) -> None:
    """Record the programs, versions and option values that the line shows."""
    text = line.text
    if ("rljob" in text or "OutOfMemory: " in text) and _OF_RLJOB.search(text):
        builder.is_of_rljob = True
    for mark, key in _MARKS:
        if key not in builder.programs and (mark in text or mark in line.writer):
            builder.programs.append(key)
    if 'File "' in text and _TRAINING_SCRIPT.search(text):
        builder.trains = True
    if "==" in text or " v" in text:
        for match in _VERSION.finditer(text):
            builder.versions.setdefault(match["name"].lower(), match["version"])
    if any(part in text for part in _MAY_HAVE_VALUES):
        for match in _VALUE.finditer(text):
            section = _SECTION.search(text, 0, match.start())
            full_name = f"{section[0]}{match['name']}" if section else ""
            for name in (match["name"], full_name) if full_name in _FULL_NAMES else (match["name"],):
                values = builder.option_values.setdefault(name, [])
                if match["value"] not in values and len(values) < _MOST_VALUES:
                    values.append(match["value"])
