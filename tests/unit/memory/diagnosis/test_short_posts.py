"""Diagnoses of posts with one line of code, half a message, or another program's report instead of a stack."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

OLD = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {} (GPU 0; 31.75 GiB total capacity; {}"
FULL = OLD.format("1.50 GiB", "29.28 GiB already allocated; 0.95 GiB free; 29.30 GiB reserved in total by PyTorch)")
NEW = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} is free. {}"
WITHOUT_NUMBERS = "RuntimeError: CUDA error: out of memory"
TABLE = "| N/A   54C    P0   246W / 300W |  {:>5}MiB / 16130MiB |    100%      Default |"
LLAMA = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: cudaMalloc failed: out of memory"
)

POSTS = {
    "the optimizer's code": (
        FailureClass.OPTIMIZER_STATE,
        f"denom = (exp_avg_sq.sqrt() / correction).add_(eps)\n{FULL}",
    ),
    "backward's code": (
        FailureClass.ACTIVATION_SPIKE,
        f"    Variable._execution_engine.run_backward(  # Calls into the C++ engine\n{FULL}",
    ),
    "attention's code": (
        FailureClass.ACTIVATION_SPIKE,
        f"    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)\n{FULL}",
    ),
    "the code of Module.to": (
        FailureClass.MODEL_WEIGHTS,
        f"    return t.to(device, dtype if t.is_floating_point() else None, non_blocking)\n{FULL}",
    ),
    "functions behind arrows": (
        FailureClass.ACTIVATION_SPIKE,
        "  → get_next_token_logprobs   (model_utils.py:83)\n  → from_parallel_logits_to_logprobs (model_utils.py:12)\n"
        "torch.OutOfMemoryError: Tried to allocate 12.60 GiB. GPU had 12.44 GiB free of 79.19",
    ),
    "two processes, message cut": (
        FailureClass.FOREIGN_PROCESS,
        NEW.format(
            "1.02 GiB",
            "79.15 GiB of which 410.75 MiB",
            "Process 81 has 41.22 GiB memory in use. Process 90 has 37.51 GiB memory in use. Of the allo",
        ),
    ),
    "its own process, message cut": (
        FailureClass.FOREIGN_PROCESS,
        NEW.format(
            "200.00 MiB",
            "23.64 GiB of which 101.75 MiB",
            "Including non-PyTorch memory, this process has 2.51 GiB memory in use.",
        ),
    ),
    "its own process fills the GPU, message cut": (
        FailureClass.UNKNOWN,
        NEW.format("200.00 MiB", "23.64 GiB of which 101.75 MiB", "Process 81 has 23.51 GiB memory in use."),
    ),
    "a limit, with HIP's graphs": (
        FailureClass.GPU_MEMORY_LIMIT,
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of "
        "255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by "
        "PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch "
        "but unallocated.",
    ),
    "a full GPU in a table": (
        FailureClass.FOREIGN_PROCESS,
        f"{TABLE.format(15514)}\n{TABLE.format(3)}\n{WITHOUT_NUMBERS}",
    ),
    "free GPUs in a table": (FailureClass.UNKNOWN, f"{TABLE.format(12)}\n{TABLE.format(3)}\n{WITHOUT_NUMBERS}"),
    "llama.cpp's weights": (
        FailureClass.MODEL_WEIGHTS,
        f"{LLAMA}\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 9437184000",
    ),
    "llama.cpp's work": (
        FailureClass.KV_CACHE_OVERSIZED,
        f"{LLAMA}\nggml_gallocr_reserve_n: failed to allocate CUDA0 buffer\n"
        "graph_reserve: failed to allocate compute buffers",
    ),
    "llama.cpp's pinned memory": (
        FailureClass.HOST_MEMORY,
        "ggml_cuda_host_malloc: failed to allocate 1900.00 MiB of pinned memory: out of memory",
    ),
    "a prefill of TGI": (
        FailureClass.KV_CACHE_OVERSIZED,
        "ERROR batch{batch_size=1}:prefill{id=9 size=1}: text_generation_client: router/client/src/lib.rs:33: "
        f"Server error: {FULL}",
    ),
    "an engine that fills the GPU before its cache": (
        FailureClass.MODEL_WEIGHTS,
        "(EngineCore_DP0 pid=556) ERROR 12-24 08:50:35 [core.py:866] "
        + NEW.format(
            "80.00 MiB",
            "139.72 GiB of which 60.69 MiB",
            "Process 691 has 139.65 GiB memory in use. Of the allocated memory 139.21 GiB is allocated by PyTorch, and "
            "12.81 MiB is reserved by PyTorch but unallocated.",
        ),
    ),
    "a message inside another program's": (
        FailureClass.KV_CACHE_OVERSIZED,
        'thread main panicked at Unable to warmup model: Generation("Allocation on device 0 would exceed allowed '
        "memory. (out of memory)\\nCurrently allocated     : 16.08 GiB\\nRequested               : 4.83 GiB\\n"
        'Device limit            : 22.20 GiB\\nFree (according to CUDA): 11.12 MiB")',
    ),
    "a resume of torch_memory_saver": (
        FailureClass.ALLOCATOR_CACHE,
        "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=182",
    ),
    "the numbers alone": (
        FailureClass.FOREIGN_PROCESS,
        "Tried to allocate 64.00 MiB (GPU 1; 31.75 GiB total capacity; 1.20 GiB already allocated; 12.00 MiB free; "
        "1.40 GiB reserved in total by Pytorch)",
    ),
    "the numbers of torch alone": (
        FailureClass.FRAGMENTATION,
        "CUDA out of memory. Tried to allocate 14.10 GiB.\nOf the allocated memory 50.24 GiB is allocated by PyTorch,\n"
        "and 12.50 GiB is reserved by PyTorch but unallocated.",
    ),
    "the memory of an empty GPU": (
        FailureClass.UNKNOWN,
        NEW.format(
            "20.00 GiB",
            "15.90 GiB of which 15.70 GiB",
            "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
            "unallocated.",
        ),
    ),
    "a code line in a quotation": (
        FailureClass.ACTIVATION_SPIKE,
        f">       return torch.nn.functional.cross_entropy(logits, labels)\nE       {FULL}",
    ),
    "logits in MPS": (
        FailureClass.ACTIVATION_SPIKE,
        "    scaled = logits[:, -1] / temperature\n             ~~~~~~~~~~~~~~^~~~~~~~~~~~~\n"
        "RuntimeError: MPS backend out of memory (MPS allocated: 12.74 GB, max allowed: 18.13 GB). Tried to allocate "
        "1.02 GB on private pool.",
    ),
    "a raise without its message": (
        FailureClass.KV_CACHE_OVERSIZED,
        '  File "/x/kv_cache_utils.py", line 69, in check\n    raise ValueError("No available memory for the cache '
        'blocks. "\n                     "Try increasing `gpu_memory_utilization`.")',
    ),
    "a notebook's head of a traceback": (
        FailureClass.KV_CACHE_OVERSIZED,
        "> OutOfMemoryError                          Traceback (most recent call last)\n"
        "> File /x/vllm/v1/worker/gpu_model_runner.py:1874, in GPUModelRunner.profile_run(self)\n>   1873 try:",
    ),
    "an error in vLLM's log": (
        FailureClass.KV_CACHE_OVERSIZED,
        "ERROR 03-27 10:29:13 [worker_base.py:620] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 MiB.",
    ),
    "a component of TensorRT-LLM": (
        FailureClass.KV_CACHE_OVERSIZED,
        "[TRT-LLM] [E] Executor creation failed due to insufficient GPU memory.\n\n"
        "The following component could not be created: KV cache",
    ),
    "less than no room for the cache": (
        FailureClass.KV_CACHE_OVERSIZED,
        "max_total_tokens=4096 is larger than the profiled value -1200. Use the profiled value instead.",
    ),
    "a tensor larger than any GPU": (
        FailureClass.ACTIVATION_SPIKE,
        LLAMA.replace("9000.00", "400000.00"),
    ),
    "the clones of a state dict": (
        FailureClass.WEIGHT_SYNC_SPIKE,
        "UserWarning: Failed to clone() tensor with name lm_head.weight. This may mean that this state_dict entry "
        f"could point to invalid memory regions after returning from state_dict() call. Error: {FULL}",
    ),
    "a model that failed to load": (
        FailureClass.MODEL_WEIGHTS,
        f"{FULL}\n\nThe diffusion model failed to load",
    ),
    "the optimizer of a checkpoint": (
        FailureClass.OPTIMIZER_STATE,
        f'  File "/x/train.py", line 9, in resume\n    self.optim.load_state_dict(torch.load(path))\n'
        f'  File "/x/site-packages/torch/serialization.py", line 387, in load\n    return _load(f)\n{FULL}',
    ),
    "a shared GPU that others filled": (
        FailureClass.FOREIGN_PROCESS,
        "[HAMI-core Msg(1:2:memory.c:512)]: orig free=35835084 total=4227727360 limit=4294967296 usage=8520704\n"
        "[HAMI-core ERROR (pid:1 thread=2 allocator.c:121)]: cuMemoryAllocate failed res=2",
    ),
    "another process in a list": (
        FailureClass.FOREIGN_PROCESS,
        "RuntimeError: cuda runtime error (2) : out of memory\n"
        "|    0     3231      C   python                                      9773MiB |\n"
        "|    0     3487      C   python                                       317MiB |",
    ),
    "a usage above HAMi's limit": (
        FailureClass.GPU_MEMORY_LIMIT,
        "[4pdvGPU ERROR (pid:9 thread=1 limit.c:2)]: device OOM encountered: usage=9502195712 limit=8388608000",
    ),
    "Ray's table of users": (
        FailureClass.HOST_MEMORY,
        "PID\tMEM(GB)\tCOMMAND\n4012\t11.20\tray::Worker.rollout",
    ),
    "contexts in a table": (
        FailureClass.CONTROLLER_CONTEXT,
        "\n".join(
            f"|    0   N/A  N/A   {30 + n}      C   ./train      {26167 if n == 0 else 871}MiB |" for n in range(5)
        ),
    ),
    "weights that a sleep leaves": (
        FailureClass.ENGINE_NOT_ASLEEP,
        "CuMemAllocator: sleep freed 20.1 GiB memory in total, of which 0.00 GiB is backed up in CPU and the rest\n"
        "Sleep mode freed 21.00 GiB memory, 17.25 GiB memory is still in use.\nPOST /sleep?level=1 HTTP/1.1",
    ),
    "growth in plain bytes": (
        FailureClass.RETAINED_GRAPH,
        "\n".join(f"CUDA memory after optimizer step {9} : {n}120000000" for n in range(5, 14)),
    ),
    "growth without a failure": (
        FailureClass.RETAINED_GRAPH,
        "\n".join(f"step {step} memory allocated: {10 + 0.7 * step:.2f} GB reserved: 60.1 GB" for step in range(12)),
    ),
}


NAMED_BY_THE_MESSAGE = (FailureClass.GPU_MEMORY_LIMIT, FailureClass.HOST_MEMORY)


def best_of(text: str) -> Diagnosis:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return diagnose(builder.build())[0]


@pytest.mark.parametrize("post", POSTS)
def test_a_short_post_is_diagnosed_and_without_certainty(post: str) -> None:
    expected, text = POSTS[post]
    best = best_of(text)
    assert best.failure_class is expected
    assert best.confidence <= (0.8 if expected not in NAMED_BY_THE_MESSAGE else 0.95)


@pytest.mark.parametrize("line", ["OSError: [Errno 12] Cannot allocate memory", "terminate called: std::bad_alloc"])
def test_one_request_of_a_process_does_not_show_a_full_host(line: str) -> None:
    best = best_of(line)
    assert best.failure_class is FailureClass.HOST_MEMORY
    assert best.confidence < 0.8
