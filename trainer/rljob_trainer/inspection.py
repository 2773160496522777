"""Checks of the model, the data set, the reward function and the engine arguments of a job. Imports the user's code.

    python -m rljob_trainer.inspection DIRECTORY RESULTS < job.json

Writes one JSON object a line to RESULTS: the check that begins, and each finding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.evaluation import EvaluationSpec
from rljob_api.job import RLJob
from rljob_api.manifest import Severity
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_client.errors import BadInput, RunError
from rljob_client.model_dimensions import described_dimensions
from rljob_client.validation.suspicious_values import FieldFinding, memory_findings
from rljob_memory.model_shape import compute_bytes, shape_in_uri, with_adapters
from rljob_trainer.algorithms.functions import advantage_function, loss_function
from rljob_trainer.algorithms.learning_rate import learning_rate_at
from rljob_trainer.hardware import Device, this_machine
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.consistency import require_trainable, vocabulary_rows
from rljob_trainer.models.hub import HubUnreachable, resolve_description
from rljob_trainer.models.lora_targets import adapted_layers
from rljob_trainer.models.resolve import ModelElsewhere, resolve_model
from rljob_trainer.rollout.engine_fields import engine_args_problems, installed_engine_fields
from rljob_trainer.runtime.requirements import forms_not_installed, model_requirements, unsupported_eight_bits
from rljob_trainer.runtime.run_inputs import of_evaluation
from rljob_trainer.tasks.build import build_items, build_task
from rljob_trainer.tasks.held_out import held_out
from rljob_trainer.tasks.prompt_check import check_prompts
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Task
from rljob_trainer.tasks.task_modules import require_staleness_allowed
from rljob_trainer.trackers.registry import is_installed, not_installed_message, unknown_args

Report = Callable[[dict[str, Any]], None]

_URI: FieldPath = ("spec", "model", "uri")
_TASK: FieldPath = ("spec", "task")


class Inspection:
    """The checks of one job. `report` receives each check that begins, and each finding."""

    def __init__(self, job: RLJob, directory: Path, report: Report) -> None:
        """`directory`: that of the task's files and Python modules."""
        self._spec = job.spec
        self._directory = directory
        self._report = report
        self._failures = set[str]()
        """Names of the checks that failed."""
        self._found = set[str]()
        """Messages of the findings: checks that need the same input fail with the same message."""

    def run(self) -> None:
        """Make all checks that can be made."""
        spec = self._spec
        self._engine_arguments()
        self._eight_bits()
        self._algorithm()
        self._trackers()
        directory = self._model()
        self._task(directory)
        if not self._failures & {"the reward function", "the data set", "the task"}:
            with self._check("the staleness", ("spec", "algorithm", "maxStaleness")):
                require_staleness_allowed(spec, self._directory)
        if not self._failures & {"the model", "the adapters"}:
            self._memory(directory)

    def _engine_arguments(self) -> None:
        path = ("spec", "rollout", "engineArgs")
        fields = installed_engine_fields()
        if fields is None:
            if self._spec.rollout.engine_args:
                self._find("note", path, "vLLM is not installed here: not checked")
            return
        for name, message in engine_args_problems(self._spec.rollout.engine_args, fields).items():
            self._find("error", (*path, name), message)

    def _trackers(self) -> None:
        """Trackers without their library, and arguments that it does not have."""
        trackers = self._spec.tracking or []
        for index, tracker in enumerate(trackers):
            if not is_installed(tracker):
                self._find("warning", ("spec", "tracking", index, "name"), not_installed_message(tracker))
        for path, message in unknown_args(trackers).items():
            self._find("error", path, message)

    def _eight_bits(self) -> None:
        """Forms that the installed vLLM lacks, and GPUs of this machine that cannot compute in 8 bits."""
        for field, message in forms_not_installed(self._spec).items():
            self._find("error", ("spec", "rollout", field), message)
        with suppress(BadInput):  # CUDA_VISIBLE_DEVICES of this shell is not the job's
            capability = this_machine().gpu_capability
            for field, message in unsupported_eight_bits(self._spec, "cuda", capability).items():
                self._find("warning", ("spec", "rollout", field), f"on this machine: {message}")

    def _algorithm(self) -> None:
        """The user's own functions, and the arguments of a learning rate schedule."""
        algorithm, section = self._spec.algorithm, ("spec", "algorithm")
        with self._check("the advantage function", (*section, "advantage")):
            advantage_function(algorithm, self._directory)
        if algorithm.loss is not None:
            with self._check("the loss function", (*section, "loss")):
                loss_function(algorithm, self._directory)
        with self._check("the learning rate schedule", (*section, "learningRateSchedule", "args")):
            learning_rate_at(algorithm, algorithm.steps)

    def _model(self) -> Path | None:
        """The model's directory, of which a model of the hub may lack the weights; None if it cannot be read here."""
        uri = self._spec.model.uri
        scheme, _, location = uri.partition("://")
        with self._check("the model", _URI):
            if scheme == "hf":
                return self._hub_model(location)
            try:
                directory = resolve_model(uri)
            except ModelElsewhere as error:
                self._find("note", _URI, f"model and prompt lengths are not checked: {error}")
                return None
            require_trainable(directory)
            self._requirements(directory)
            if "the adapters" not in self._failures and (lora := self._spec.policy.lora) is not None:
                with self._check("the adapters", ("spec", "policy", "lora")):
                    adapted_layers(directory, lora.targets, lora.rank)
            return directory
        return None

    def _hub_model(self, location: str) -> Path | None:
        """Configuration and tokenizer; a download of the weights would take too long."""
        try:
            directory = resolve_description(location)
        except HubUnreachable as error:
            self._find("warning", _URI, f"model and prompt lengths are not checked: {error}")
            return None
        self._requirements(directory)
        return directory

    def _requirements(self, directory: Path) -> None:
        for requirement in model_requirements(self._spec):
            with self._check(requirement.name, requirement.field):
                requirement.require(directory)

    def _tokenizer(self, directory: Path | None) -> Any | None:
        if directory is not None:
            with self._check("the tokenizer", _URI):
                return load_tokenizer(directory)
        return None

    def _task(self, directory: Path | None) -> None:
        spec, algorithm = self._spec.task, self._spec.algorithm
        tokenizer = self._tokenizer(directory)
        reward_field: FieldPath = (*_TASK, "rewards" if spec.rewards else "reward")
        if spec.reward or spec.rewards:
            with self._check("the reward function", reward_field):
                RewardSource(spec, self._directory, algorithm.seed).load()
        if tokenizer is None or directory is None or "the reward function" in self._failures:
            if spec.name != "digits":
                with self._check("the data set", (*_TASK, "args")):
                    build_items(spec, None, self._directory, algorithm.seed)
            return
        with self._check("the task", (*_TASK, "args")):
            rows = vocabulary_rows(directory)
            task = build_task(spec, tokenizer, algorithm.max_prompt_tokens, self._directory, algorithm.seed, rows)
            for message in task.warnings():
                self._find("warning", (*_TASK, "chatTemplate"), message)
            with self._check("the prompts", ("spec", "algorithm", "maxPromptTokens")):
                task = check_prompts(task, spec.overlong_prompts, lambda _: None).task
                if algorithm.prompts_per_step > len(task):
                    counted = "1 prompt" if len(task) == 1 else f"{len(task)} prompts"
                    message = f"the task has {counted}: a step repeats some of them"
                    self._find("warning", ("spec", "algorithm", "promptsPerStep"), message)
            with self._check("the reward function", reward_field):
                # The job's pods may reach servers that this machine cannot.
                here = [reward for reward in task.rewards if not reward.built_in.remote]
                if len(here) < len(task.rewards):
                    self._find(
                        "note", reward_field, "rewards from servers are not tried here, but before the first step"
                    )
                tried = replace(task, max_prompt_tokens=sys.maxsize, rewards=here)
                for text in try_out(tried, ScoringHere(here), spec) if here else ():
                    self._find("warning", reward_field, text)
            if self._spec.evaluation is not None and "the prompts" not in self._failures:
                with self._check("the evaluation", ("spec", "evaluation")):
                    self._evaluation(self._spec.evaluation, task, tokenizer, rows)

    def _evaluation(self, evaluation: EvaluationSpec, training: Task, tokenizer: Any, rows: int) -> None:
        if evaluation.held_out:
            held_out(training, evaluation.held_out)
            return
        spec, algorithm = evaluation.task_of(self._spec.task), self._spec.algorithm
        with of_evaluation(evaluation):
            task = build_task(spec, tokenizer, algorithm.max_prompt_tokens, self._directory, algorithm.seed, rows)
            task = check_prompts(task, spec.overlong_prompts, lambda _: None).task
            for text in try_out(task, ScoringHere(task.rewards), spec):
                self._find("warning", ("spec", "evaluation"), text)

    def _memory(self, directory: Path | None) -> None:
        """The prediction for the job's pods, and the limits and sizes that are below it."""
        spec = self._spec
        device: Device = "cuda" if spec.policy.gpus_per_replica else "cpu"
        shape = shape_in_uri(spec, compute_bytes(spec, device))
        if directory is not None:
            with self._check("the model", _URI):
                shape = described_dimensions(directory).shape(compute_bytes(spec, device))
                shape = shape if spec.policy.lora is None else with_adapters(shape, spec.policy.lora.rank)
        if shape is None:
            return
        for finding in memory_findings(spec, shape, device):
            self._find(finding.severity, finding.field, finding.message)

    @contextmanager
    def _check(self, name: str, field: FieldPath) -> Iterator[None]:
        """A failure within becomes a finding about `field`."""
        self._report({"check": name, "field": field})
        try:
            yield
        except RunError as error:
            self._failures.add(name)
            at: FieldPath = getattr(error, "field", None) or field
            severity: Severity = "warning" if isinstance(error, HubUnreachable) else "error"
            self._find(severity, at, str(error).removeprefix(f"{'.'.join(map(str, at[1:]))}: "))

    def _find(self, severity: Severity, field: FieldPath, message: str) -> None:
        if message in self._found:
            return
        self._found.add(message)
        finding = FieldFinding(severity, field, message)
        self._report({"severity": finding.severity, "field": finding.field, "message": finding.message})


def main() -> None:
    directory, results = map(Path, sys.argv[1:])
    job = RLJob.model_validate_json(sys.stdin.buffer.read(), by_alias=True, by_name=False)
    with results.open("a", encoding="utf-8") as stream:

        def report(entry: dict[str, Any]) -> None:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()

        Inspection(job, directory, report).run()


if __name__ == "__main__":
    main()
