"""Requirements of a job on its model that `config.json` alone shows: they are checked before the weights are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.job import RLJobSpec
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_client.errors import BadInput
from rljob_trainer.models.block_sizes import require_whole_blocks
from rljob_trainer.models.checkpoint import described_positions, require_same_rope
from rljob_trainer.models.consistency import require_same_window
from rljob_trainer.models.lora_targets import require_adaptable
from rljob_trainer.models.sharding import require_shardable


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement. Its check reads no weights, which may be missing."""

    name: str
    """Subject of the check, for people."""

    field: FieldPath
    """The field of the manifest that a failure concerns."""

    require: Callable[[Path], None]
    """Raises `BadInput` if the model in a directory does not meet it."""


def model_requirements(spec: RLJobSpec) -> tuple[Requirement, ...]:
    """The requirements of the job, in the order of their checks."""
    algorithm, rollout, lora = spec.algorithm, spec.rollout, spec.policy.lora
    found = [
        Requirement(
            "the lengths", ("spec", "algorithm", "maxPromptTokens"), lambda at: _require_lengths(algorithm, at)
        ),
        Requirement(
            "the engine",
            ("spec", "rollout", "tensorParallelSize"),
            lambda at: require_shardable(at, rollout.tensor_parallel_size),
        ),
    ]
    if rollout.quantization == "Fp8PerBlock":
        found.append(
            Requirement(
                "the engine",
                ("spec", "rollout", "quantization"),
                lambda at: require_whole_blocks(at, rollout.tensor_parallel_size),
            )
        )
    if lora is not None:
        found.append(
            Requirement(
                "the adapters",
                ("spec", "policy", "lora"),
                lambda at: require_adaptable(at, lora.targets, lora.rank),
            )
        )
    return tuple(found)


def require_usable(spec: RLJobSpec, directory: Path) -> None:
    """Raise `BadInput` if `config.json` in `directory` shows that the job cannot use the model."""
    for requirement in model_requirements(spec):
        requirement.require(directory)


def _require_lengths(algorithm: AlgorithmSpec, directory: Path) -> None:
    """Prompt and response together must not exceed the model's maximum length, and have the same embeddings."""
    longest = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    positions = described_positions(directory)
    if longest > positions:
        raise BadInput(
            "expected algorithm.maxPromptTokens + algorithm.maxResponseTokens to be at most "
            f"{positions}, the maximum length of the model, found {longest}; lower them"
        )
    require_same_rope(directory, longest)
    require_same_window(directory, longest)
