"""`rljob init`: writes a manifest with comments, from a few choices."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import ManifestError, read_manifest
from rljob_api.manifest.problems import schema_of
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_api.manifest.yaml_document import read_documents, yaml_text
from rljob_api.metadata import API_VERSION
from rljob_api.task_args import DATA_FORMATS

_TINY_MODEL = "random://qwen3?hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"
_SMALL_MODEL = "hf://Qwen/Qwen3-0.6B"
_GPUS_OF_A_MACHINE = 8
_WIDTH = 110
_TINY_ALGORITHM = {
    **{"promptsPerStep": 8, "groupSize": 8, "learningRate": 3e-3, "adamBeta2": 0.95, "weightDecay": 0.0},
    **{"entropyCoefficient": 0.05, "maxPromptTokens": 8, "maxResponseTokens": 4, "ignoreEndOfSequence": True},
}
"""For a model without training that is to repeat digits, as in `examples/digits.yaml`."""
_ALGORITHM = {"promptsPerStep": 16, "groupSize": 8, "learningRate": 1e-6}
_LENGTHS = {"maxPromptTokens": 512, "maxResponseTokens": 512}
_OPTIONS = {
    "spec.model.uri": "--model",
    "spec.task.name": "--task",
    "spec.task.reward": "--reward",
    "spec.algorithm.name": "--algorithm",
    "spec.algorithm.steps": "--steps",
    "spec.policy.gpusPerReplica": "--gpus",
    "spec.policy.replicas": "--gpus",
}
"""Option that sets each field."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of the command line; None: the default."""

    model: str | None = None
    task: str | None = None
    reward: str | None = None
    gpus: int | None = None
    steps: int | None = None
    algorithm: str | None = None
    settings: Sequence[str] = ()
    """Other fields, as `path=value`."""


def write_manifest(output: Path, choices: Choices, force: bool) -> int:
    """Write the manifest, print what to do next, and return the exit code. Writes nothing if it would be invalid."""
    text = yaml_text(manifest_of(choices))
    try:
        document = read_manifest(output, text)[0].with_settings(choices.settings)
        document.load()
    except ManifestError as error:
        for problem in error.problems:
            option = f"--set {problem.setting}" if problem.setting else _OPTIONS.get(problem.path, problem.path)
            print(f"rljob init: {option}: {problem.message}", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(commented(yaml_text(document.document.data)))
    except FileExistsError:
        print(f"rljob init: expected no file {output}, found one; name another, or use --force", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except OSError as error:
        print(f"rljob init: {output} cannot be written: {error.strerror}; name another file", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    print(f"{output}\ncheck it: rljob validate {output}\ntrain:    rljob run {output}")
    return ExitCode.COMPLETE


def manifest_of(choices: Choices) -> dict[str, Any]:
    """The manifest as values."""
    is_tiny = choices.model is None and choices.task in (None, "digits")
    task = _task(choices.task or ("digits" if is_tiny else "chain_sum"))
    if choices.reward:
        task["reward"] = choices.reward
    algorithm = {"name": choices.algorithm or "grpo", "steps": 60 if choices.steps is None else choices.steps}
    gpus = 1 if choices.gpus is None else choices.gpus
    machines = gpus // _GPUS_OF_A_MACHINE if gpus > _GPUS_OF_A_MACHINE and gpus % _GPUS_OF_A_MACHINE == 0 else 1
    name = task.get("args", {}).get("dataset") or Path(task.get("args", {}).get("path", task["name"])).stem
    return {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": re.sub(r"[^a-z0-9]+", "-", name.partition(":")[0].lower()).strip("-") or "job"},
        "spec": {
            "model": {"uri": choices.model or (_TINY_MODEL if is_tiny else _SMALL_MODEL)},
            "task": task,
            "algorithm": algorithm | (_TINY_ALGORITHM if is_tiny else _ALGORITHM | _LENGTHS),
            "policy": {"replicas": machines, "gpusPerReplica": gpus // machines},
            "checkpoint": {"everySteps": 20},
        },
    }


def _task(given: str) -> dict[str, Any]:
    """A task by its name, its Python function, its file of prompts, or its data set."""
    if given.endswith(".jsonl"):
        return {"name": "jsonl", "args": {"path": given}}
    if given == "digits" or ":" in given:
        return {"name": given}
    if "/" in given or Path(given).suffix.removeprefix(".") in DATA_FORMATS:
        return {"name": "dataset", "args": {"path": given}}
    return {"name": "reasoning-gym", "args": {"dataset": given}}


def commented(text: str) -> str:
    """The manifest `text` with the description of each field of the API above it."""
    lines_of = {line: path for path, line in next(read_documents(text)).lines.items() if path}
    parts = ["# rljob validate checks this file. docs/manifest.md describes all fields; those left out have defaults."]
    for number, line in enumerate(text.splitlines(), start=1):
        indent = line[: len(line) - len(line.lstrip())]
        parts += [f"{indent}# {each}" for each in _description(lines_of.get(number, ()))]
        parts.append(line)
    return "\n".join(parts) + "\n"


def _description(path: FieldPath) -> Iterator[str]:
    """Lines of the first sentences of the field's description; none for fields outside the spec."""
    if len(path) < 2 or path[0] != "spec" or not all(isinstance(part, str) for part in path):
        return
    schema = schema_of(".".join(map(str, path[1:])))
    if schema.get("properties") and len(path) == 2:
        return  # its fields have theirs
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", schema.get("description", ""))
    yield from textwrap.wrap(" ".join(sentences[:2]), _WIDTH)
