"""`reasoning-gym`: procedurally generated tasks with verifiers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rljob_api.task_args import ReasoningGymArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.item_fields import question_of
from rljob_trainer.tasks.task import Item
from rljob_trainer.tasks.user_code import error_text, is_stop, short_repr, user_code

_MIXTURE = "composite"
"""reasoning-gym's own data set that draws each item from one of several, by weight."""

_OWN_ARGUMENTS = ("size", "datasets")
"""Arguments of the task, for all its data sets together."""


class ReasoningGymItems:
    """Items of one data set or of a mixture, generated on access from the seed and the index."""

    def __init__(self, args: ReasoningGymArgs, seed: int) -> None:
        self._name = args.dataset or _MIXTURE
        self.dataset = _create(args, seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        where = f"item {index} of the reasoning-gym data set {self._name}"
        with user_code(where):
            record: dict[str, Any] = self.dataset[index]
            return Item(question_of(record, "question", where, advice="use another data set"), record)


def items(args: ReasoningGymArgs, context: TaskContext) -> ReasoningGymItems:
    """The items, with the seed of the job unless `args` have one."""
    return ReasoningGymItems(args, context.seed)


def reward(args: ReasoningGymArgs, context: TaskContext) -> Callable[..., float]:
    """The `score_answer` of the data set, from 0 to 1."""
    verifier: Callable[..., float] = items(args, context).dataset.score_answer
    return verifier


def _create(args: ReasoningGymArgs, seed: int) -> Any:
    with warnings.catch_warnings():
        # A dependency causes syntax warnings when it is first compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec

    name, settings = args.dataset or _MIXTURE, {"seed": seed, **args.dataset_settings}
    for source in args.datasets:
        _require_settings(source.dataset, source.dataset_settings)
    _require_settings(name, settings)
    if args.datasets:
        settings["datasets"] = [DatasetSpec(each.dataset, each.weight, each.dataset_settings) for each in args.datasets]
    try:
        return reasoning_gym.create_dataset(name, size=args.size, **settings)
    except BaseException as error:  # reasoning-gym validates few of its settings
        if is_stop(error):
            raise
        cause = (
            str(error)
            if isinstance(error, AssertionError | TypeError | ValueError) and str(error)
            else error_text(error)
        )
        raise BadInput(
            f"cannot create the reasoning-gym data set {name} with {short_repr(settings)}: {cause}"
        ) from error


def _require_settings(name: str, settings: Collection[str]) -> None:
    """Raise `BadInput` if reasoning-gym has no data set `name`, or it has none of these settings."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise BadInput(f"reasoning-gym has no data set {name!r}: {_hint(name, DATASETS)}")
    _, config = DATASETS[name]
    known = [field.name for field in fields(config) if field.name not in _OWN_ARGUMENTS]
    if unknown := next((setting for setting in settings if setting not in known), None):
        raise BadInput(f"the reasoning-gym data set {name} has no argument {unknown!r}: {_hint(unknown, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
