"""One policy rank and one rollout engine on one GPU, as in `rljob run`, for the programs that measure memory.

They are Ray actors of the trainer's own classes and live through all arms of a program: an arm changes the memory
settings of the running policy. The policy learns from random rollouts, so their lengths are known.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import ray

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.allocator import allocator_environment
from rljob_memory.budget.host import object_store_bytes
from rljob_trainer.hardware import torch_version
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.config import PolicyConfig, UpdateResult
from rljob_trainer.roles.policy_actor import ColocatedPolicyActor
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.roles.rollout_actor import ColocatedRolloutActor
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout_batch import RolloutBatch

Device = Literal["cpu", "cuda"]
Row = dict[str, Any]

GIB = 1 << 30
MIB = 1 << 20
CALL_SECONDS = 240
"""Longest call of these programs, including the start of an engine."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Model and sizes of a step."""

    uri: str
    vocabulary: int
    prompts: int
    group_size: int
    prompt_tokens: int
    longest: int
    """Tokens of the longest sequence, prompt and response together."""
    micro_batch_tokens: int
    logprob_chunk_tokens: int
    kv_cache_bytes: int


QWEN3_0_6B = MeasuredStep(
    uri="random://qwen3?hidden=1024&intermediate=3072&layers=28&heads=16&kvHeads=8&headDim=128&vocabulary=151936&tied=true",
    vocabulary=151_936,
    prompts=16,
    group_size=8,
    prompt_tokens=16,
    longest=1024,
    micro_batch_tokens=16_384,
    logprob_chunk_tokens=384,
    kv_cache_bytes=8 * GIB,
)
TINY = MeasuredStep("random://qwen3", 64, 4, 4, 4, 32, 128, 64, 64 * MIB)


def workload_for(device: Device) -> MeasuredStep:
    return QWEN3_0_6B if device == "cuda" else TINY


def memory_settings(workload: MeasuredStep, **changes: Any) -> MemoryPlan:
    """The plan of `Auto` on a large GPU, with `changes`."""
    settings: Row = {
        "empty_cache": True,
        "expandable_segments": True,
        "rollout_sleep": "Level2",
        "kv_cache_bytes": workload.kv_cache_bytes,
        "micro_batch_tokens": workload.micro_batch_tokens,
        "logprob_chunk_tokens": workload.logprob_chunk_tokens,
        "activation_checkpointing": False,
        "optimizer_offload": False,
        "sync_bucket_bytes": 297 * MIB,
    }
    return MemoryPlan(**(settings | changes))


def policy_config(workload: MeasuredStep, device: Device, memory: MemoryPlan, output_dir: Path) -> PolicyConfig:
    return PolicyConfig(
        model_dir=resolve_model(workload.uri),
        output_dir=output_dir,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        algorithm=AlgorithmSpec(steps=1),
        memory=memory,
    )


def rollout_config(
    workload: MeasuredStep, device: Device, *, generated_tokens: int, cuda_graphs: bool
) -> RolloutConfig:
    return RolloutConfig(
        model_dir=resolve_model(workload.uri),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        max_model_len=workload.longest,
        max_num_seqs=workload.prompts * workload.group_size,
        kv_cache_bytes=workload.kv_cache_bytes,
        max_response_tokens=generated_tokens,
        sleep_level=2,
        ignore_eos=True,
        engine_args={} if cuda_graphs or device == "cpu" else {"enforce_eager": True},
    )


def random_rollouts(workload: MeasuredStep, step: int, longest_sequences: int = 0) -> RolloutBatch:
    """Scored rollouts of a step, whose lengths are random, and the same for the same step.

    `longest_sequences`: as many of the longest length instead, each of which is a micro-batch.
    """
    draw = np.random.default_rng(step)
    completions, group_size = workload.prompts * workload.group_size, workload.group_size
    lengths = draw.integers(workload.longest // 16, workload.longest - workload.prompt_tokens, completions)
    if longest_sequences:
        completions, group_size = longest_sequences, 1
        lengths = np.full(completions, workload.longest - workload.prompt_tokens)
    rewards, advantages = draw.normal(size=(2, completions)).astype(np.float32)

    def token_ids(count: int) -> Any:
        return draw.integers(3, workload.vocabulary, count).astype(np.int32)

    return RolloutBatch(
        step=step,
        group_size=group_size,
        prompt_ids=[token_ids(workload.prompt_tokens) for _ in range(completions // group_size)],
        response_ids=[token_ids(length) for length in lengths],
        rollout_logprobs=[np.full(length, -np.log(workload.vocabulary), np.float32) for length in lengths],
        finished=np.ones(completions, np.bool_),
    ).scored(rewards, advantages)


class MeasuredPolicy(ColocatedPolicyActor):
    """A policy rank whose micro-batches can change size while its allocator keeps its cache."""

    def use_budget(self, micro_batch_tokens: int) -> None:
        memory = self.config.memory.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        self.config = self._loaded.update.config = replace(self.config, memory=memory)


class ColocatedPair:
    """A policy rank and an engine that share a GPU. On entry, both are loaded and have the same weights."""

    def __init__(
        self,
        workload: MeasuredStep,
        device: Device,
        memory: MemoryPlan,
        *,
        generated_tokens: int = 16,
        cuda_graphs: bool = False,
    ) -> None:
        """`generated_tokens`: per completion. `cuda_graphs`: slower start of the engine, faster generation."""
        self._workload, self._device = workload, device
        self._directory = tempfile.TemporaryDirectory(prefix="rljob-bench-")
        self._policy_config = policy_config(workload, device, memory, Path(self._directory.name))
        self._rollout_config = rollout_config(
            workload, device, generated_tokens=generated_tokens, cuda_graphs=cuda_graphs
        )
        self._policy: Any = None
        self._engine: Any = None
        self._version = 0

    def __enter__(self) -> Self:
        gpu = self._device == "cuda"
        start_local_ray(
            cpus=4, gpus=int(gpu), object_store_bytes=object_store_bytes(512 * MIB, "cuda" if gpu else "cpu")
        )
        allocator = {role: allocator_environment(role, torch_version()) for role in ("policy", "rollout")}
        engine_environment_here = engine_environment(self._device) | allocator["rollout"]
        self._policy = _actor(MeasuredPolicy, gpu, allocator["policy"]).remote(0, 1, self._policy_config)
        self._engine = _actor(ColocatedRolloutActor, gpu, engine_environment_here).remote(
            0, self._rollout_config, self._policy_config.output_dir
        )
        _result(self._policy.connect.remote(*_result(self._policy.rendezvous.remote())))
        _result(self._policy.load.remote())
        _result(self._engine.start.remote())
        self.sync()
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._directory.cleanup()

    def change_memory(self, memory: MemoryPlan) -> None:
        """Change the memory settings; the policy's cache is emptied."""
        _result(self._policy.change_memory.remote(memory))

    def use_budget(self, micro_batch_tokens: int) -> None:
        """Change the size of micro-batches; the policy's cache stays."""
        _result(self._policy.use_budget.remote(micro_batch_tokens))

    def generate(self) -> float:
        """Generate the completions of a step; seconds."""
        prompts = [[3 + prompt % 50] * self._workload.prompt_tokens for prompt in range(self._workload.prompts)]
        begun = time.perf_counter()
        _result(self._engine.generate.remote(prompts, self._workload.group_size, list(range(len(prompts)))))
        return time.perf_counter() - begun

    def sleep(self) -> float:
        """Put the engine to sleep; seconds."""
        return self._timed(self._engine.sleep)

    def update(self, step: int) -> UpdateResult:
        """Learn from the random rollouts of the step."""
        result: UpdateResult = _result(self._policy.update.remote(random_rollouts(self._workload, step)))
        return result

    def wake_weights(self) -> float:
        return self._timed(self._engine.wake_weights)

    def sync(self) -> float:
        """Send the weights to the engine; seconds."""
        self._version += 1
        begun = time.perf_counter()
        _result(self._policy.sync.remote([self._engine], self._version))
        return time.perf_counter() - begun

    def wake_kv_cache(self) -> float:
        return self._timed(self._engine.wake_kv_cache)

    def policy_memory(self) -> list[Row]:
        """The policy's memory log so far."""
        return read_memory_log(self._policy_config.output_dir)

    def _timed(self, method: Any) -> float:
        begun = time.perf_counter()
        _result(method.remote())
        return time.perf_counter() - begun


def read_memory_log(output_dir: Path) -> list[Row]:
    """The lines of the policy's memory log; numbers that are 0 are absent."""
    return [json.loads(line) for line in (output_dir / "memory" / "policy-0.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def arm(rows: list[Row], name: str) -> Iterator[Row]:
    """A row of the record, filled by the block. An error goes into the row, and the next arms still run."""
    row: Row = {"arm": name}
    rows.append(row)
    begun = time.perf_counter()
    try:
        yield row
    except Exception as error:
        cause = getattr(error, "cause", None) or error  # Ray's own error wraps it
        row["error"] = f"{type(cause).__name__}: {cause}"[:1000]
    row["seconds"] = time.perf_counter() - begun
    print(f"{name}: {row.get('error', 'done')} ({row['seconds']:.0f} s)", flush=True)


def _actor(role: type, gpu: bool, environment: dict[str, str]) -> Any:
    resources = {"num_cpus": 1, "num_gpus": 0.5} if gpu else {"num_cpus": 1}
    return ray.remote(role).options(**resources, runtime_env={"env_vars": environment})


def _result(reference: Any) -> Any:
    return ray.get(reference, timeout=CALL_SECONDS)
