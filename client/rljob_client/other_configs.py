"""Configurations of TRL and verl, as the spec of an RLJob with the same model, lengths, batch and GPUs.

Only options on which memory and time depend are read; everything else of a job needs a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput

Source = Literal["trl", "verl"]

_NAMES: dict[Source, dict[str, tuple[str, ...]]] = {
    "trl": {
        "model": ("model_name_or_path",),
        "groupSize": ("num_generations",),
        "responses": ("generation_batch_size",),
        "deviceResponses": ("per_device_train_batch_size",),
        "accumulation": ("steps_per_generation", "gradient_accumulation_steps"),
        "maxPromptTokens": ("max_prompt_length",),
        "maxResponseTokens": ("max_completion_length",),
        "klCoefficient": ("beta",),
        "loraRank": ("lora_r",),
        "tensorParallelSize": ("vllm_tensor_parallel_size",),
    },
    "verl": {
        "model": ("actor_rollout_ref.model.path",),
        "groupSize": ("actor_rollout_ref.rollout.n",),
        "prompts": ("data.train_batch_size",),
        "maxPromptTokens": ("data.max_prompt_length",),
        "maxResponseTokens": ("data.max_response_length",),
        "klCoefficient": ("actor_rollout_ref.actor.kl_loss_coef",),
        "loraRank": ("actor_rollout_ref.model.lora_rank",),
        "tensorParallelSize": ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
        "gpus": ("trainer.n_gpus_per_node",),
        "nodes": ("trainer.nnodes",),
    },
}
"""Names of the options by meaning; the first that is set."""

_DEFAULTS: dict[Source, dict[str, Any]] = {
    "trl": {
        "groupSize": 8,
        "deviceResponses": 8,
        "accumulation": 1,
        "maxPromptTokens": 512,
        "maxResponseTokens": 256,
        "klCoefficient": 0.0,
    },
    "verl": {"maxPromptTokens": 512, "maxResponseTokens": 512, "prompts": 1024, "gpus": 8, "klCoefficient": 0.0},
}
"""Fields of TRL 1.16 and of verl's ppo_trainer.yaml."""

_LARGEST_FILE_BYTES = 1_000_000


def spec_from(source: Source, file: Path, gpus: int | None) -> RLJobSpec:
    """The spec for a configuration: a YAML file, or a script with the options of a command line.

    `gpus`: number for the job; None: those in the configuration, else one. Raises `BadInput` if options are missing or
    wrong.
    """
    options = dict(_options(file))
    names = _NAMES[source]
    found = {
        meaning: next((options[name] for name in known if name in options), None) for meaning, known in names.items()
    }
    known = _DEFAULTS[source] | {meaning: value for meaning, value in found.items() if value is not None}
    for meaning in ("model", "groupSize"):
        if meaning not in known:
            raise BadInput(f"expected {names[meaning][0]} in {file}, found none; write it, or give an RLJob's manifest")
    try:
        return RLJobSpec.model_validate(_spec(source, known, gpus), by_alias=True, by_name=False)
    except (ValidationError, TypeError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise BadInput(f"expected options of {source} that RLJob supports in {file}, found others: {reason}") from error


def options_of(file: Path) -> dict[str, Any]:
    """All options of a configuration by their dotted names. Raises `BadInput` if the file cannot be read."""
    return dict(_options(file))


def _spec(source: Source, known: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    per_node, nodes = int(known.get("gpus", 1)), int(known.get("nodes", 1))
    if gpus is not None:
        nodes = -(-gpus // 8)
        per_node = -(-gpus // nodes)
    group = int(known["groupSize"])
    if source == "trl":
        device = int(known["deviceResponses"]) * int(known["accumulation"]) * per_node * nodes
        prompts = int(known.get("responses", device)) // group
    else:
        prompts = int(known["prompts"])
    rank = int(known.get("loraRank") or 0)
    path = str(known["model"])
    return {
        "model": {"uri": f"file://{path}" if path.startswith("/") else f"hf://{path}"},
        "task": {"name": "digits"},
        "algorithm": {
            "steps": 1,
            "promptsPerStep": max(prompts, 1),
            "groupSize": group,
            "maxPromptTokens": int(known["maxPromptTokens"]),
            "maxResponseTokens": int(known["maxResponseTokens"]),
            "klCoefficient": float(known["klCoefficient"]),
        },
        "policy": {"replicas": nodes, "gpusPerReplica": per_node} | ({"lora": {"rank": rank}} if rank else {}),
        "rollout": {"tensorParallelSize": int(known.get("tensorParallelSize", 1))},
    }


def _options(file: Path) -> Iterator[tuple[str, Any]]:
    """Options by their dotted names. Raises `BadInput` if the file cannot be read."""
    try:
        text = file.read_bytes()[:_LARGEST_FILE_BYTES].decode("utf-8", "replace")
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from error
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        content = None
    if isinstance(content, dict):
        yield from _flat(content)
        return
    for match in _ARGUMENT.finditer(text):
        yield match[1] or match[3], (match[2] or match[4]).strip("'\"")


_ARGUMENT = re.compile(r"--([A-Za-z_][\w.]*)[=\s]\s*([^\s\\]+)|(?:^|\s)\+{0,2}([A-Za-z_][\w.]*)=([^\s\\]+)")
"""`--name value` and `--name=value` of TRL's scripts, `name=value` and `+name=value` of verl's."""


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
