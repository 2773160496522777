"""Pairs of logs that differ in one fact, which decides between two causes."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

WAKE = "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
TRAINER = "verl: actor_rollout_ref.rollout.gpu_memory_utilization={}\n"
KV_CACHE = "INFO gpu_worker.py: Available KV cache memory: 13.77 GiB\n"
NCCL = "node3:3063028 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes"
RESERVE = (
    "RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory. That was not possible. There are {} "
    "free, 0B reserved, and {} reservable."
)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 1 has a total capacity of 22.09 GiB "
    "of which 758.44 MiB is free. Of the allocated memory 20.90 GiB is allocated by PyTorch, and 85.19 MiB is "
    "reserved by PyTorch but unallocated."
)
PROFILING = (
    "Loading model weights took {} GB\n"
    '  File "/opt/vllm/worker/worker.py", line 187, in determine_num_available_blocks\n'
    "    self.model_runner.profile_run()\n"
)
WARM_UP = '  File "/opt/vllm/v1/worker/gpu_worker.py", line 216, in compile_or_warm_up_model\n    self._dummy_run(1)\n'
GRAPHS = FULL.replace("1.95 GiB", "20.00 MiB").replace(
    ", and", ", with 84.91 MiB allocated in private pools (e.g., CUDA Graphs), and"
)
BESIDE_A_SLEEPING_ENGINE = GRAPHS.replace(
    "Of the allocated memory 20.90",
    "Including non-PyTorch memory, this process has 22.05 GiB memory in use. Of the allocated memory 31.90",
)
FORWARD = '  File "/opt/model.py", line 12, in forward\n    x = self.mlp(x)\n'
ROOM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB "
    "of which {} is free. Of the allocated memory {} is allocated by PyTorch, and 1.93 GiB is reserved by PyTorch but "
    "unallocated."
)
PAIRS = [
    # an engine with most of the GPU, and one that leaves the trainer room: then torch's cache is in the way
    (FailureClass.KV_CACHE_OVERSIZED, TRAINER.format(0.82) + WAKE),
    (FailureClass.ALLOCATOR_CACHE, TRAINER.format(0.5) + WAKE),
    # an engine alone, at its start, and one beside a trainer
    (FailureClass.KV_CACHE_OVERSIZED, KV_CACHE + WAKE),
    (FailureClass.ALLOCATOR_CACHE, TRAINER.format(0.5) + KV_CACHE + WAKE),
    # NCCL alone, and beside a trainer, which has a cache
    (FailureClass.UNKNOWN, NCCL),
    (FailureClass.ALLOCATOR_CACHE, TRAINER.format(0.5) + NCCL),
    # enough memory in pieces that are too small, and too little memory
    (FailureClass.FRAGMENTATION, RESERVE.format("6.78G", "3.33G")),
    (FailureClass.UNKNOWN, RESERVE.format("3.78G", "3.33G")),
    # the profiling pass fills the GPU, and the weights do
    (FailureClass.ACTIVATION_SPIKE, PROFILING.format("10.0714") + FULL),
    (FailureClass.KV_CACHE_OVERSIZED, PROFILING.format("19.5") + FULL),
    # one large tensor of the profiling pass, and of a warm-up after it
    (FailureClass.ACTIVATION_SPIKE, PROFILING.partition("\n")[2] + FULL.replace("1.95", "3.95")),
    (FailureClass.KV_CACHE_OVERSIZED, PROFILING.partition("\n")[2] + FULL),
    (FailureClass.KV_CACHE_OVERSIZED, WARM_UP + FULL.replace("1.95", "3.95")),
    # CUDA graphs of a process that nothing else shows, and of one that trains
    (FailureClass.KV_CACHE_OVERSIZED, GRAPHS),
    (FailureClass.UNKNOWN, GRAPHS + '\n[rank3]:   File "/env/site-packages/swift/cli/rlhf.py", line 7, in <module>\n'),
    # an engine that sleeps in the process has no cache at that time: torch counts memory that the GPU does not have
    (FailureClass.UNKNOWN, BESIDE_A_SLEEPING_ENGINE),
    # a small request beside a full and beside an empty GPU
    (FailureClass.ACTIVATION_SPIKE, FORWARD + ROOM.format("1.00 MiB", "285.00 GiB")),
    (FailureClass.UNKNOWN, FORWARD + ROOM.format("203.49 GiB", "68.63 GiB")),
]


@pytest.mark.parametrize(("expected", "text"), PAIRS)
def test_one_fact_decides(expected: FailureClass, text: str) -> None:
    builder = EvidenceBuilder()
    LogReader(builder, "train.log").read(BytesIO(f"{text}\n".encode()))
    assert diagnose(builder.build())[0].failure_class is expected
