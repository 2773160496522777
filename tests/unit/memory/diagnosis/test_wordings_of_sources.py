"""Messages as programs have them in their sources, and lines of theirs that only look like them."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.sizes import MIB

FRAME = '  File "{}", line 12, in {}\n    {}\n'
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 3 has a total capacity of 79.15 GiB "
    "of which 0.50 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the "
    "allocated memory 76.90 GiB is allocated by PyTorch, and 212.11 MiB is reserved by PyTorch but unallocated.\n"
)
SHORTAGES = {
    "vLLM's message queue": (
        FailureClass.SHARED_MEMORY,
        "RuntimeError: Insufficient space in /dev/shm for shared-memory message queue: 240 MiB required, 64 MiB free. "
        "Increase /dev/shm (e.g. --shm-size or --ipc=host).",
    ),
    "vLLM's longest sequence": (
        FailureClass.KV_CACHE_OVERSIZED,
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.",
    ),
    "vLLM's swap space": (
        FailureClass.HOST_MEMORY,
        "RuntimeError: Too large swap space. 64.00 GiB out of the 62.70 GiB total CPU memory is allocated for the swap "
        "space.",
    ),
    "NCCL's pinned memory": (FailureClass.HOST_MEMORY, "n1:4:8 [0] NCCL WARN Failed to CUDA host alloc 8388608 bytes"),
    "NCCL's memory of the host": (FailureClass.HOST_MEMORY, "n1:4:8 [0] NCCL WARN Failed to malloc 8388608 bytes"),
    "jemalloc": (FailureClass.HOST_MEMORY, "<jemalloc>: Error in malloc(): out of memory"),
    "Vertex AI": (FailureClass.HOST_MEMORY, "Replicas low on memory: workerpool0. To find out more, check the logs"),
    "a mail of Slurm": (FailureClass.HOST_MEMORY, "Slurm Job_id=411 Name=grpo Ended, OUT_OF_MEMORY"),
    "gunicorn": (FailureClass.HOST_MEMORY, "[error] Worker (pid:4121) was sent SIGKILL! Perhaps out of memory?"),
    "joblib": (FailureClass.HOST_MEMORY, "TerminatedWorkerError: The exit codes of the workers are {SIGKILL(-9)}"),
    "Podman": (FailureClass.HOST_MEMORY, 'level=debug msg="container died" exit-code=137 oom-killed=true'),
    "HTCondor": (FailureClass.HOST_MEMORY, "Job was held. Code 34: memory usage exceeded request_memory"),
    "a container on a node for GPUs": (
        FailureClass.HOST_MEMORY,
        "error: gpu-worker: container 'main' was killed: memory limit exceeded (64Gi)",
    ),
    "DeepSpeed's locked pages": (
        FailureClass.HOST_MEMORY,
        "mlock failed to allocate 17179869184 bytes with error no 12",
    ),
    "DeepSpeed's workspace": (FailureClass.UNKNOWN, "RuntimeError: Workspace can't be allocated, no enough memory."),
    "accelerate's last batch size": (
        FailureClass.UNKNOWN,
        "RuntimeError: No executable batch size found, reached zero.",
    ),
    "German": (
        FailureClass.UNKNOWN,
        "FEHLER: GPU-Speicher reicht nicht aus, das Training wurde nach Schritt 3 beendet",
    ),
    "FSDP's flat parameters": (
        FailureClass.MODEL_WEIGHTS,
        FRAME.format("torch/distributed/fsdp/_flat_param.py", "flatten_tensors_into_flat_param", "torch.cat(flat)")
        + FULL,
    ),
    "DeepSpeed's partitions": (
        FailureClass.MODEL_WEIGHTS,
        FRAME.format("deepspeed/runtime/zero/partition_parameters.py", "_partition_param", "torch.empty(size)") + FULL,
    ),
    "quantized layers": (
        FailureClass.MODEL_WEIGHTS,
        FRAME.format("exllamav2/linear.py", "load", "self.q_tensors[k] = w.to(self.device())") + FULL,
    ),
    "bitsandbytes' parameters": (
        FailureClass.MODEL_WEIGHTS,
        FRAME.format("transformers/integrations/bitsandbytes.py", "create_quantized_param", "value.to(device)") + FULL,
    ),
    "Megatron's experts": (
        FailureClass.ACTIVATION_SPIKE,
        FRAME.format("megatron/core/transformer/moe/moe_utils.py", "permute", "tokens.index_select(0, indices)") + FULL,
    ),
    "Megatron's main parameters": (
        FailureClass.OPTIMIZER_STATE,
        FRAME.format("megatron/core/optimizer/optimizer.py", "__init__", "param.detach().clone().float()") + FULL,
    ),
}
LOOKALIKES = {
    "vLLM's warning about swap": "WARNING config.py:480] Possibly too large swap space. 16.00 GiB out of 31.20 GiB.",
    "XLA's vector memory": "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack.",
    "Triton's shared memory": "out of resource: shared memory, Required: 163840, Hardware limit: 101376",
    "TensorFlow's second try": "W bfc_allocator.cc:290] Allocator (GPU_0_bfc) ran out of memory trying to allocate "
    "2.13GiB. The caller indicates that this is not a failure, but there could be performance gains.",
    "DeepSpeed's choice of a device": "[2026-01-02 10:00:00,123] [INFO] [stage_1_and_2.py:445:__init__] Flattening "
    "param group 0 on CPU (insufficient memory)",
    "counts of a cgroup": "max 1231\noom 0\noom_kill 0\noom_group_kill 0",
    "a memory of samples": "AssertionError: insufficient samples in memory bank (12 < 64)",
    "columns of a table": "model,oom,tokens/s\n7b,False,1200",
    "counts of none": "oom_events: 0\nnum_ooms: 0, num_alloc_retries: 0\nOOM count: 0",
    "a watcher": '{"level":"info","msg":"Starting to watch for OOM events"}',
    "counts of torch": "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |",
    "a batch that fairseq skips": "WARNING: ran out of memory with exception: CUDA out of memory. Tried to allocate "
    "2.00 GiB (GPU 0; 31.75 GiB total capacity); skipping batch\nepoch 002 | CUDA memory 12 GB",
    "requests that SGLang postpones": "[2026-01-02 10:00:00] Decode out of memory happened. #retracted_reqs: 1",
    "a table of locks": "ERROR:  out of shared memory\nHINT:  You might need to increase max_locks_per_transaction.",
    "processes that a script ends": "Killed 4 stale ray processes from the last run",
    "advice": "Tip: use gradient checkpointing to avoid CUDA out of memory.",
    "a list of changes": "- Fix an out of memory error in the data loader",
    "code": "    except torch.cuda.OutOfMemoryError:\n        raise RuntimeError('CUDA out of memory')",
    "an address": "ValueError: the index is out of bounds in memory bank 3",
}


def evidence_of(text: str) -> EvidenceBuilder:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(f"step 7\n{text}\n".encode()))
    return builder


@pytest.mark.parametrize("program", SHORTAGES)
def test_a_message_of_a_source_is_diagnosed(program: str) -> None:
    expected, text = SHORTAGES[program]
    assert [found.failure_class for found in diagnose(evidence_of(text).build())][:1] == [expected]


@pytest.mark.parametrize("program", LOOKALIKES)
def test_a_line_that_looks_like_a_message_is_not_diagnosed(program: str) -> None:
    assert diagnose(evidence_of(LOOKALIKES[program]).build()) == []


def test_the_space_that_a_segment_requires_is_read() -> None:
    failure = evidence_of(SHORTAGES["vLLM's message queue"][1]).build().failure
    assert failure is not None
    assert failure.sizes == {"wanted_bytes": 240 * MIB}


@pytest.mark.parametrize(
    "words", ["CUDA out of memory when the loss is made", "step 3 can't continue: CUDA out of memory."]
)
def test_words_before_a_failure_are_not_taken_for_advice(words: str) -> None:
    assert diagnose(evidence_of(f"ERROR {words}").build()) != []


@pytest.mark.parametrize(("message", "confidence"), [("CUDA out of memory.", 0.8), ("CUDA error: out of memory", 0.65)])
def test_an_optimizers_state_is_likelier_with_torchs_own_message(message: str, confidence: float) -> None:
    frame = FRAME.format("deepspeed/runtime/zero/stage3.py", "initialize_optimizer_states", "self._optimizer_step(i)")
    best = diagnose(evidence_of(f"{frame}RuntimeError: {message}").build())[0]
    assert (best.failure_class, best.confidence) == (FailureClass.OPTIMIZER_STATE, confidence)
