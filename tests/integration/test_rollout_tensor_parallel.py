"""One real vLLM engine of two processes, fed by this process as the policy: it must compute what the policy does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rljob_testing.engine_agreement import largest_difference, perturb
from rljob_testing.operator.eventually import eventually
from rljob_trainer.errors import TrainerError
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout.disaggregated_engine import DisaggregatedEngine
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.weight_sync.broadcast import WeightBroadcaster

TOLERANCE = 1e-4
TEMPERATURE = 0.7
GROUP_SIZE = 4
PROMPTS = [[4 + (i * j) % 40 for j in range(1, 41)] for i in range(1, 5)] + [[11]]
SEEDS = [100 * i for i in range(len(PROMPTS))]
MODEL = "random://qwen3?heads=4&kvHeads=2&headDim=32&initializerRange=0.3&tied=true"


class EngineProcess(DisaggregatedEngine):
    def import_engine(self) -> None:
        with long_imports():
            super().import_engine()

    def pid(self) -> int:
        return os.getpid()

    def heads(self) -> int:
        """Attention heads that this process computes."""
        return int(self._llm.apply_model(lambda model: model.model.layers[0].self_attn.num_heads)[0])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[list[Any]]:
    """Both processes of an engine."""
    config = RolloutConfig(
        model_dir=model_dir,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=32,
        kv_cache_bytes=16 << 20,
        max_response_tokens=12,
        temperature=TEMPERATURE,
        # Processes that sample different tokens would otherwise stop at different steps, which gloo does not survive.
        ignore_eos=True,
        tensor_parallel_size=2,
        engine_args={"block_size": 32},
    )
    start_local_ray(cpus=2, gpus=0, object_store_bytes=200 << 20)
    try:
        # The actors' processes import this module for the class.
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
        runtime_env = {"env_vars": engine_environment("cpu") | variables}
        actor = ray.remote(EngineProcess).options(num_cpus=1, runtime_env=runtime_env)
        processes = [actor.remote(rank, config) for rank in range(2)]
        port = ray.get(processes[0].serve_store.remote())
        ray.get([process.start.remote(port) for process in processes])
        yield processes
    finally:
        ray.shutdown()


def generate(engine: list[Any], seeds: list[list[int]] | None = None) -> list[Completion]:
    seeds = [SEEDS] * len(engine) if seeds is None else seeds
    calls = [process.generate.remote(PROMPTS, GROUP_SIZE, own) for process, own in zip(engine, seeds, strict=True)]
    first, *others = ray.get(calls)
    assert others == [[]], "only the first process has the completions"
    return list(first)


def test_two_processes_with_half_the_weights_compute_as_the_policy(engine: list[Any], model_dir: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    broadcaster = WeightBroadcaster("cpu")
    for version, bucket_bytes in ((1, 20_000), (2, 1 << 30)):
        perturb(policy, seed=version)
        broadcaster.send(policy.named_parameters(), engine, version, bucket_bytes)
        completions = generate(engine)
        assert len(completions) == len(PROMPTS) * GROUP_SIZE
        assert largest_difference(policy, PROMPTS, completions, TEMPERATURE) <= TOLERANCE
    perturb(policy, seed=3)
    assert largest_difference(policy, PROMPTS, completions, TEMPERATURE) > 0.1, (
        "the perturbation is too small to see stale weights"
    )

    assert ray.get([process.heads.remote() for process in engine]) == [2, 2]


def test_processes_that_sample_different_tokens_are_noticed(engine: list[Any]) -> None:
    with pytest.raises(TrainerError, match="generate the same tokens, found different ones"):
        generate(engine, [SEEDS, [seed + 1 for seed in SEEDS]])


def test_a_killed_process_leaves_no_process_of_the_engine_behind(engine: list[Any]) -> None:
    own = [psutil.Process(ray.get(process.pid.remote())) for process in engine]
    # Such as Python's tracker of semaphores.
    processes = [*own, *(child for process in own for child in process.children(recursive=True))]
    waiting = engine[1].generate.remote(PROMPTS, GROUP_SIZE, SEEDS)  # for its peer, in a collective
    own[0].kill()
    ray.wait([waiting], timeout=1)
    ray.kill(engine[1])
    eventually(lambda: not any(process.is_running() for process in processes), "the processes to end")
