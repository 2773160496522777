"""One shortage in the words of many programs: the kind is read from each, and none is left without an answer."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import FailureKind
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.sizes import GIB

WORDINGS = [
    # SGLang, torch_memory_saver
    (FailureKind.KV_CACHE_TOO_SMALL, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    (
        FailureKind.ENGINE_WAKE,
        "[torch_memory_saver.cpp] CUresult error: out of memory result=2 file=core.cpp func=resume",
    ),
    (FailureKind.KV_CACHE_TOO_SMALL, "Prefill out of memory. Try to lower your batch size."),
    (FailureKind.KV_CACHE_TOO_SMALL, "RuntimeError: Decode out of memory. Try to lower your batch size."),
    (
        FailureKind.ENGINE_UNBALANCED,
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
    # ollama, celery, YARN
    (FailureKind.DRIVER, "llama runner: error loading model: unable to allocate CUDA0 buffer"),
    (FailureKind.KILLED, "llama runner process has terminated: signal: killed"),
    (FailureKind.KILLED, "WorkerLostError: Worker exited prematurely: signal 9 (SIGKILL) Job: 3."),
    (FailureKind.KILLED, "Container killed on request. Exit code is 137"),
    # joblib
    (
        FailureKind.SEMAPHORE,
        "_multiprocessing_helpers.py:46: UserWarning: [Errno 28] No space left on device.  joblib will operate in "
        "serial mode",
    ),
    # vLLM from 0.32 on, beside weights that another process holds
    (
        FailureKind.ENGINE_START,
        "ValueError: Free memory on device cuda:0 (59.6/139.8 GiB) on startup is less than the engine's budget after "
        "excluding external process's weights (0.9, 110.5 GiB). Decrease GPU memory utilization",
    ),
    (
        FailureKind.KV_CACHE_TOO_SMALL,
        "ValueError: Externally held weights on device cuda:0 (61.0/139.8 GiB) exceed the desired GPU memory "
        "utilization (0.4, 55.9 GiB). Increase GPU memory utilization",
    ),
    # runc
    (
        FailureKind.HOST,
        "runc create failed: unable to start container process: container init was OOM-killed (memory limit too low?)",
    ),
    # the kernel's report around a kill, which posts begin and end anywhere
    (FailureKind.HOST, "[ 4523.1] [  7958]  1000  7958     5195      440    86016      416             0 python3"),
    (
        FailureKind.HOST,
        "[Thu Mar 20 21:01:25 2025] [   2665]     0  2665    55756      339    77824       68   0 crond",
    ),
    (FailureKind.HOST, " [<ffffffff811ff363>] mem_cgroup_out_of_memory+0x2b3/0x300"),
    (FailureKind.HOST, "Task in /docker/a4d4 killed as a result of limit of /docker/a4d4"),
    (FailureKind.HOST, "memory: usage 229600kB, limit 262144kB, failcnt 5148"),
    # Python, notebooks, shells, make
    (FailureKind.HOST, "MemoryError: bad allocation"),
    (FailureKind.HOST, "Your notebook tried to allocate more memory than is available. It has restarted."),
    (FailureKind.HOST, "Job 1234 has exceeded memory limit: 64 GB used"),
    (FailureKind.KILLED, "[1]    12345 killed     python train.py"),
    (FailureKind.KILLED, "zsh: killed     python train.py"),
    (FailureKind.KILLED, "make: *** [Makefile:3: train] Error 137"),
    (FailureKind.KILLED, "trainer-1 exited with code 137"),
    (FailureKind.KILLED, "**Killed**"),
    (FailureKind.KV_CACHE_TOO_SMALL, "部署多节点权重加载完会报错kv cache不足"),
    # Slurm
    (FailureKind.HOST, "srun: error: nid001277: tasks 1-3: Out Of Memory"),
    (
        FailureKind.HOST,
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of the step tasks have been killed",
    ),
    (FailureKind.HOST, "slurmstepd: error: Detected 3 oom_kill events in StepId=921.batch."),
    (FailureKind.HOST, "srun: error: node07: task 3: Out Of Memory"),
    (FailureKind.HOST, "123456             train        gpu    default          8 OUT_OF_ME+    0:125"),
    # launchers
    (FailureKind.KILLED, "[launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9"),
    (FailureKind.KILLED, "subprocess.CalledProcessError: Command '['python', 'x.py']' died with <Signals.SIGKILL: 9>."),
    # Ray's memory monitor
    (
        FailureKind.HOST,
        "Memory on the node (IP: 10.0.0.1) was 59.9GB / 63.0GB (0.951), over the threshold; Ray killed this worker",
    ),
    (
        FailureKind.HOST,
        "node_manager.cc:2966: System memory low at node with IP 10.0.0.1. Used memory (54.90GB) / total capacity "
        "(57.60GB) (0.95307) exceeds threshold 0.95, killing latest task with name f",
    ),
    (
        FailureKind.HOST,
        "12\tray::IDLE Refer to the documentation on how to address the out of memory issue: "
        "https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html. Consider provisioning more memory",
    ),
    (FailureKind.HOST, "7Memory on the node (IP: 10.0.3.220, ID: d8d86d) where the task (task ID: b909, name=dask:('s"),
    (
        FailureKind.LOST,
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage",
    ),
    # kubelet
    (
        FailureKind.HOST,
        "Pod Evicted: The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi.",
    ),
    (FailureKind.HOST, "Status: Failed Reason: Evicted Message: The node had condition: [MemoryPressure]."),
    (FailureKind.HOST, "Warning  SystemOOM  kubelet  System OOM encountered, victim process: python, pid: 4242"),
    (FailureKind.HOST, 'eviction_manager.go:366] "Eviction manager: attempting to reclaim" resourceName="memory"'),
    (FailureKind.SHARED_MEMORY, 'Usage of EmptyDir volume "dshm" exceeds the limit "10Gi".'),
    (FailureKind.HOST, '"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}'),
    # JAX, TensorFlow
    (
        FailureKind.DRIVER,
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
    ),
    (
        FailureKind.DRIVER,
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[64,512]",
    ),
    # other devices and libraries
    (
        FailureKind.ALLOCATOR,
        "MPS backend out of memory (MPS allocated: 9.02 GB, max allowed: 9.07 GB). Tried to allocate 64.00 MB.",
    ),
    (
        FailureKind.DRIVER,
        "ggml_backend_cuda: allocating 5000.00 MiB on device 0: cudaMalloc failed: out of memory",
    ),
    (FailureKind.DRIVER, "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: include/rmm/cuda_device.hpp"),
    (FailureKind.DRIVER, "RuntimeError: Triton Error [CUDA]: out of memory"),
    (
        FailureKind.DRIVER,
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016',
    ),
    (
        FailureKind.DRIVER,
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: 1 bytes).",
    ),
    (
        FailureKind.DRIVER,
        "JaxRuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 2G.",
    ),
    (
        FailureKind.DRIVER,
        "onnxruntime::BFCArena::AllocateRawInternal(size_t) Failed to allocate memory for requested buffer of size 9",
    ),
    (
        FailureKind.DRIVER,
        "[E] Error[2]: resizePhysical::140] Error Code 2: OutOfMemory (Requested size was 214 bytes.)",
    ),
    (FailureKind.MATH_LIBRARY, "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED"),
    (FailureKind.MATH_LIBRARY, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    (FailureKind.KV_CACHE_TOO_SMALL, "RuntimeError: Not enough memory. Please try increasing --mem-fraction-static."),
    (
        FailureKind.KV_CACHE_TOO_SMALL,
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
        "in KV cache (30736).",
    ),
    (FailureKind.LIMIT, "[HAMI-core ERROR (pid:1 thread=2 allocator.c:52)]: Device 0 OOM 9000000000 / 8000000000"),
    (
        FailureKind.LIMIT,
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit.",
    ),
    # killers and queues
    (
        FailureKind.HOST,
        'earlyoom[901]: sending SIGTERM to process 4242 uid 1000 "python": badness 987, VmRSS 60123 MiB',
    ),
    (FailureKind.HOST, "systemd[1]: train.service: A process of this unit has been killed by the OOM killer."),
    (FailureKind.HOST, "oom_reaper: reaped process 4242 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB"),
    (FailureKind.HOST, "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit."),
    (FailureKind.HOST, "=>> PBS: job killed: mem 67110912kb exceeded limit 67108864kb"),
    (FailureKind.HOST, "Your session crashed after using all available RAM."),
    (FailureKind.HOST, "OSError: [WinError 1455] The paging file is too small for this operation to complete."),
    (FailureKind.HOST, "polars.exceptions.ComputeError: memory allocation of 8589934592 bytes failed"),
    (FailureKind.HOST, "Error: model requires more system memory (24.0 GiB) than is available (15.2 GiB)"),
    (FailureKind.DRIVER, "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"),
    (FailureKind.HOST, "pyarrow.lib.ArrowMemoryError: malloc of size 4294967296 failed"),
    (FailureKind.HOST, "OSError: Cannot allocate memory (12) while mapping shard-00001.safetensors"),
    (
        FailureKind.HOST,
        "[ 514.68] Killed process 15617 (python3), UID 0, total-vm:118920kB, anon-rss:4292kB, file-rss:3kB",
    ),
    (FailureKind.HOST, "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on"),
    (FailureKind.KILLED, 'c715  trainer:1  "python3 -m train"  8 days ago  Exited (137) 27 hours ago  trainer_1'),
    # serving
    (
        FailureKind.KV_CACHE_TOO_SMALL,
        "Server error: Not enough memory to handle 4096 prefill tokens. You need to decrease",
    ),
    (FailureKind.ENGINE_WAKE, "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h line=104"),
    (FailureKind.ENGINE_WAKE, "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY"),
    (
        FailureKind.DRIVER,
        "unexpected error when creating the instance: [TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync("
        "ptr, n, pool, stream): out of memory (tllmBuffers.h:115)",
    ),
    (FailureKind.DRIVER, "ggml_cuda_host_malloc: failed to allocate 1900.00 MiB of pinned memory: out of memory"),
    # XLA, of before
    (
        FailureKind.DRIVER,
        "RuntimeError: Resource exhausted: Failed to allocate request for 32.00MiB on device ordinal 0",
    ),
    (
        FailureKind.DRIVER,
        "Execution of replica 0 failed: Resource exhausted: Out of memory while trying to allocate 5 bytes.",
    ),
    (
        FailureKind.DRIVER,
        "RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 11.14G at the bottom of memory.",
    ),
    (FailureKind.DRIVER, "RuntimeError: EZ9999: Inner Error! rtMalloc failed, runtime result = 207001."),
    # nobody's
    (FailureKind.UNFAMILIAR, "FrobnicatorError: the accelerator ran out of device memory at layer 7"),
    (FailureKind.UNFAMILIAR, "F0102 03:04:05 arena.cc:77] Check failed: failed to allocate 512 MiB for the arena"),
    (FailureKind.UNFAMILIAR, "ERROR engine: insufficient GPU memory to load the model"),
    (FailureKind.UNFAMILIAR, "worker 3 aborted: memory limit exceeded"),
    (FailureKind.UNFAMILIAR, "the host is running low on memory, killing the latest worker"),
]

HARMLESS = [
    "INFO: set expandable_segments to avoid out of memory errors",
    "WARNING: if you run out of memory, lower --micro-batch-size",
    "WARNING: GPU OOM caught, retrying with half of the batch",
    "KV cache pool is full. Retract requests. #retracted_reqs: 1",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840, Hardware limit: 101376",
    '"lastState": {"OOMKilled": false, "ExitCode": 1}',
    "oom_score_adj is set to 0",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "slurmstepd: error: Detected 0 oom-kill event(s)",
    "[10:00:01 TP0] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.7",
    "ImportError: libgomp.so.1.0.0: cannot allocate memory in static TLS block",
    "ImportError: libgomp.so.1.0.0: Cannot allocate memory in static TLS block",
    "Pod Evicted: The node was low on resource: ephemeral-storage.",
    "The node had condition: [DiskPressure].",
    'Usage of EmptyDir volume "data" exceeds the limit "10Gi".',
    "WARNING: if the node is low on memory, tasks are killed",
    "*** SIGSEGV received at time=1718 on cpu 3 ***",
    "OSError: [Errno 28] No space left on device",
    # other reasons of what may be a shortage
    "    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    137",
    '{"lastState":{"terminated":{"exitCode":137,"finishedAt":"2024-01-01T00:00:00Z","reason":"Error"}}}',
    '"OOMKilled": false,\n"ExitCode": 137,',
    "Container vllm failed liveness probe, will be restarted\n      Exit Code:    137",
    "slurmstepd: error: *** STEP 4414.0 ON n1 CANCELLED DUE TO PREEMPTION ***\nsrun: error: n1: tasks 0-7: Killed",
    "WARN Call to shm_open failed : Permission denied\nWARN Error while creating shared memory segment x (size 4)",
    "AssertionError: Error in memory profiling. Initial free memory 94.12 GiB, current free memory 94.12 GiB. This",
    # documentation
    "You may also see `OOMKilled` in `kubectl describe pod`; raise the memory limit then.",
    "If the log ends with `torch.OutOfMemoryError: CUDA out of memory.`, lower the share of the engine.",
    "RUNTIME_GPU_OOM, or torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate <N> MiB...",
    "OUT_OF_MEMORY (can also look like OUT_OF_ME+): the job tried using more memory than it requested.",
    # a limit on locked memory, and others
    "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "RuntimeError: unable to open shared memory object </torch_40_39> in read-write mode: Too many open files (24)",
    "Instance was terminated by Spot interruption notice; exit code: 137",
    # memory that does not grow, or grows while a model is made
    "\n".join(f"step {step} memory allocated: {12 + step % 3} GB reserved: 20 GB" for step in range(12)),
    "\n".join(f"step:{step} - perf/max_memory_allocated_gb:{30 + step}.1 - lr:0.1" for step in range(12)),
    "\n".join(f"after loading shard {shard} allocated: {2 + shard} GB" for shard in range(12)),
]


def evidence_of(text: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return builder.build()


@pytest.mark.parametrize(
    "prefix", ["", "(Worker pid=812, ip=10.0.0.4) ", "[rank3]: ", "2026-11-23 07:10:11,123 ERROR "]
)
@pytest.mark.parametrize(("kind", "line"), WORDINGS)
def test_a_wording_has_its_kind(kind: FailureKind, line: str, prefix: str) -> None:
    failure = evidence_of(f"step 7\n{prefix}{line}\nbye\n").failure
    assert failure is not None
    assert failure.kind is kind


@pytest.mark.parametrize("line", HARMLESS)
def test_a_mention_of_memory_is_no_failure(line: str) -> None:
    assert diagnose(evidence_of(f"start\n{line}\nValueError: wrong shape\n")) == []


def test_an_unfamiliar_failure_is_quoted() -> None:
    best = diagnose(evidence_of("FrobnicatorError: the accelerator ran out of device memory at layer 7\n"))[0]
    assert best.failure_class is FailureClass.UNKNOWN
    assert "FrobnicatorError: the accelerator ran out of device memory at layer 7" in best.message


def test_a_familiar_failure_outweighs_an_earlier_unfamiliar_one() -> None:
    evidence = evidence_of("ERROR engine: insufficient GPU memory\nslurmstepd: error: Detected 1 oom-kill event(s)\n")
    assert evidence.failure is not None
    assert evidence.failure.kind is FailureKind.HOST


def test_the_request_of_xla_is_read() -> None:
    line = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
    failure = evidence_of(line).failure
    assert failure is not None
    assert failure.sizes == {"wanted_bytes": 8 * GIB}
