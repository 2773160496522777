"""Facts in a log beside failures: the engine's sleep, memory over time, processes on the GPU, /dev/shm, versions."""

from __future__ import annotations

import re
from dataclasses import replace

from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import GpuProcess
from rljob_memory.evidence.host import shared_memory_of
from rljob_memory.evidence.log_lines import LogLine
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB, SIZE, size_bytes

_GB = r"(\d{1,9}(?:\.\d{1,6})?)"
_SLEPT = re.compile(rf"Sleep mode freed (-?[\d.]{{1,9}}) GiB memory, {_GB} GiB memory is still in use")
_WOKE = re.compile(r"seconds to wake up")
_KV_CACHE = re.compile(rf"Available KV cache memory: {_GB} GiB")
_ENGINE = re.compile(r"-packages/vllm/|\bvLLM\b|(?<!/)(?:\b|_)vllm\b(?!/)|EngineCore|LLMRayActor|VllmWorker|AsyncVLLM")
_ENGINE_VERSION = re.compile(r"LLM engine \(v(\d+\.\d+[\w.+-]{0,40})\)")
_TORCH_VERSION = re.compile(r"PyTorch version\s*:\s*(\d+\.\d+[\w.+-]{0,30})")
_VERL_MEMORY = re.compile(rf"^(.{{0,80}}?)[,:]? memory allocated \(GB\): {_GB}, memory reserved \(GB\): {_GB}")
_DEEPSPEED_MEMORY = re.compile(rf"\bMA {_GB} GB\s+Max_MA {_GB} GB\s+CA {_GB} GB")
_ANY_MEMORY = re.compile(rf"(?:memory[_ ])?allocated\b[\w ()]{{0,20}}[:=]\s{{0,4}}({SIZE})", re.IGNORECASE)
_RESERVED = re.compile(rf"reserved\b[\w ()]{{0,20}}[:=]\s{{0,4}}({SIZE})", re.IGNORECASE)
_GPU_PROCESS = re.compile(r"^\|?\s+(\d{1,3})\s+(?:\S+\s+\S+\s+)?(\d{1,10})\s+(?:C|C\+G)\s+\S.{0,80}?\s(\d{1,7})MiB \|")
_BARRIER = re.compile(r"using GPU 0 to perform barrier as devices used by this process are currently unknown")


def note(builder: EvidenceBuilder, line: LogLine) -> bool:
    """Add the facts in a line to `builder`. True if the line cannot contain anything else."""
    text = line.text
    return (
        _note_engine(builder, text)
        or _note_memory(builder, line)
        or _note_process(builder, text)
        or _note_version(builder, text)
    )


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
    if _WOKE.search(text):
        builder.engine = replace(builder.engine, seen=True, asleep=False)
        return True
    if match := _KV_CACHE.search(text):
        builder.engine = replace(builder.engine, seen=True, kv_cache_bytes=round(float(match[1]) * GIB))
        return True
    return False


def _note_memory(builder: EvidenceBuilder, line: LogLine) -> bool:
    text = line.text
    if match := _VERL_MEMORY.search(text):
        name, allocated, reserved = f"{line.writer} {match[1].strip()}".strip(), match[2], match[3]
        sample = _sample_of_gib(allocated, reserved)
        builder.add_sample(name or "log", sample)
        return True
    if match := _DEEPSPEED_MEMORY.search(text):
        builder.add_sample(line.writer or "log", _sample_of_gib(match[1], match[3]))
        return True
    if "out of memory" not in text and (match := _ANY_MEMORY.search(text)):
        allocated_bytes = size_bytes(match[1])
        reserved_match = _RESERVED.search(text)
        if allocated_bytes is not None:
            reserved_bytes = size_bytes(reserved_match[1]) if reserved_match else None
            sample = MemorySample(allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes or 0)
            builder.add_sample(line.writer or "log", sample)
            return True
    return False


def _sample_of_gib(allocated: str, reserved: str) -> MemorySample:
    return MemorySample(allocated_bytes=round(float(allocated) * GIB), reserved_bytes=round(float(reserved) * GIB))


def _note_process(builder: EvidenceBuilder, text: str) -> bool:
    if match := _GPU_PROCESS.search(text):
        builder.add_gpu_process(int(match[1]), GpuProcess(int(match[2]), int(match[3]) * MIB))
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
