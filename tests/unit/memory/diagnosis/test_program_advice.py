"""Advice names the options of the trainer that wrote the log, with present values, new values and effects."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pytest

from rljob_memory.diagnosis import Diagnosis, diagnose
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.programs import PROGRAMS, Effect

ENGINE_START = (
    "ValueError: Free memory on device cuda:0 (79.60/140.00 GiB) on startup is less than desired GPU memory "
    "utilization (0.85, 119.00 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 3.02 GiB is free. Including non-PyTorch memory, this process has 136.78 GiB memory in use. Of the "
    "allocated memory 133.00 GiB is allocated by PyTorch, and 0.40 GiB is reserved by PyTorch but unallocated."
)


def evidence_of(*lines: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(lines).encode()))
    return builder.build()


def best(*lines: str) -> Diagnosis:
    return diagnose(evidence_of(*lines))[0]


def test_the_share_of_an_engine_is_lowered_by_what_was_missing() -> None:
    found = best(
        "(TaskRunner pid=812) {'actor_rollout_ref': {'rollout': {'gpu_memory_utilization': 0.85,",
        "(WorkerDict pid=901) " + ENGINE_START,
    )
    assert "the trainer's own model holds the rest" in found.message
    assert "verl: set actor_rollout_ref.rollout.gpu_memory_utilization: 0.85 → 0.55, which frees about 42.00 GiB" in (
        found.advice
    )


def test_a_micro_batch_is_halved() -> None:
    found = best(
        "per_device_train_batch_size=16",
        '  File "/env/lib/python3.12/site-packages/trl/trainer/grpo_trainer.py", line 9, in compute_loss',
        "    loss.backward()",
        OUT_OF_MEMORY,
    )
    assert "TRL: set per_device_train_batch_size: 16 → 8, and double gradient_accumulation_steps" in found.advice


def test_a_value_that_is_set_already_is_not_advised() -> None:
    log = ["gradient_checkpointing: True", "File /x/site-packages/trl/trainer/grpo_trainer.py", OUT_OF_MEMORY]
    assert "gradient_checkpointing" not in best(*log).advice


def test_a_micro_batch_of_one_is_not_halved() -> None:
    log = ["per_device_train_batch_size=1", "File /x/site-packages/trl/trainer/grpo_trainer.py", OUT_OF_MEMORY]
    assert "per_device_train_batch_size" not in best(*log).advice


def test_two_values_of_an_option_are_no_present_value() -> None:
    evidence = evidence_of("'gpu_memory_utilization': 0.85,", "gpu_memory_utilization=0.3", OUT_OF_MEMORY)
    assert "gpu_memory_utilization" not in evidence.option_values


def test_the_version_is_named_if_the_log_shows_it() -> None:
    found = best("INFO verl==0.9.1 on CUDA 12.9", "(WorkerDict pid=901) " + ENGINE_START)
    assert found.advice.startswith("verl 0.9.1: ")


def test_the_trainers_option_comes_before_the_engines() -> None:
    found = best("INFO: Initializing a V1 LLM engine (v0.26.0)", "(WorkerDict pid=901) " + ENGINE_START)
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in found.advice
    assert "vLLM" not in found.advice


def test_an_unrecognized_log_gets_the_general_advice() -> None:
    found = best(OUT_OF_MEMORY)
    assert found.advice == found.failure_class.advice


@pytest.mark.parametrize("key", PROGRAMS)
def test_every_program_has_an_option_for_its_engine(key: str) -> None:
    assert PROGRAMS[key].option(Effect.SHARE)


def fields_of(package: str, *files: str) -> set[str]:
    """Names assigned in the classes of the package's files, without importing them."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    root = Path(spec.origin).parent
    trees = [ast.parse((root / file).read_text(encoding="utf-8")) for file in files]
    return {
        node.target.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_the_options_of_vllm_exist() -> None:
    assert PROGRAMS["vllm"].leaves <= fields_of("vllm", "engine/arg_utils.py")


def test_the_options_of_trl_exist() -> None:
    known = fields_of("trl", "trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py")
    known |= fields_of("transformers", "training_args.py")
    assert PROGRAMS["trl"].leaves <= known
