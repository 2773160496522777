"""Facts of a log around its failures: memory over time, the engine, GPUs in tables, programs and their options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from rljob_api.memory_failure import GpuProcess
from rljob_memory.evidence.collected import EngineRecord, EvidenceBuilder
from rljob_memory.evidence.figures import Measure, figures_of
from rljob_memory.evidence.lines import LogLine
from rljob_memory.evidence.model_facts import noted
from rljob_memory.programs import PROGRAMS
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, KIB, MIB, size_bytes

WORDS = (
    *("mem", "alloc", "vram", "hbm", "rss", "gib", "mib", " gb", "sleep", "kv cache", "vllm", "engine", "/dev/shm"),
    *("batch", "offload", "max_", "param", "dtype", "vocab_size", "==", " v0.", " v1.", "llm", "sglang", "model"),
)
"""Every line with a fact has one of these, in lower case."""


def note(builder: EvidenceBuilder, line: LogLine) -> None:
    """Add the facts in a line to `builder`."""
    builder.model = noted(builder.model, line.text)
    _note_programs(builder, line)
    _note_engine(builder, line)
    _note_tables(builder, line)
    _note_figures(builder, line)


# Memory over time, by the place in the program that prints it.

_STEP = re.compile(
    r"\b(?:global_?step|step|iteration|iter|it|batch)s?['\"]?[ :=#/]{1,3}\[?\s{0,4}(\d{1,9})\b"
    r"|\bafter (\d{1,9}) iterations"
    # mmcv and mmengine: `Epoch [1][240/3712]`
    r"|\bepoch(?:\(\w{1,8}\))?\s{0,3}\[\d{1,6}\]\[\s{0,6}(\d{1,9})/",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"\bepoch['\"]?[ :=#]{1,3}\[?(\d{1,6})\b", re.IGNORECASE)
_LENGTH = re.compile(
    r"\b(?:response_length|completion_length|completions/mean_length|seq(?:uence)?_?len(?:gth)?|total_length|num_tokens"
    r"|mean_length|batch_tokens|max_len(?:gth)?)(?:/(?:mean|max))?['\"]?\s?[:=]\s?['\"]?(?:np\.float\d\d\()?(\d{1,9})",
    re.IGNORECASE,
)
"""Tokens of the sequences of a step: memory that grows with them is no leak."""
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
_WHILE_IT_IS_MADE = re.compile(r"\b(?:load|init|creat|build|shard|layer|warm)", re.IGNORECASE)


def step_of(text: str) -> int | None:
    """The step that the line names, else its epoch."""
    found = _STEP.search(text) or _EPOCH.search(text)
    return next((int(group) for group in found.groups() if group), None) if found else None


def _note_figures(builder: EvidenceBuilder, line: LogLine) -> None:
    text, lower = line.text, line.lower
    if not any(word in lower for word in _OF_A_FIGURE) or any(word in lower for word in _OF_A_SHORTAGE):
        return
    figures = [] if _QUERY.search(text) or _GPU_USE.search(text) else figures_of(text)
    if not figures:
        return
    first, step = figures[0], step_of(text)
    # Lines with the same words before the figure were printed at the same point of the program's work.
    begin = 0 if step is not None or first.measure is Measure.TENSORS else first.start
    number = _NUMBER.search(text, first.start)
    words = _WORD.findall(text[begin : number.start() if number else None])[-_MOST_WORDS:]
    if step is None and (made := _WHILE_IT_IS_MADE.search(text)):
        words.insert(0, made[0].lower())
    sample = MemorySample(step=step, allocated_bytes=first.size_bytes)
    if first.measure is Measure.HOST:
        sample = MemorySample(step=step, rss_bytes=first.size_bytes)
    elif len(figures) > 1:
        sample = replace(sample, reserved_bytes=figures[1].size_bytes)
    length = _LENGTH.search(text)
    name = " ".join(filter(None, (line.writer, *words))) or "log"
    tokens = float(length[1]) if length else None
    builder.add_sample(name, sample, first.measure, is_peak=first.is_peak, length=tokens)


# The engine: vLLM's and SGLang's own log.

_GB = r"(\d{1,9}(?:\.\d{1,6})?)"
_ENGINE = re.compile(r"-packages/vllm/|\bvLLM\b|(?<!/)(?:\b|_)vllm\b(?!/)|EngineCore|LLMRayActor|VllmWorker|AsyncVLLM")
_SLEPT = re.compile(rf"Sleep mode freed -?{_GB} GiB memory, {_GB} GiB memory is still in use")
_SLEEP_LEVEL = re.compile(r"/sleep\?(?:\S{0,80}&)?level=(\d)|\bsleep\(level=(\d)\)")


def _gib(match: re.Match[str], group: int = 1) -> int:
    return round(float(match[group]) * GIB)


def _sum(match: re.Match[str]) -> int:
    return round(sum(float(size) for size in match.groups() if size) * GIB)


def _level(match: re.Match[str], known: int | None) -> int:
    level = int(match[1] or match[2])
    return level if known in (None, level) else 0


_OF_THE_ENGINE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], EngineRecord], Mapping[str, object]]], ...] = (
    (
        _SLEPT,
        lambda found, _: {
            "asleep": True,
            "freed_bytes": 0 if "freed -" in found[0] else _gib(found),
            "still_in_use_bytes": _gib(found, 2),
        },
    ),
    (
        re.compile(rf"sleep freed {_GB} GiB memory in total, of which {_GB} GiB is backed up in CPU"),
        lambda found, _: {"backed_up_bytes": _gib(found, 2)},
    ),
    (_SLEEP_LEVEL, lambda found, engine: {"sleep_level": _level(found, engine.sleep_level)}),
    (re.compile(r"seconds to fall asleep|/release_memory_occupation HTTP/\S+\" 200"), lambda *_: {"asleep": True}),
    (re.compile(r"seconds to wake up|/resume_memory_occupation HTTP/\S+\" 200"), lambda *_: {"asleep": False}),
    (
        re.compile(
            rf"(?:Model loading|Loading model weights) took {_GB} Gi?B|model weights take {_GB} ?GiB"
            rf"|Load weight end\..{{0,200}}mem usage={_GB} GB"
        ),
        lambda found, _: {"weights_bytes": _sum(found)},
    ),
    (
        re.compile(
            rf"Graph capturing finished in .{{1,20}} took {_GB} GiB|Capture cuda graph end\..{{0,80}}mem usage={_GB} GB"
        ),
        lambda found, _: {"graphs_bytes": _sum(found)},
    ),
    (
        re.compile(
            rf"(?:Available KV cache memory: |memory reserved for KV Cache is ){_GB} ?GiB"
            rf"|KV Cache is allocated.{{0,80}}K size: {_GB} GB, V size: {_GB} GB"
        ),
        lambda found, _: {"kv_cache_bytes": _sum(found)},
    ),
)
_ENGINES_WORDS = ("leep", "ccupation", "wake up", "took", "weight", "KV Cache", "KV cache", "Capture", "Graph")


def _note_engine(builder: EvidenceBuilder, line: LogLine) -> None:
    text = line.text
    if not builder.engine.seen and (
        (("llm" in line.lower or "engine" in line.lower) and _ENGINE.search(text)) or _ENGINE.search(line.writer)
    ):
        builder.engine = replace(builder.engine, seen=True)
    if not any(word in text for word in _ENGINES_WORDS):
        return
    for pattern, values in _OF_THE_ENGINE:
        if found := pattern.search(text):
            builder.engine = replace(builder.engine, seen=True, **values(found, builder.engine))  # type: ignore[arg-type]


# Tables: of nvidia-smi, of HAMi's shared GPUs, of `df`.

_GPU_PROCESS = re.compile(r"^\|?\s+(\d{1,3})\s+(?:\S+\s+\S+\s+)?(\d{1,10})\s+(?:C|C\+G)\s+\S.{0,80}?\s(\d{1,7})MiB \|")
_GPU_USE = re.compile(r"^\|.{10,60}\| +(\d{1,7})MiB / +(\d{1,7})MiB \|")
_GPU_HEAD = re.compile(r"^\|\s{1,4}(\d{1,3}) {1,4}\S")
"""The line above, with the GPU's number and name."""
_QUERY = re.compile(r"(?:^|, )(?P<gpu>\d{1,2}), (?P<used>\d{1,7}) MiB, {1,4}\d{3,7} MiB")
"""A line of `nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv`."""
_SHARED_GPU = re.compile(r"orig free=(\d{1,15}) total=(\d{1,15}) limit=\d{1,15} usage=(\d{1,15})")
"""HAMi's report of what is free on the GPU that it shares, and of the process's own use."""
_DF = re.compile(
    r"^(?:tmpfs|shm|none|/dev/shm)\s+(?P<size>\d{1,15}[KMGT]?)\s+(?P<used>\d{1,15}(?:\.\d)?[KMGT]?)\s+"
    r"\d{1,15}(?:\.\d)?[KMGT]?\s+\d{1,3}%\s+/dev/shm\s*$"
)
_BARRIER = "using GPU 0 to perform barrier as devices used by this process are currently unknown"


def _note_tables(builder: EvidenceBuilder, line: LogLine) -> None:
    text = line.text
    if "MiB |" in text and (match := _GPU_PROCESS.search(text)):
        builder.add_gpu_process(int(match[1]), GpuProcess(pid=int(match[2]), used_bytes=int(match[3]) * MIB))
    elif "MiB /" in text and (match := _GPU_USE.search(text)):
        builder.add_gpu_use(int(match[1]) * MIB, int(match[2]) * MIB)
        gpu = next((found[1] for above in reversed(line.above) if (found := _GPU_HEAD.match(above))), "")
        _add_use(builder, gpu, int(match[1]))
    elif "MiB, " in text and (match := _QUERY.search(text)):
        _add_use(builder, match["gpu"], int(match["used"]))
    elif "orig free=" in text and (match := _SHARED_GPU.search(text)):
        free, total, own = (int(size) for size in match.groups())
        builder.add_gpu_use(max(total - free - own, 0), total)
    elif "/dev/shm" in text and (host := shared_memory_of(text)) is not None:
        builder.add_host(host)
    elif _BARRIER in text:
        builder.barrier_on_gpu_0 = True


def _add_use(builder: EvidenceBuilder, gpu: str, used_mib: int) -> None:
    builder.add_sample(f"nvidia-smi GPU {gpu}".strip(), MemorySample(allocated_bytes=used_mib * MIB), Measure.GPU)


def shared_memory_of(line: str) -> MemorySample | None:
    """The sizes in a line of `df` about /dev/shm, with or without `-h`; None for other lines."""
    match = _DF.match(line)
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
_TRAINING_SCRIPT = re.compile(
    r"File \"(?:[^\"]{0,300}/)?(?:\w{1,40}_)?(?:(?:pre)?train|fine_?tune|sft|rlhf|dpo|grpo|ppo)(?:_\w{1,40})?\.py\""
)
_MARKS = tuple((mark, key) for key, program in PROGRAMS.items() for mark in program.recognize)
_OF_MEGATRON = re.compile(
    r"/megatron/(?:core|training)/|MegatronPolicyWorker|\bstrategy['\"]?[=:] ?['\"]?megatron"
    r"|megatron_c\w+\.enabled=[Tt]rue|\bmegatron (?:sft|rlhf|pt) "
)
_HOST_OWNER = re.compile(r"^\d{1,10}\s+(?P<gb>\d{1,6}\.\d{1,2})\s+(?P<task>ray::[\w.:]{1,100})")
"""A row of Ray's table of the largest users of host memory."""
_OF_RLJOB = re.compile(
    r"\brljob_(?:trainer|memory|probe)\b|\brljob\.dev/|^rljob(?:-probe)?: |^rljob \d{4}-|^warning: OutOfMemory: "
)
"""Frames, labels, marks and messages of RLJob."""


def _note_programs(builder: EvidenceBuilder, line: LogLine) -> None:
    text = line.text
    if ("rljob" in text or "OutOfMemory: " in text) and _OF_RLJOB.search(text):
        builder.is_of_rljob = True
    if "egatron" in text and _OF_MEGATRON.search(text):
        builder.backend = "megatron"
    if "ray::" in text and (owner := _HOST_OWNER.match(text)):
        builder.host_owners[owner["task"]] += round(float(owner["gb"]) * GIB)
    for mark, key in _MARKS:
        if (mark in text or mark in line.writer) and key not in builder.programs:
            builder.programs.append(key)
    if 'File "' in text and _TRAINING_SCRIPT.search(text):
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
                values = builder.option_values.setdefault(name, [])
                if match["value"] not in values and len(values) < _MOST_VALUES:
                    values.append(match["value"])
        for match in _FLAG.finditer(text) if "--" in text else ():
            builder.option_values.setdefault(match["name"].rpartition(".")[2], ["True"])
