"""Posts whose failing message is missing: the title reports the shortage, and the stack or the text the activity."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

TITLE = "Training suddenly goes out of memory"
TORCH = "/env/lib/python3.12/site-packages/torch"

EXPLAINED = {
    "a stack of the optimizer": (
        FailureClass.OPTIMIZER_STATE,
        [TITLE, f'  File "{TORCH}/optim/adamw.py", line 220, in step', "    self._init_group(group)"],
    ),
    "a stack of the model's move to the GPU": (
        FailureClass.MODEL_WEIGHTS,
        [TITLE, f'  File "{TORCH}/nn/modules/module.py", line 1145, in to', "    return self._apply(convert)"],
    ),
    "a stack that gathers parameters": (
        FailureClass.WEIGHT_SYNC_SPIKE,
        [
            TITLE,
            '  File "/env/site-packages/deepspeed/runtime/zero/partition_parameters.py", line 1143, in all_gather',
            "    return self._all_gather(param_list, async_op=async_op)",
        ],
    ),
    "an engine that wakes up": (
        FailureClass.KV_CACHE_OVERSIZED,
        [
            "Out of memory after validation",
            '  File "/env/site-packages/vllm/v1/engine/core.py", line 353, in wake_up',
            "    self.model_executor.wake_up(tags)",
        ],
    ),
    "a stack, which is more precise than the title": (
        FailureClass.WEIGHT_SYNC_SPIKE,
        [
            "CUDA memory error after saving a checkpoint",
            '  File "/app/trainer.py", line 243, in sync_policy_weights',
            "    with self.weights_manager:",
        ],
    ),
    "a title that names the activity": (
        FailureClass.KV_CACHE_OVERSIZED,
        ["cuda OOM when capturing the CUDA graphs", "INFO 01-19 07:51:08 executor.py:56] # GPU blocks: 22982"],
    ),
    "a title about a checkpoint": (FailureClass.WEIGHT_SYNC_SPIKE, ["CUDA OOM during ckpt saving of a 70B model"]),
    "an engine's own words": (
        FailureClass.ACTIVATION_SPIKE,
        ["scheduler - ERROR - Prefill failed: Memory limit exceeded during prefill"],
    ),
}


def evidence_of(*lines: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(lines).encode()))
    return builder.build()


@pytest.mark.parametrize("post", EXPLAINED)
def test_the_activity_explains_a_shortage_without_a_message(post: str) -> None:
    expected, lines = EXPLAINED[post]
    best = diagnose(evidence_of(*lines))[0]
    assert best.failure_class is expected
    assert best.confidence <= 0.8


def test_a_stack_of_the_host_is_no_stack_of_the_gpu() -> None:
    lines = ["Host out of memory in training", f'  File "{TORCH}/nn/modules/module.py", line 9, in _apply', "    fn(p)"]
    assert diagnose(evidence_of(*lines))[0].failure_class is FailureClass.HOST_MEMORY


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB "
    "of which 120.88 MiB is free."
)
ENGINE = "INFO [gpu_worker.py:642] Available KV cache memory: 2.97 GiB"


def test_an_engine_that_trains_nothing_has_too_large_a_share() -> None:
    assert diagnose(evidence_of(ENGINE, FULL))[0].failure_class is FailureClass.KV_CACHE_OVERSIZED
    trained = ["{'loss': 0.51, 'grad_norm': 1.2, 'epoch': 0.01}"]
    assert diagnose(evidence_of(ENGINE, *trained, FULL))[0].failure_class is FailureClass.UNKNOWN


@pytest.mark.parametrize(
    "sentence",
    [
        "GPU memory leak in the evaluation loop",
        "the GPU memory slowly creeps up with each batch, and it crashes",
        "VRAM keeps growing until step 400",
        "# accumulates memory each run",
    ],
)
def test_a_reported_growth_outranks_the_last_request(sentence: str) -> None:
    stack = ['  File "/app/model.py", line 149, in forward', "    out = self.block(x)"]
    best = diagnose(evidence_of(sentence, *stack, FULL))[0]
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert best.confidence < 0.7


@pytest.mark.parametrize(
    "sentence",
    ["# empty_cache avoids a GPU memory leak", "This may cause a GPU memory leak.", "memory usage grew to 12 GB"],
)
def test_advice_and_single_figures_are_no_growth(sentence: str) -> None:
    stack = ['  File "/app/model.py", line 149, in forward', "    out = self.block(x)"]
    assert diagnose(evidence_of(sentence, *stack, FULL))[0].failure_class is FailureClass.ACTIVATION_SPIKE


@pytest.mark.parametrize(
    "guide",
    [
        "### Colocated OOM\n**Problem**: Out-of-memory in colocate mode.\n**Solution**: reduce --num_generations",
        "## Error troubleshooting (CUDA OOM)\nReduce the batch size.",
    ],
)
def test_a_guide_is_no_failure(guide: str) -> None:
    assert not diagnose(evidence_of(*guide.splitlines()))


def test_a_limit_counts_with_the_memory_of_the_process() -> None:
    message = (
        "ERROR: OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of "
        "15.72 GiB of which 3.67 GiB is free. Process 77 has 12.05 GiB memory in use. 12.00 GiB allowed; Of the al..."
    )
    best = diagnose(evidence_of(message))[0]
    assert (best.failure_class, best.confidence) == (FailureClass.GPU_MEMORY_LIMIT, 0.9)
