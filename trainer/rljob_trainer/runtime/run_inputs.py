"""The inputs of a run (model, task and reward), and their digests, by which a resumed run recognizes a change."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import structlog

from rljob_api.evaluation import EvaluationSpec
from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_client.model_dimensions import ModelDimensions
from rljob_client.model_files import weight_files
from rljob_trainer.algorithms.advantages import AdvantageFunction
from rljob_trainer.algorithms.functions import advantage_function, own_code
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.hardware import visible_cores
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.checkpoint import load_tokenizer, model_dimensions
from rljob_trainer.models.consistency import require_trainable, vocabulary_rows
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.runtime.evaluation import Evaluation
from rljob_trainer.runtime.requirements import require_usable
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.held_out import held_out
from rljob_trainer.tasks.prompt_check import CheckedPrompts, check_prompts
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import Scorer, ScoringHere
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Item, ItemSource, Task
from rljob_trainer.tasks.task_modules import require_staleness_allowed

log = structlog.get_logger()

RunInputs = dict[str, dict[str, Any]]
"""`data`: number of items and their SHA-256. `reward code`, `algorithm code`, `model`: SHA-256 by file.
`reward syntax`: SHA-256 of the syntax trees of the code, in which comments and formatting do not count. JSON values."""

_SYNTAX = "reward syntax"

_COMPUTED_ITEMS = 100
"""Items that are compared of a source that computes them on access, unless it names others."""

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
"""Weights are compared by size, header and this many samples: all of a model takes a minute for 100 GB."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The initial model of a run."""

    directory: Path
    """Directory of a model in Hugging Face format."""

    dimensions: ModelDimensions

    adapter_parameters: int
    """Number of parameters of the low-rank adapters; 0 without."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked inputs of an attempt."""

    model: ModelInput
    prompts: CheckedPrompts
    scorer: Scorer
    advantage: AdvantageFunction
    digests: RunInputs
    evaluation: Evaluation | None = None


def read_inputs(
    spec: RLJobSpec,
    stack: ExitStack,
    *,
    task_directory: Path,
    mounted_model: Path | None,
    directory: OutputDirectory,
    last_step: int,
    display: RunDisplay,
) -> Inputs:
    """Read and check model, task and reward. Raises `BadInput`, also if they have changed after a step.

    `stack`: ends the processes of the scorer. `task_directory`: that of the task's files and Python modules.
    `mounted_model`: in a pod, the volume that holds the model of an `oci://` or `pvc://` URI. `last_step`: the last
    committed one; 0: none.
    """
    require_staleness_allowed(spec, task_directory)
    advantage = advantage_function(spec.algorithm, task_directory)
    model = read_model(spec, mounted_model)
    tokenizer, rows = load_tokenizer(model.directory), vocabulary_rows(model.directory)
    max_prompt_tokens, seed = spec.algorithm.max_prompt_tokens, spec.algorithm.seed
    build = partial(
        build_task,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        manifest_directory=task_directory,
        seed=seed,
        vocabulary=rows,
    )
    task, source = build(spec.task), RewardSource(spec.task, task_directory, seed)
    evaluated: Task | None = None
    if spec.evaluation is not None and not spec.evaluation.held_out:
        with of_evaluation(spec.evaluation):  # before the digests: its modules count from the first attempt on
            evaluated = build(spec.evaluation.task_of(spec.task))
    digests = run_inputs(task, source, model.directory, own_code(spec.algorithm, task_directory))
    keep_inputs(spec, digests, directory, last_step, display.warning)
    # The first process of the pool loads the reward function while the prompts are checked.
    scorer = _scorer(source, task, stack, directory.logs / "rewards.log")
    prompts = checked_prompts(spec, task, display, may_skip=last_step == 0)
    for text in try_out(prompts.task, scorer, spec.task):
        display.warning(text)
    evaluation = spec.evaluation
    if evaluation is None:
        return Inputs(model, prompts, scorer, advantage, digests)
    task_spec, evaluating = evaluation.task_of(spec.task), scorer
    if evaluated is None:
        trained, evaluated = held_out(prompts.task, evaluation.held_out)
        prompts = replace(prompts, task=trained)
    else:
        with of_evaluation(evaluation):
            of_evaluations = spec.model_copy(update={"task": task_spec})
            evaluated = checked_prompts(of_evaluations, evaluated, display, may_skip=True).task
            if evaluation.task is not None or task_spec.reward is None:  # otherwise the function is the same
                source = RewardSource(task_spec, task_directory, seed)
                evaluating = _scorer(source, evaluated, stack, directory.logs / "evaluation-rewards.log")
            for text in try_out(evaluated, evaluating, task_spec):
                display.warning(f"evaluation: {text}")
    found = Evaluation(evaluation, evaluated, evaluating, task_spec.on_reward_error, spec.algorithm)
    return Inputs(model, prompts, scorer, advantage, digests, found)


@contextmanager
def of_evaluation(evaluation: EvaluationSpec) -> Iterator[None]:
    """Within the block, the task of `evaluation` is read: a `BadInput` about it names the evaluation."""
    try:
        yield
    except BadInput as error:
        place = ("spec", "evaluation") if evaluation.task is None else ("spec", "evaluation", "task")
        raise BadInput(f"evaluation: {error}").at(*place, *(error.field or ())[2:]) from error


def _scorer(source: RewardSource, task: Task, stack: ExitStack, log: Path) -> Scorer:
    if not source.may_hang:
        return ScoringHere(task.rewards)
    workers, timeout = visible_cores() - 1, source.spec.reward_timeout_seconds
    return stack.enter_context(RewardPool(source, task.rewards, workers=workers, timeout_seconds=timeout, log=log))


def read_model(spec: RLJobSpec, mounted: Path | None) -> ModelInput:
    """Resolve the model. Raises `BadInput` if the job cannot train it, or cannot add its adapters."""
    directory = resolve_model(spec.model.uri, mounted=mounted, accept=partial(require_usable, spec))
    require_trainable(directory)
    require_usable(spec, directory)
    lora = spec.policy.lora
    adapters = 0 if lora is None else adapter_parameters(adapted_layers(directory, lora.targets, lora.rank), lora.rank)
    return ModelInput(directory, model_dimensions(directory), adapters)


def checked_prompts(spec: RLJobSpec, task: Task, display: RunDisplay, *, may_skip: bool) -> CheckedPrompts:
    """The task, after a check of its prompts, with warnings on the display. `may_skip`: no step is committed yet."""
    checked = check_prompts(task, spec.task.overlong_prompts, display.phase, may_skip=may_skip)
    if checked.skipped:
        display.warning(
            f"Skipping {checked.skipped:,} of {checked.checked:,} prompts, which have more than "
            f"{spec.algorithm.max_prompt_tokens} tokens (algorithm.maxPromptTokens); "
            f"the longest has {checked.longest_tokens}"
        )
    for message in task.warnings():
        display.warning(message)
    log.info(
        "prompts checked",
        checked=checked.checked,
        items=len(task.items),
        skipped=checked.skipped,
        longest_tokens=checked.longest_tokens,
    )
    return checked


def keep_inputs(
    spec: RLJobSpec, inputs: RunInputs, directory: OutputDirectory, last_step: int, warn: Callable[[str], None]
) -> None:
    """Record `inputs` in the output directory. Raises `BadInput` if they have changed after a step.

    `last_step`: the last committed one; 0: none, and rollouts of other inputs are dropped.
    """
    changes = changed_inputs(directory.recorded_inputs or {}, inputs)
    if changes and last_step == 0:
        directory.drop_rollouts()
    elif changes and not spec.checkpoint.accept_changed_inputs:
        raise BadInput(
            f"expected the inputs with which {directory.path} has committed {last_step} steps, "
            f"found others: {', '.join(changes)}. Restore them, start over with another --output, or write "
            "checkpoint.acceptChangedInputs: true to resume with the changed ones"
        )
    elif changes:
        warn(f"Resuming with changed inputs: {', '.join(changes)}")
    directory.record_inputs(inputs)


def run_inputs(
    task: Task, source: RewardSource, model_dir: Path, algorithm_code: Mapping[str, bytes] | None = None
) -> RunInputs:
    """The digests. Reads all items of a list, and a few MiB of the model. `algorithm_code`: files by name."""
    code = {"reward code": _reward_code(source), "algorithm code": algorithm_code or {}}
    return {
        "data": data_digest(task.items),
        **{kind: {name: _sha256([content]) for name, content in files.items()} for kind, files in code.items()},
        _SYNTAX: {name: _syntax_digest(content) for files in code.values() for name, content in files.items()},
        "model": model_digests(model_dir),
    }


def data_digest(items: ItemSource) -> dict[str, Any]:
    """Number of items, and SHA-256 of questions and records. Values without a form in JSON count by their type."""
    most = len(items) if isinstance(items, list) else min(len(items), _COMPUTED_ITEMS)
    digest = hashlib.sha256()
    for index in getattr(items, "compared", range(most)):
        item = items[index]
        digest.update(_text(item).encode() + b"\n")
    return {"items": len(items), "sha256": digest.hexdigest()}


def model_digests(model_dir: Path) -> dict[str, str]:
    """SHA-256 of configuration and tokenizer files, and of samples of the weights, by file name."""
    small = (path for path in model_dir.iterdir() if path.suffix in {".json", ".jinja", ".model", ".txt"})
    digests = {path.name: _sha256([path.read_bytes()]) for path in small if path.is_file()}
    digests |= {path.name: _sha256(_samples(path)) for path in weight_files(model_dir)}
    return dict(sorted(digests.items()))


def changed_inputs(recorded: RunInputs, given: RunInputs) -> list[str]:
    """Descriptions of the inputs that differ: `data (2 items, now 3)`. Those that were not recorded do not count."""
    changes = []
    for name, before in recorded.items():
        now = given.get(name, {})
        if before == now or name == _SYNTAX:
            continue
        if name == "data":
            changes.append(f"data ({before['items']:,} items, now {now['items']:,})")
        else:
            files = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
            if name.endswith(" code"):
                files = [file for file in files if not _is_same_syntax(file, recorded, given)]
            if not files:
                continue
            changes.append(f"{name} ({', '.join(files[:3])}{', …' if len(files) > 3 else ''})")
    return changes


def _is_same_syntax(file: str, recorded: RunInputs, given: RunInputs) -> bool:
    before = recorded.get(_SYNTAX, {}).get(file)
    return before is not None and before == given.get(_SYNTAX, {}).get(file)


def _syntax_digest(source: bytes) -> str:
    """SHA-256 of the syntax tree, docstrings included; that of `source` if it is no Python."""
    try:
        return _sha256([ast.dump(ast.parse(source)).encode("utf-8", "surrogatepass")])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _sha256([source])


def _reward_code(source: RewardSource) -> dict[str, bytes]:
    """The modules of the reward functions, and the other imported modules of the task's directory, by file."""
    if not source.modules:
        return {}
    directory = source.manifest_directory.resolve()
    code = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not Path(file).is_file():
            continue
        path = Path(file)  # not resolved: a mounted ConfigMap has links to a directory whose name changes
        if name in source.modules or path.parent == directory:
            code[path.name] = path.read_bytes()
        elif path.is_relative_to(directory) and ".venv" not in path.parts and "site-packages" not in path.parts:
            code[path.relative_to(directory).as_posix()] = path.read_bytes()
    return dict(sorted(code.items()))


def _samples(weights: Path) -> Iterable[bytes]:
    """The size, the start with the header, and samples at even distances up to the end."""
    size = weights.stat().st_size
    yield str(size).encode()
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        file.seek(0)
        yield file.read(min(8 + header_bytes, size))
        last = max(size - _SAMPLE_BYTES, 0)
        for place in chain(range(0, last, last // _SAMPLES + 1), [last]):
            file.seek(place)
            yield file.read(_SAMPLE_BYTES)


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _text(item: Item) -> str:
    try:
        return json.dumps([item.question, item.record], default=_type_name, skipkeys=True)
    except Exception:  # a record that contains itself, is too deep, has too long an integer or a class of the user
        return json.dumps(item.question)


def _type_name(value: Any) -> str:
    return type(value).__qualname__
