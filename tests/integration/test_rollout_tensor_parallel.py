"""One real vLLM engine of four processes, fed by this process as the policy: it must compute what the policy does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import RunError
from rljob_testing.patience import eventually
from rljob_testing.supported_models import largest_difference, perturb
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.roles.calls import wait_for
from rljob_trainer.roles.engine_processes import EngineProcesses
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.roles.role_processes import RoleResources, placement_group
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout.topology_engines import DisaggregatedEngine
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.weight_sync.broadcast import WeightBroadcaster

SIZE = 4
BUNDLES = ({"CPU": 1},) * SIZE
"""More than key-value heads, so that two processes hold each."""
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

    def heads(self) -> tuple[int, int]:
        """Attention heads and key-value heads of this process."""
        [attention] = self._llm.apply_model(lambda model: model.model.layers[0].self_attn)
        return attention.num_heads, attention.num_kv_heads


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def controller(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process of its own, to which the processes of the engine belong, as to the controller of a job."""
    config = RolloutConfig(
        model_dir=model_dir,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=32,
        kv_cache_bytes=16 << 20,
        # Processes that sample different tokens would otherwise stop at different steps, which gloo does not survive.
        algorithm=AlgorithmSpec(steps=1, max_response_tokens=12, temperature=TEMPERATURE, ignore_end_of_sequence=True),
        tensor_parallel_size=SIZE,
        engine_args={"block_size": 32},
    )
    logs = tmp_path_factory.mktemp("logs")
    # The actors' processes import this module for the class.
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    environment = engine_environment("cpu") | variables

    class EngineController:
        """Defined here, so that its process does not import this module."""

        def __init__(self, engine_class: str) -> None:
            self._engine = EngineProcesses(
                engine_class, SIZE, RoleResources(placement_group(BUNDLES), BUNDLES, 0), logs, SIZE
            )
            self._engine.configure(environment, config)
            wait_for(self._engine.start(), "importing vLLM")

        def engine(self) -> list[Any]:
            return list(self._engine.handles.values())

        def pid(self) -> int:
            return os.getpid()

    start_local_ray(cpus=SIZE, gpus=0, object_store_bytes=200 << 20)
    try:
        yield ray.remote(EngineController).options(num_cpus=0).remote(f"{Path(__file__).stem}:{EngineProcess.__name__}")
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def engine(controller: Any) -> list[Any]:
    """The processes of an engine."""
    processes: list[Any] = ray.get(controller.engine.remote())
    port = ray.get(processes[0].serve_store.remote())
    ray.get([process.start.remote(port) for process in processes])
    return processes


def generate(engine: list[Any], seeds: list[list[int]] | None = None) -> list[Completion]:
    seeds = [SEEDS] * len(engine) if seeds is None else seeds
    calls = [process.generate.remote(PROMPTS, GROUP_SIZE, own) for process, own in zip(engine, seeds, strict=True)]
    first, *others = ray.get(calls)
    assert others == [[]] * (SIZE - 1), "only the first process has the completions"
    return list(first)


def test_processes_with_a_part_of_the_weights_compute_as_the_policy(engine: list[Any], model_dir: Path) -> None:
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

    assert ray.get([process.heads.remote() for process in engine]) == [(1, 1)] * SIZE


def test_processes_that_sample_different_tokens_are_noticed(engine: list[Any]) -> None:
    with pytest.raises(RunError, match="generate the same tokens, found different ones"):
        generate(engine, [SEEDS, *[[seed + 1 for seed in SEEDS]] * (SIZE - 1)])


def with_children(process: Any) -> list[psutil.Process]:
    """With its children, such as Python's tracker of semaphores."""
    own = psutil.Process(ray.get(process.pid.remote()))
    return [own, *own.children(recursive=True)]


def is_any_running(processes: Iterable[psutil.Process]) -> bool:
    return any(process.is_running() for process in processes)


def test_the_processes_of_an_engine_end_with_the_controller(engine: list[Any], controller: Any) -> None:
    first, second, *others = (with_children(process) for process in engine)
    owner = psutil.Process(ray.get(controller.pid.remote()))
    # For the first, in a collective: the peers of a killed process do not end until they are killed.
    waiting = [process.generate.remote(PROMPTS, GROUP_SIZE, SEEDS) for process in engine[1:]]
    first[0].kill()
    ray.wait(waiting, timeout=1)
    ray.kill(engine[1].actor)
    eventually(lambda: not is_any_running([*first, *second]), "the killed processes to end")
    assert all(process[0].is_running() for process in others)

    owner.kill()
    eventually(lambda: not is_any_running(chain(*others)), "the other processes to end with the controller")
