"""Configurations of TRL and verl, as the spec of an RLJob with the same model, lengths, batch and GPUs.

Only options on which memory and time depend are read; everything else of a job needs a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from rljob_api.job import RLJobSpec
from rljob_api.manifest import decoded
from rljob_api.manifest.yaml_document import explain, read_documents
from rljob_client.errors import BadInput
from rljob_memory.sizes import human_bytes

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
        "usesLora": ("use_peft",),
        "loraRank": ("lora_r",),
        "tensorParallelSize": ("vllm_tensor_parallel_size",),
    },
    "verl": {
        "model": ("actor_rollout_ref.model.path",),
        "groupSize": ("actor_rollout_ref.rollout.n",),
        "prompts": ("data.train_batch_size",),
        "miniBatch": ("actor_rollout_ref.actor.ppo_mini_batch_size",),
        "isPacked": ("actor_rollout_ref.actor.use_dynamic_bsz",),
        "strategy": ("actor_rollout_ref.actor.strategy",),
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
        "loraRank": 16,
        "tensorParallelSize": 1,
        "gpus": 1,
        "nodes": 1,
    },
    "verl": {
        "maxPromptTokens": 512,
        "maxResponseTokens": 512,
        "prompts": 1024,
        "loraRank": 0,
        "tensorParallelSize": 1,
        "gpus": 8,
        "nodes": 1,
    },
}
"""Fields of TRL 1.16 and of verl's ppo_trainer.yaml."""

_LARGEST_FILE_BYTES = 1 << 18
_LARGEST_NUMBER = 1 << 40
_GPUS_OF_A_NODE = 8
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_MOST_INTERPOLATIONS = 8
_MISSPELT = 0.93
"""Least similarity of a name that is meant to be another one; `num_generations_eval` is an option of its own."""
_SHORTEST_MISSPELT = 6


def spec_from(source: Source, file: Path, gpus: int | None) -> RLJobSpec:
    """The spec for a configuration: a YAML file, or a script with the options of a command line.

    `gpus`: number for the job; None: those in the configuration, else one. Raises `BadInput` if options are missing or
    wrong, or the trainer would refuse them; `ManifestError` if the file is no text.
    """
    options = _MeantOptions(source, file, options_of(file))
    spec = _spec(source, options, gpus)
    try:
        return RLJobSpec.model_validate(spec, by_alias=True, by_name=False)
    except ValidationError as error:
        first, machine_gpus = error.errors()[0], spec["policy"]["gpusPerReplica"]
        if first["type"] == "conflict" and machine_gpus % spec["rollout"]["tensorParallelSize"]:
            meaning = "tensorParallelSize"  # the spec's own message names fields of an RLJob
            expected = f"expected a divisor of the GPUs of a machine, {machine_gpus}, as {options.name(meaning)}"
            raise options.wrong(meaning, expected) from error
        reason = first["msg"]
        raise BadInput(f"expected options of {source} that RLJob supports in {file}, found others: {reason}") from error


def options_of(file: Path) -> dict[str, Any]:
    """All options of a configuration by their dotted names. Raises `BadInput` if the file cannot be read."""
    return dict(_options(file))


@dataclass(frozen=True)
class _MeantOptions:
    """The options of a configuration, by their meaning."""

    source: Source
    file: Path
    values: Mapping[str, Any]

    def name(self, meaning: str) -> str:
        """The name that the file has for it, else the first one that it can have."""
        names = _NAMES[self.source].get(meaning, (meaning,))
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def given(self, meaning: str) -> Any:
        """The value, with references to other options followed. None if it is not set."""
        if meaning not in _NAMES[self.source]:
            return None
        value = self.values.get(self.name(meaning))
        for _ in range(_MOST_INTERPOLATIONS):
            if not (isinstance(value, str) and (reference := _INTERPOLATION.fullmatch(value))):
                return value
            value = self.values.get(reference[1], value)
        return value

    def whole(self, meaning: str, least: int = 1) -> int:
        """A whole number, or the trainer's default."""
        value = self.given(meaning)
        if value is None:
            if meaning not in _DEFAULTS[self.source]:
                raise self.missing(meaning)
            return int(_DEFAULTS[self.source][meaning])
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]{1,15}", text):
            raise self.wrong(meaning, f"expected a whole number as {self.name(meaning)}")
        if not least <= int(text) <= _LARGEST_NUMBER:
            raise self.wrong(meaning, f"expected a number from {least} as {self.name(meaning)}")
        return int(text)

    def wrong(self, meaning: str, expected: str) -> BadInput:
        return BadInput(f"{expected} in {self.file}, found {self.given(meaning)!r:.100}; write its value")

    def missing(self, meaning: str) -> BadInput:
        name = self.name(meaning)
        section, _, leaf = name.rpartition(".")
        others = [
            each.rpartition(".")[2] for each in self.values if each.rpartition(".")[0] == section and each != name
        ]
        close = get_close_matches(leaf, others, n=1) if len(leaf) >= _SHORTEST_MISSPELT else []
        hint = f"correct the name of {close[0]}" if close else "write it, or give an RLJob's manifest"
        return BadInput(f"expected {name} in {self.file}, found none; {hint}")

    def require_spelling(self) -> None:
        """Raise `BadInput` for a name that can only be meant for another one that is not set."""
        for meaning, names in _NAMES[self.source].items():
            if any(name in self.values for name in names):
                continue
            for name in names:
                section, _, leaf = name.rpartition(".")
                others = [each.rpartition(".")[2] for each in self.values if each.rpartition(".")[0] == section]
                if len(leaf) >= _SHORTEST_MISSPELT and get_close_matches(leaf, others, n=1, cutoff=_MISSPELT):
                    raise self.missing(meaning)


def _spec(source: Source, options: _MeantOptions, gpus: int | None) -> dict[str, Any]:
    options.require_spelling()
    per_node, nodes = options.whole("gpus"), options.whole("nodes")
    if gpus is not None and gpus > 0:
        nodes = -(-gpus // _GPUS_OF_A_NODE)
        per_node = -(-gpus // nodes)
    path = options.given("model")
    if path is None:
        raise options.missing("model")
    if not isinstance(path, str) or not re.match(r"[\w/]", path):
        raise options.wrong("model", f"expected the name of a model, or an absolute path, as {options.name('model')}")
    group = options.whole("groupSize", least=2)
    requires = _prompts_of_trl if source == "trl" else _prompts_of_verl
    rank = options.whole("loraRank", least=0) if source == "verl" or options.given("usesLora") else 0
    coefficient = options.given("klCoefficient") or 0.0
    try:
        coefficient = float(coefficient)
    except (TypeError, ValueError):
        raise options.wrong("klCoefficient", f"expected a number as {options.name('klCoefficient')}") from None
    return {
        "model": {"uri": f"file://{path}" if path.startswith("/") else f"hf://{path}"},
        "task": {"name": "digits"},
        "algorithm": {
            "steps": 1,
            "promptsPerStep": requires(options, group, per_node * nodes),
            "groupSize": group,
            "maxPromptTokens": options.whole("maxPromptTokens"),
            "maxResponseTokens": options.whole("maxResponseTokens"),
            "klCoefficient": coefficient,
        },
        "policy": {"replicas": nodes, "gpusPerReplica": per_node} | ({"lora": {"rank": rank}} if rank else {}),
        "rollout": {"tensorParallelSize": options.whole("tensorParallelSize")},
    }


def _prompts_of_trl(options: _MeantOptions, group: int, gpus: int) -> int:
    """Prompts of a step, as `GRPOConfig.__post_init__` counts and refuses them."""
    device = options.whole("deviceResponses")
    responses = device * options.whole("accumulation") * gpus
    if options.given("responses") is not None:
        if "steps_per_generation" in options.values:
            raise BadInput(
                f"expected generation_batch_size or steps_per_generation in {options.file}, found both; remove one"
            )
        responses = options.whole("responses")
        if responses % (device * gpus):
            raise BadInput(
                f"expected a generation_batch_size in {options.file} that {device} responses on each of {gpus} GPUs "
                f"divide, found {responses}; write a multiple of {device * gpus}"
            )
    if responses % group:
        raise BadInput(
            f"expected responses of a step in {options.file} that {options.name('groupSize')} divides, found "
            f"{responses} on {gpus} GPUs and {group}; change per_device_train_batch_size or --gpus"
        )
    return responses // group


def _prompts_of_verl(options: _MeantOptions, group: int, gpus: int) -> int:
    """Prompts of a step, as `validate_config` and `ActorConfig.validate` check them."""
    prompts = options.whole("prompts")
    mini = options.whole("miniBatch") if options.given("miniBatch") is not None else prompts
    if mini > prompts:
        raise BadInput(
            f"expected at most data.train_batch_size, {prompts}, as {options.name('miniBatch')} in {options.file}, "
            f"found {mini}; lower it"
        )
    is_packed = str(options.given("isPacked")).lower() == "true" or options.given("strategy") == "megatron"
    if not is_packed and (prompts * group) % gpus:
        raise BadInput(
            f"expected data.train_batch_size × actor_rollout_ref.rollout.n in {options.file} as a multiple of the "
            f"{gpus} GPUs, found {prompts} × {group}; change one of them"
        )
    return prompts


def _options(file: Path) -> Iterator[tuple[str, Any]]:
    """Options by their dotted names. Raises `BadInput` if the file cannot be read, `ManifestError` if it is no text."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}; name a file with options") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise BadInput(f"expected at most {human_bytes(_LARGEST_FILE_BYTES)} of options in {file}, found more")
    text = decoded(file, content)
    try:
        documents = list(read_documents(text))
    except yaml.YAMLError as error:
        if "fields, aliases" in str(error) or "contains itself" in str(error):
            raise BadInput(f"expected options in {file}, {explain(text, error)[0]}; write them out") from None
        documents = []
    if documents and isinstance(documents[0].data, dict):
        yield from _flat(documents[0].data)
        return
    for match in _ARGUMENT.finditer(text):
        yield match[1] or match[3], (match[2] or match[4]).strip("'\"")


_ARGUMENT = re.compile(r"--([A-Za-z_][\w.]*)[=\s]\s*([^\s\\]+)|(?:^|\s)\+{0,2}([A-Za-z_][\w.]*)=([^\s\\]+)")
"""`--name value` and `--name=value` of TRL's scripts, `name=value` and `+name=value` of verl's."""


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
