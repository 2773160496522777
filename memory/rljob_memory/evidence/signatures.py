"""The wordings of each kind of failure: torch, vLLM, SGLang, JAX, NCCL, cuBLAS, Ray, Slurm, kernel, kubelet, glibc.

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
        r"is less than (?:desired GPU memory utilization|the engine's budget after excluding .{0,40}weights) "
        rf"\({_GIB}, (?P<wanted_gib>{_GIB}) GiB\)",
    ),
    _signature(
        FailureKind.ENGINE_PROFILING,
        # If nothing changed, the check itself is at fault: the device reports no use at all.
        r"Error in memory profiling\. Initial free memory(?! ([^,]{1,30}), current free memory \1\.)"
        rf"(?: (?P<initial_free>{SIZE}), current free memory "
        rf"(?P<current_free>{SIZE}))?",
    ),
    _signature(FailureKind.ENGINE_WARM_UP, r"CUDA out of memory occurred when warming up sampler"),
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL,
        r"No available memory for the cache blocks"
        r"|Cannot auto-fit max_model_len: not enough"
        r"|Externally held weights on device .{0,60}exceed the desired GPU memory utilization",
    ),
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL,
        rf"(?P<needed_gib>{_GIB}) GiB KV cache is needed, which is larger than the available KV cache memory "
        rf"\((?P<available_gib>{_GIB}) GiB\)",
    ),
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL,
        r"is larger than the maximum number of tokens that can be stored in KV cache"
        r"|maxTokensInPagedKvCache must be large enough"  # TensorRT-LLM
        r"|Aborted due to the lack of CPU swap space",  # vLLM up to 0.6: no blocks for preempted sequences
    ),
    # The room for the cache is what the share leaves after the weights: less than nothing, in vLLM and in SGLang.
    _signature(FailureKind.KV_CACHE_TOO_SMALL, r"Available KV cache memory: -\d|larger than the profiled value -\d"),
    # SGLang, and torch_memory_saver, which maps its memory again (sglang/srt, csrc/utils.h).
    _signature(
        FailureKind.KV_CACHE_TOO_SMALL,
        r"[Tt]ry (?:to increas|increas)(?:e|ing) --mem-fraction-static|[Nn]ot? enough (?:GPU|gpu) memory for runtime"
        r"|[Nn]ot enough (?:GPU )?memory.{0,60}(?:KV|kv)[ _-]?cache|(?:KV|kv)[ _-]?cache.{0,60}: not enough memory"
        r"|(?:KV|kv)[ _-]?cache ?不[足够]"
        # The token pool; a `Decode out of memory happened` is a notice, after which requests are retracted.
        r"|\b(?:Prefill|Decode|Extend) out of memory\. Try to lower your batch size",
    ),
    _signature(FailureKind.ENGINE_UNBALANCED, r"[Mm]emory capacity is unbalanced"),
    _signature(FailureKind.ENGINE_WARM_UP, r"Capture (?:cuda|CUDA) graph failed: (?!CUDA out of).{0,80}out of memory"),
    _signature(
        FailureKind.ENGINE_WAKE,
        r"CUresult error.{0,80}\bresult=2\b.{0,300}\bfunc=resume\b"
        r"|torch_memory_saver\S{0,20} .{0,120}(?:out of memory|ERROR_OUT_OF_MEMORY)",
    ),
    # TGI and LoRAX, whose warm-up tries the largest prefill.
    _signature(FailureKind.KV_CACHE_TOO_SMALL, r"Not enough memory to handle .{0,60}\btokens\b"),
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
    # vLLM, before it makes a segment
    _signature(
        FailureKind.SHARED_MEMORY,
        r"(?:[Ii]nsufficient|[Nn]ot? enough|\b[Nn]o) (?:free |available )?(?:space|room)(?: left| available)? "
        rf"(?:in|on|at) \W{{0,2}}/dev/shm\b(?:.{{0,80}}?: (?P<wanted>{SIZE}) required)?",
    ),
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
    _signature(
        FailureKind.SHARED_MEMORY,
        r"\bout of shared memory|insufficient shared memory \(shm\)",
    ),
    # A volume in memory that outgrew its limit: the kubelet evicts the pod.
    _signature(
        FailureKind.SHARED_MEMORY,
        r"[Uu]sage of EmptyDir volume \W{1,3}[\w-]{0,60}shm[\w-]{0,60}\W{1,3} exceeds the limit",
    ),
    # joblib's probe of semaphores, which are files in /dev/shm.
    _signature(FailureKind.SEMAPHORE, r"No space left on device.{0,10}joblib will operate in serial mode"),
    _signature(
        FailureKind.OBJECT_STORE,
        r"ObjectStoreFullError|Failed to put object \w+ in object store because it is full"
        r"(?:\. Object size is (?P<wanted_bytes>\d{1,15}) bytes)?",
    ),
    _signature(FailureKind.BUS_ERROR, r"\bBus error\b|\bSIGBUS\b|exitcode\s*: -7\b"),
    # RAPIDS' allocator on the GPU, whose message opens like that of malloc.
    _signature(FailureKind.DRIVER, r"std::bad_alloc: (?:out_of_memory: )?(?:CUDA|RMM)"),
    # Host memory. Before the GPU: Ray's class has torch's name.
    _signature(
        FailureKind.HOST,
        r"was (?:running was )?(?P<used_gib>[\d.]{1,12})GB(?: used)? / "
        r"(?P<limit_gib>[\d.]{1,12})GB(?: limit)? \([\d.]+\)",
    ),
    _signature(
        FailureKind.HOST,
        r"ray\.exceptions\.OutOfMemoryError|\bRayOutOfMemoryError\b|due to the node running low on memory"
        r"|NODE_OUT_OF_MEMORY"
        r"|\b[1-9]\d{0,6} Workers \(tasks / actors\) killed due to memory pressure \(OOM\)|OOM kill reason: "
        # In a line that was broken before it, where none crashed for another reason: Ray reports no two zeros.
        r"|^\s*actors\) killed due to memory pressure \(OOM\), 0 Workers crashed"
        r"|exceeds the memory usage threshold of|Ray killed this worker"
        # Parts of the report, which logs cut, reverse or glue together. The first one ends every report.
        r"|documentation on how to address the out of memory issue"
        r"|Memory on the node \(IP: [^()]{1,200}\) where the (?:task|actor|lease|worker)\b"
        r"|\bPID\s+MEM\(GB\)\s+COMMAND\b",
    ),
    _signature(  # up to Ray 2.1
        FailureKind.HOST,
        r"Used memory \((?P<used_gib>[\d.]{1,12})GB\) / total capacity \((?P<limit_gib>[\d.]{1,12})GB\) "
        r"\([\d.]{1,12}\) exceeds threshold|System memory low at node with IP",
    ),
    _signature(
        FailureKind.HOST, r"More than \d+% of the memory on node \S+ is used \((?P<used_gib>[\d.]{1,9}) / [\d.]+ GB\)"
    ),
    _signature(
        FailureKind.HOST,
        r"[Oo]ut of memory: Kill(?:ed)? process \d+.{0,100}?(?:anon-rss:(?P<used_kib>\d{1,12})kB|$)",
    ),
    _signature(
        FailureKind.HOST,
        # The kernel's report around it: functions of its trace, the container's limit.
        r"\b(?:mem_cgroup_|pagefault_)?out_of_memory\+0x|\boom_kill_process\b|killed as a result of limit of /"
        r"|\bmemory: usage \d{1,15}kB, limit \d{1,15}kB, failcnt [1-9]"
        r"|\bKilled process \d+,? .{1,60}total-vm:\d{1,15}kB, anon-rss:(?P<used_kib>\d{1,12})kB",
    ),
    _signature(
        FailureKind.HOST,
        r"(?<![=!]= )(?<![=!]= [\"'])\bOOMKilled\b(?!\W{1,5}false)|\bOOMKilling\b"
        r"|oom-kill:constraint=|invoked oom-killer"
        r"|container init was OOM-killed",  # runc, whose limit has no room for the container's first process
    ),
    # Slurm's step daemon, and the state that sacct prints.
    _signature(
        FailureKind.HOST,
        r"Detected [1-9]\d* oom[-_ ]kill event|killed by the cgroup out-of-memory handler"
        r"|Exceeded (?:job|step) memory limit|\bState\s*[:=]\s*OUT_OF_ME|\bOUT_OF_ME(?:MORY|\+)\s+\d+:\d+"
        r"|: tasks? [\d,[\]-]{1,60}: Out Of Memory|\b(?:Ended|Failed|State|Reason)\b.{0,80}\bOUT_OF_ME(?:MORY)?\b",
    ),
    # The kubelet: eviction under pressure, and the kernel's killer outside of all containers.
    _signature(
        FailureKind.HOST,
        r"[Tt]he node was low on resource: memory|[Tt]he node had condition: \[[^\]]{0,100}MemoryPressure"
        r"|System OOM encountered, victim process"
        r"|[Ee]viction manager: (?:attempting to reclaim|must evict pod\(s\) to reclaim).{0,20}"
        r"resourceName=\W{0,2}memory"
        r"|EvictionThresholdMet\b.{0,200}[Aa]ttempting to reclaim memory",
    ),
    # vLLM on a CPU, in a container whose limit it nearly fills.
    _signature(
        FailureKind.HOST,
        rf"Available memory on node \d{{1,4}} \({_GIB}/{_GIB} GiB\) on (?:startup|kv cache allocation) is less than",
    ),
    # The kernel's table of all processes, which it prints when it selects one to kill.
    _signature(
        FailureKind.HOST,
        r"^(?:.{0,60}?\] ?)?\[ {0,8}\d{1,8}\] +\d{1,6} +\d{1,8}(?: +\d{1,12}){3,7} +-?\d{1,4} [\w(]\S{0,40}$"
        r"|\bpid\b.{1,30}\btotal_vm\b.{1,80}\boom_score_adj\b",
    ),
    _signature(FailureKind.HOST, r"^oom_kill(?:_group)? [1-9]\d*$|^oom_group_kill [1-9]\d*$"),
    _signature(
        FailureKind.HOST,
        r"DefaultCPUAllocator: (?:[Cc]an't allocate|not enough) memory"
        r"(?:: you tried to allocate (?P<wanted_bytes>\d{1,15}) bytes)?",
    ),
    _signature(FailureKind.HOST, r"MemoryError: Unable to allocate (?P<wanted>[\d.]{1,12} [KMGT]iB) for an array"),
    _signature(
        FailureKind.HOST, r"\bstd::bad_alloc\b|\bCannot allocate memory\b(?! in static TLS)|^MemoryError$|\bENOMEM\b"
    ),
    _signature(FailureKind.HOST, r"ArrowMemoryError|\bmalloc of size (?P<wanted_bytes>\d{1,15}) failed"),
    # Other killers and queues: systemd, earlyoom, LSF, PBS, HTCondor, Colab; Windows, whose page file is too small.
    _signature(
        FailureKind.HOST,
        r"killed by the OOM killer|Failed with result 'oom-kill'|oom_reaper: reaped process"
        r"|systemd-oomd\[\d+\]: Killed"
        r"|sending SIG(?:TERM|KILL) to process \d+ .{0,80}badness",
    ),
    _signature(
        FailureKind.HOST,
        r"TERM_MEMLIMIT|reaching LSF memory usage limit|PBS: job killed: (?:v?mem|pmem)"
        r"|gone over (?:cgroup )?memory limit|exceed\w* (?:the )?request(?:ed)?_memory"
        r"|(?i:\boom[-_]killed\W{0,2}[:=] ?\W?true\b)"
        r"|running beyond (?:physical|virtual) memory|for exceeding memory limits"
        r"|(?:using|used) all available RAM|\b[Jj]ob \S{1,40} (?:has )?exceeded (?:its |the )?(?:requested )?memory"
        r"|[Yy]our (?:notebook|session) (?:tried to allocate more memory|used too much RAM|ran out of (?:RAM|memory))",
    ),
    _signature(
        FailureKind.HOST, r"(?:WinError|os error) 1455|[Pp]aging file is too small|JavaScript heap out of memory"
    ),
    # allocators of the host
    _signature(
        FailureKind.HOST, r"\b(?:je|tc|mi)malloc\b.{0,80}(?:out of memory|unable to alloc|\bfailed\b|== \(nil\))"
    ),
    _signature(FailureKind.HOST, r"\bmemory allocation of (?P<wanted_bytes>\d{1,15}) bytes failed"),
    _signature(
        FailureKind.HOST,
        rf"requires more system memory \((?P<wanted>{SIZE})\) than is available(?: \((?P<free>{SIZE})\))?",
    ),
    # vLLM's swap space; NCCL on the host; Vertex AI
    _signature(
        FailureKind.HOST,
        r"\bToo large swap space\b|Failed to (?:malloc|(?:CUDA|HIP) host alloc) (?P<wanted_bytes>\d{1,15}) bytes"
        r"|\bReplicas? low on memory\b",
    ),
    _signature(FailureKind.HOST, r"java\.lang\.OutOfMemoryError|fatal error: runtime: out of memory"),
    # A limit on the process's share of the GPU: torch's, when it rejects a request early; HAMi's library.
    _signature(FailureKind.LIMIT, r"would exceed per_process_memory_fraction limit"),
    _signature(
        FailureKind.LIMIT,
        # Its counter of bytes has 20 digits if it fell below zero.
        r"\[(?:HAMI-core|\w*vGPU) ERROR.{0,120}OOM.{0,20}?\s(?:usage=)?(?P<used_bytes>\d{1,20})(?: / | limit=)"
        r"(?P<limit_bytes>\d{1,15})",
    ),
    # The GPU, beside torch's allocator.
    _signature(
        FailureKind.NCCL, r"Failed to (?:CUDA|HIP) (?:calloc|malloc)(?: async)? (?P<wanted_bytes>\d{1,15}) bytes"
    ),
    _signature(FailureKind.NCCL, r"(?:Cuda|HIP|CUDA) failure (?:\d+ )?'out of memory'"),
    _signature(FailureKind.MATH_LIBRARY, r"\b(?:CU|HIP|ROC|MI)[A-Z]{2,9}_(?:STATUS_)?ALLOC_FAILED"),
    _signature(FailureKind.MATH_LIBRARY, r"(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"),
    _signature(
        FailureKind.DRIVER,
        r"(?:CUDA|HIP|cuda|hip)(?: driver| runtime)? error(?: \(2\))?:? ?:? out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|(?:CUDA|HIP) runtime error in .{0,200}: out of memory|of pinned memory: out of memory"
        r"|hipErrorOutOfMemory|cudaErrorMemoryAllocation"
        r"|\bcuM\w{0,20}Alloc\w*(?:\(\))? failed,? \(?res(?:ult)?=2\b"
        r"|cudaGetDeviceCount\(\)\..{0,200}Error 2: out of memory",
    ),
    _signature(FailureKind.DRIVER, r"!!! Exception during processing !!! Allocation on device|^Allocation on device\b"),
    _signature(
        FailureKind.DRIVER,
        r"(?:^|\s)torch\.(?:cuda\.)?OutOfMemoryError(?:: \S|\W{0,2}$)|\bc10::(?:cuda::)?OutOfMemoryError\b",
    ),
    _signature(FailureKind.DRIVER, r"No executable batch size found, reached zero"),  # accelerate, after every size
    # torch's report of a shortage asks NVML, which refuses on a MIG slice and on a Jetson (pytorch 112377, 185240).
    _signature(FailureKind.DRIVER, r"NVML_SUCCESS == r\w{0,10} INTERNAL ASSERT FAILED at .{0,200}CUDACachingAllocator"),
    # JAX and TensorFlow: XLA's allocator.
    _signature(
        FailureKind.DRIVER,
        r"(?:RESOURCE_EXHAUSTED|ResourceExhaustedError|Resource exhausted).{0,80}(?:[Oo]ut of memory|OOM)"
        rf"(?:.{{0,60}}allocat\w+ (?:(?P<wanted_bytes>\d{{1,15}}) bytes|(?P<wanted>{SIZE})))?",
    ),
    _signature(
        FailureKind.DRIVER,
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted): (?:[\w :]{0,60}: )?"
        r"(?:Attempting to (?:reserve|allocate)|Error allocating|Ran out of|Failed to alloc|Out *$)",
    ),
    # Triton, cupy, ONNX Runtime, TensorRT, MindSpore.
    _signature(FailureKind.DRIVER, r"Triton Error \[\w{2,6}\]: out of memory|cupy\.cuda\.memory\.OutOfMemoryError"),
    _signature(
        FailureKind.DRIVER,
        r"BFCArena::AllocateRaw.{0,80}requested buffer of size (?P<wanted_bytes>\d{1,15})"
        r"|Error Code 2: OutOfMemory(?: \(Requested size was (?P<requested_bytes>\d{1,15}) bytes)?"
        r"|Out of Memory!!! Request memory size: (?P<size_bytes>\d{1,15})",
    ),
    # Intel, Ascend, llama.cpp, bitsandbytes, CUDA IPC.
    _signature(
        FailureKind.DRIVER,
        r"allocating (?P<wanted>[\d.]{1,12} [KMG]iB) on device \d{1,4}: \w+ failed: out of memory"
        r"|(?:cuda|hip|npu|acl)(?:rt)?(?:Malloc|HostAlloc|MemCreate)\w*(?:\(\))? (?:failed|returned)"
        r"|(?:unable|failed) to allocate (?:CUDA|ROCm|HIP|SYCL|Vulkan|Metal)\w{0,8} buffer\b|ErrorOutOfDeviceMemory"
        r"|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|OUT_OF_DEVICE_MEMORY|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
        r"|Error out of memory at line \d+ in file|CUresult error.{0,80}\bresult=2\b|(?:rt|Malloc).{0,80}\b207001\b"
        r"|The NPU memory is not enough|EL0004|\bMemory not enough: current free memory size",
    ),
    # The least specific ones come last.
    _signature(FailureKind.HOST, r"(?<!except )(?<!raise )\bMemoryError(?=:|\s*$)(?!.{0,200}(?:CUDA|cuda|GPU))"),
    _signature(
        FailureKind.LOST,
        r"killed by SIGKILL by OOM killer due to high memory usage|may have exceeded K8s pod memory limits",
    ),
    _signature(
        FailureKind.KILLED,
        r"is killed by signal: Killed|\bsignal: killed\b|\bsignal:? 9 ?\(SIGKILL\)"
        r"|exitcode\s*[:=] -9\b|Signal 9 \(SIGKILL\)|exit code: -9\b"
        r"|return code = -9\b|died with <Signals\.SIGKILL: 9>|returned non-zero exit status 137\b"
        r"|\bwas sent SIGKILL\b|\bSIGKILL\(-9\)"
        r"|\bsignal: 9, SIGKILL|terminated with signal SIGKILL"
        r"|\b(?:exited|terminated|killed) (?:on|by) signal:? 9\b|\bKilled \(signal 9\)|KILLED BY SIGNAL: 9\b",
    ),
    _signature(
        FailureKind.KILLED,
        # shells, make, Compose
        r"^(?:[A-Z]{4,8} )?(?:zsh: |\[\d{1,4}\] {1,4}[+-]? *\d{1,8} +)killed\b"
        r"|\bmake(?:\[\d+\])?: \*\*\* \[.{1,100}\] (?:Killed|Error 137)"
        r"|\b(?:exited|failed|terminated|finished) with (?:exit )?(?:code|status) 137\b",
    ),
    _signature(
        FailureKind.KILLED,
        r"[Ee]xit[ _]?[Cc]ode\"?(?:\s*[:=]|\s+(?:is|of))?\s*\"?137\b|\bExited \(137\)"
        r"|^.{0,300}: line \d+: +\d+ Killed\b|^Killed(?:: ?9)?(?: {2,}\S.*)?\W{0,6}$"
        r"|^(?:[A-Z]{4,8} )?\W{1,6}Killed\W{0,6}$",
    ),
)

_EXIT_STATUS = re.compile(r"[Ee]xit[ _]?[Cc]ode|Exited \(|exited with")
_FACTORS = {"gib": 1 << 30, "kib": 1 << 10, "bytes": 1}


def match_signature(text: str, across: int | None = None) -> tuple[FailureKind, dict[str, int]] | None:
    """The kind of failure in `text` and the sizes that it names, each as `<name>_bytes`; None if it has no failure.

    `across`: a position that the words of the failure must lie on both sides of.
    """
    for signature in SIGNATURES:
        match = signature.pattern.search(text)
        if match and (across is None or match.start() < across < match.end()):
            sizes = {
                f"{name.rsplit('_', 1)[0]}_bytes": size
                for name, value in match.groupdict().items()
                if value is not None and (size := _group_bytes(name, value)) is not None
            }
            return signature.kind, sizes
    return None


def is_exit_status(text: str) -> bool:
    """True if `text` shows a container's exit code, beside which its runtime names the reason."""
    return _EXIT_STATUS.search(text) is not None


def _group_bytes(name: str, value: str) -> int | None:
    factor = _FACTORS.get(name.rsplit("_", 1)[-1])
    if factor is None:
        return size_bytes(value)
    try:
        return round(float(value) * factor)
    except ValueError:
        return None


COMPILED = re.compile(r"\bExceeded hbm capacity by\b")
"""XLA's report of a program that it compiled: all of its memory is known, and none is another program's."""
CORRUPT_SIZE = "Tried to allocate more than 1EB memory"
"""Part of a broken message after a timeout: worded like a full GPU, with a size that was never requested."""
