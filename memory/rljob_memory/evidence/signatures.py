"""The wordings of each kind of failure: torch, vLLM, NCCL, cuBLAS, Ray, the kernel, the kubelet, glibc.

The first pattern that fits a line names its kind. A named group is a size with the name of the group.
The message of torch's allocator can span lines and has a module of its own, `allocator_message`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rljob_memory.evidence.failure import FailureKind
from rljob_memory.sizes import SIZE, size_bytes


@dataclass(frozen=True, slots=True)
class Signature:
    kind: FailureKind
    pattern: re.Pattern[str]


def _signature(kind: FailureKind, pattern: str) -> Signature:
    return Signature(kind, re.compile(pattern))


_GIB = r"\d{1,9}(?:\.\d{1,6})?"

SIGNATURES: tuple[Signature, ...] = (
    # vLLM. The last group is of the engine's start, in the order of vllm/v1/worker/gpu_worker.py.
    _signature(
        FailureKind.ENGINE_WAKE,
        r"(?:CUDA|HIP) Error: out of memory at \S{0,300}cumem_allocator"
        r"|Failed to wake up allocator: .{0,500}out of memory",
    ),
    _signature(FailureKind.ENGINE_SLEEP, r"Memory usage increased after sleeping"),
    _signature(
        FailureKind.ENGINE_START,
        rf"Free memory on device (?:\w+:\d+ )?\((?P<free_gib>{_GIB})/(?P<total_gib>{_GIB}) GiB\) on startup "
        rf"is less than desired GPU memory utilization \({_GIB}, (?P<wanted_gib>{_GIB}) GiB\)",
    ),
    _signature(
        FailureKind.ENGINE_PROFILING,
        rf"Error in memory profiling\. Initial free memory(?: (?P<initial_free>{SIZE}), current free memory "
        rf"(?P<current_free>{SIZE}))?",
    ),
    _signature(FailureKind.ENGINE_WARM_UP, r"CUDA out of memory occurred when warming up sampler"),
    _signature(FailureKind.KV_CACHE_TOO_SMALL, r"No available memory for the cache blocks"),
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL,
        rf"(?P<needed_gib>{_GIB}) GiB KV cache is needed, which is larger than the available KV cache memory "
        rf"\((?P<available_gib>{_GIB}) GiB\)",
    ),
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL, r"is larger than the maximum number of tokens that can be stored in KV cache"
    ),
    # /dev/shm. Before the rest of NCCL and of Ray, which write there.
    _signature(FailureKind.SHARED_MEMORY, r"failed to extend /dev/shm/\S{1,200} to (?P<wanted_bytes>\d{1,15}) bytes"),
    _signature(
        FailureKind.SHARED_MEMORY,
        r"Error while creating shared memory segment \S{1,200} \(size (?P<wanted_bytes>\d{1,15})\)"
        r".{0,100}No space left",
    ),
    _signature(
        FailureKind.SHARED_SEGMENT,
        r"Error while creating shared memory segment \S{1,200} \(size (?P<wanted_bytes>\d{1,15})\)",
    ),
    _signature(FailureKind.SHARED_MEMORY, r"Call to posix_fallocate failed ?: No space left on device"),
    _signature(
        FailureKind.SHARED_MEMORY, r"No space left on device.{0,40}/dev/shm|/dev/shm.{0,200}No space left on device"
    ),
    _signature(
        FailureKind.SHARED_MEMORY,
        r"unable to (?:write to file|(?:open|allocate) shared memory).{0,30}</torch_[^>]{0,100}>.{0,300}"
        r"(?:No space left on device|Cannot allocate memory)"
        # Both of these end in the errno of an earlier call.
        r"|unable to (?:write to file|allocate shared memory\(shm\) for file) </torch_[^>]{0,100}>",
    ),
    _signature(FailureKind.SHARED_MEMORY, r"out of shared memory|insufficient shared memory \(shm\)"),
    _signature(
        FailureKind.OBJECT_STORE,
        r"ObjectStoreFullError|Failed to put object \w+ in object store because it is full"
        r"(?:\. Object size is (?P<wanted_bytes>\d{1,15}) bytes)?",
    ),
    _signature(FailureKind.BUS_ERROR, r"\bBus error\b|\bSIGBUS\b|exitcode\s*: -7\b"),
    # Host memory. Before the GPU: Ray's class has torch's name.
    _signature(
        FailureKind.HOST,
        r"was (?:running was )?(?P<used_gib>[\d.]{1,12})GB(?: used)? / "
        r"(?P<limit_gib>[\d.]{1,12})GB(?: limit)? \([\d.]+\)",
    ),
    _signature(
        FailureKind.HOST,
        r"ray\.exceptions\.OutOfMemoryError|due to the node running low on memory|NODE_OUT_OF_MEMORY"
        r"|[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure \(OOM\)|OOM kill reason: ",
    ),
    _signature(
        FailureKind.HOST, r"More than \d+% of the memory on node \S+ is used \((?P<used_gib>[\d.]{1,9}) / [\d.]+ GB\)"
    ),
    _signature(
        FailureKind.HOST,
        r"[Oo]ut of memory: Kill(?:ed)? process \d+.{0,100}?(?:anon-rss:(?P<used_kib>\d{1,12})kB|$)",
    ),
    _signature(FailureKind.HOST, r"\bOOMKilled\b|\bOOMKilling\b|oom-kill:constraint=|invoked oom-killer"),
    _signature(FailureKind.HOST, r"The node was low on resource: memory"),
    # vLLM on a CPU, in a container whose limit it nearly fills.
    _signature(
        FailureKind.HOST,
        rf"Available memory on node \d{{1,4}} \({_GIB}/{_GIB} GiB\) on (?:startup|kv cache allocation) is less than",
    ),
    _signature(FailureKind.HOST, r"^oom_kill(?:_group)? [1-9]\d*$|^oom_group_kill [1-9]\d*$"),
    _signature(
        FailureKind.HOST,
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: "
        r"you tried to allocate (?P<wanted_bytes>\d{1,15}) bytes",
    ),
    _signature(FailureKind.HOST, r"MemoryError: Unable to allocate (?P<wanted>[\d.]{1,12} [KMGT]iB) for an array"),
    _signature(FailureKind.HOST, r"\bstd::bad_alloc\b|\[Errno 12\] Cannot allocate memory|^MemoryError$"),
    # The GPU, beside torch's allocator.
    _signature(
        FailureKind.NCCL, r"Failed to (?:CUDA|HIP) (?:calloc|malloc)(?: async)? (?P<wanted_bytes>\d{1,15}) bytes"
    ),
    _signature(FailureKind.NCCL, r"(?:Cuda|HIP|CUDA) failure (?:\d+ )?'out of memory'"),
    _signature(
        FailureKind.MATH_LIBRARY, r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    ),
    _signature(FailureKind.MATH_LIBRARY, r"CUBLAS_STATUS_NOT_INITIALIZED"),
    _signature(
        FailureKind.DRIVER,
        r"(?:CUDA|HIP|cuda|hip)(?: driver| runtime)? error(?: \(2\))?:? ?:? out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|hipErrorOutOfMemory|cudaErrorMemoryAllocation|Allocation on device \d+ would exceed allowed memory"
        r"|cudaGetDeviceCount\(\)\..{0,200}Error 2: out of memory",
    ),
    _signature(FailureKind.DRIVER, r"(?:^|\s)torch\.(?:cuda\.)?OutOfMemoryError: \S"),
    # The least specific ones come last.
    _signature(FailureKind.KILLED, r"killed by SIGKILL by OOM killer due to high memory usage"),
    _signature(
        FailureKind.KILLED, r"is killed by signal: Killed|exitcode\s*: -9\b|Signal 9 \(SIGKILL\)|exit code: -9\b"
    ),
    _signature(
        FailureKind.KILLED, r"[Ee]xit[ _]?[Cc]ode\"?\s*[:=]?\s*\"?137\b|^(?:.{0,300}: line \d+: +\d+ )?Killed\b"
    ),
)

_FACTORS = {"gib": 1 << 30, "kib": 1 << 10, "bytes": 1}


def match_signature(text: str) -> tuple[FailureKind, dict[str, int]] | None:
    """The kind of failure in `text` and the sizes that it names, each as `<name>_bytes`; None if it has no failure."""
    for signature in SIGNATURES:
        if match := signature.pattern.search(text):
            sizes = {
                f"{name.rsplit('_', 1)[0]}_bytes": size
                for name, value in match.groupdict().items()
                if value is not None and (size := _group_bytes(name, value)) is not None
            }
            return signature.kind, sizes
    return None


def _group_bytes(name: str, value: str) -> int | None:
    factor = _FACTORS.get(name.rsplit("_", 1)[-1])
    if factor is None:
        return size_bytes(value)
    try:
        return round(float(value) * factor)
    except ValueError:
        return None


CORRUPT_SIZE = "Tried to allocate more than 1EB memory"
"""Part of a broken message after a timeout: worded like a full GPU, with a size that was never requested."""

_SECONDARY: tuple[tuple[str, str], ...] = (
    ("NCCL watchdog timeout", r"Watchdog caught collective operation timeout|Timeout at NCCL work|NCCL timeout"),
    ("corrupt size after a timeout", re.escape(CORRUPT_SIZE)),
    ("actor died", r"ActorDiedError|RayActorError|The actor died unexpectedly|WorkerCrashedError"),
    ("engine died", r"EngineDeadError|EngineCore_?\S* died unexpectedly|EngineCore encountered a fatal error"),
    ("connection lost", r"Broken ?pipe|Connection (?:reset|closed) by (?:remote )?peer|Socket recv failed"),
    ("launcher report", r"ChildFailedError|Sending process \d+ closing signal SIGTERM|Signal 15 \(SIGTERM\)"),
    ("NCCL abort", r"NCCL communicator was aborted|ncclRemoteError|Process group watchdog thread terminated"),
)
_SECONDARY_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _SECONDARY)


def secondary_name(text: str) -> str | None:
    """The name of a consequence of a failure elsewhere; None if the text is not one."""
    for name, pattern in _SECONDARY_PATTERNS:
        if pattern.search(text):
            return name
    return None
