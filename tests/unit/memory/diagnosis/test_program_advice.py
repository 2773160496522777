"""Advice names the options of the trainer that wrote the log, with present values, new values and effects."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
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


def test_the_share_of_an_engine_that_had_too_little_is_raised() -> None:
    found = best(
        '  File "/env/lib/python3.12/site-packages/sglang/srt/model_executor/model_runner.py", line 9, in init_pool',
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    )
    assert found.advice.startswith("SGLang: raise --mem-fraction-static")


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


def test_the_value_of_an_option_is_that_of_its_section() -> None:
    options = [
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
        "critic.model.fsdp_config.optimizer_offload=True",
    ]
    step = '  File "/x/site-packages/torch/optim/adamw.py", line 9, in step'
    log = [" ".join(options), VERL, step, "    torch._foreach_add_(a, b)", OUT_OF_MEMORY]
    assert "set actor_rollout_ref.actor.fsdp_config.optimizer_offload: False → True" in best(*log).advice


def test_the_version_is_named_if_the_log_shows_it() -> None:
    found = best("INFO verl==0.9.1 on CUDA 12.9", "(WorkerDict pid=901) " + ENGINE_START)
    assert found.advice.startswith("verl 0.9.1: ")


TRL = '  File "/env/lib/python3.12/site-packages/trl/trainer/grpo_trainer.py", line 9, in compute_loss'
OPENRLHF = '  File "/env/lib/python3.12/site-packages/openrlhf/trainer/ray/ppo_actor.py", line 9, in training_step'
VERL = '  File "/env/lib/python3.12/site-packages/verl/workers/actor/dp_actor.py", line 9, in update_policy'
SKYRL = '  File "/env/lib/python3.12/site-packages/skyrl/backends/worker.py", line 9, in train'
BACKWARD = ("    loss.backward()", OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (
            ("openrlhf==0.9.0", "--micro_train_batch_size 8 --adam_offload", OPENRLHF),
            "OpenRLHF 0.9.0: set --micro_train_batch_size: 8 → 4",
        ),
        (
            ("openrlhf==0.11.2", "--train.micro_batch_size 8", OPENRLHF),
            "OpenRLHF 0.11.2: set --train.micro_batch_size: 8 → 4",
        ),
        # Without a version, the name in the log decides.
        (("micro_train_batch_size=8", OPENRLHF), "OpenRLHF: set --micro_train_batch_size: 8 → 4"),
        (
            (OPENRLHF,),
            "OpenRLHF: lower --train.micro_batch_size (default 1), --micro_train_batch_size before 0.10.2",
        ),
        (
            ("openrlhf==0.9.0", "--use_dynamic_batch True --train_max_tokens_per_gpu 20000", OPENRLHF),
            "OpenRLHF 0.9.0: set --train_max_tokens_per_gpu: 20000 → 10000",
        ),
        (
            ("verl==0.9.1", "actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=32768", VERL),
            "verl 0.9.1: set actor_rollout_ref.actor.ppo_max_token_len_per_gpu: 32768 → 16384, not below",
        ),
        (
            ("verl==0.9.1", "actor.use_dynamic_bsz=False actor.ppo_micro_batch_size_per_gpu=8", VERL),
            "verl 0.9.1: set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 8 → 4",
        ),
        (
            ("trainer.max_tokens_per_microbatch=16384", SKYRL),
            "SkyRL: set trainer.max_tokens_per_microbatch: 16384 → 8192",
        ),
    ],
)
def test_the_name_of_an_option_is_that_of_the_version(log: tuple[str, ...], advice: str) -> None:
    assert advice in best(*log, *BACKWARD).advice


KV_CACHE = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.50 GiB)."
)


@pytest.mark.parametrize(
    ("version", "default"),
    [("0.26.0", "(default 0.92)"), ("0.11.2", "(default 0.9)"), (None, "(default 0.92, or 0.9 before 0.20)")],
)
def test_the_default_is_that_of_the_version(version: str | None, default: str) -> None:
    seen = f"Initializing a V1 LLM engine (v{version})" if version else "(EngineCore_0 pid=9) vLLM started"
    assert f"raise gpu_memory_utilization {default}, by 2.50 GiB of the GPU" in best(seen, KV_CACHE).advice


def test_a_smaller_micro_batch_frees_half_of_the_activations() -> None:
    samples = [f"step {step} after the step: allocated: 60.0 GiB, reserved: 70.0 GiB" for step in range(4)]
    found = best("per_device_train_batch_size=16", *samples, TRL, *BACKWARD)
    assert "per_device_train_batch_size: 16 → 8, which frees about 36.50 GiB" in found.advice
    unknown = best("per_device_train_batch_size=16", TRL, *BACKWARD)
    assert "frees" not in unknown.advice


def test_the_trainers_option_comes_before_the_engines() -> None:
    found = best("INFO: Initializing a V1 LLM engine (v0.26.0)", "(WorkerDict pid=901) " + ENGINE_START)
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in found.advice
    assert "vLLM" not in found.advice


def test_an_unrecognized_log_gets_the_general_advice() -> None:
    found = best(OUT_OF_MEMORY)
    assert found.advice == found.failure_class.general_advice


@pytest.mark.parametrize(
    "line",
    [
        '  File "/opt/rljob/lib/python3.12/site-packages/rljob_trainer/policy/rank.py", line 80, in update',
        "rljob 2026-11-27T10:00:00.000000Z update begins",
        "warning: OutOfMemory: policy rank 0, in the update of step 3",
    ],
)
def test_a_log_of_rljob_gets_the_fields_of_an_rljob(line: str) -> None:
    found = best("Traceback (most recent call last):", line, OUT_OF_MEMORY)
    assert found.advice == found.failure_class.advice


def test_a_program_without_an_option_that_helps_gets_no_fields_of_an_rljob() -> None:
    log = (
        "per_device_train_batch_size=1",
        "gradient_checkpointing=True",
        "vllm_enable_sleep_mode=True",
        TRL,
        *BACKWARD,
    )
    assert "memory." not in best(*log).advice


@pytest.mark.parametrize("cause", FailureClass)
def test_general_advice_names_no_field_of_an_rljob(cause: FailureClass) -> None:
    assert not re.search(r"(?<![\w.])(?:spec|memory|recovery|policy)\.[a-z]|RLJob", cause.general_advice)
    assert cause.general_advice.endswith(".")


def test_a_slurm_job_that_was_killed_is_told_its_option() -> None:
    found = best(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.batch. Some of the step tasks have been OOM"
    )
    assert found.failure_class is FailureClass.HOST_MEMORY
    assert "--mem of a Slurm job" in found.advice
    assert "maxHostMemory" not in found.advice


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
