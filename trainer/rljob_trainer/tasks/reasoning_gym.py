"""`reasoning-gym`: procedurally generated tasks with verifiers."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rljob_api.task import AnswerSpec, ReasoningGymArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks.item_fields import question_of
from rljob_trainer.tasks.rewards import AnswerReward
from rljob_trainer.tasks.task import Item
from rljob_trainer.tasks.user_code import error_text, is_stop, short_repr, user_code


class ReasoningGymItems:
    """Items of one data set, generated on access from the data set's seed and the index."""

    def __init__(self, args: ReasoningGymArgs, seed: int) -> None:
        self._name = args.dataset
        self.dataset = _create(args, seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        where = f"item {index} of the reasoning-gym data set {self._name}"
        with user_code(where):
            record: dict[str, Any] = self.dataset[index]
            return Item(question_of(record, "question", where, advice="use another data set"), record)


def verifier(items: ReasoningGymItems, answer_spec: AnswerSpec | None) -> AnswerReward:
    """The `score_answer` of the data set, from 0 to 1."""
    return AnswerReward("reasoning-gym", items.dataset.score_answer, answer_spec)


def _create(args: ReasoningGymArgs, seed: int) -> Any:
    with warnings.catch_warnings():
        # A dependency causes syntax warnings when it is first compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if args.dataset not in DATASETS:
        raise BadInput(f"reasoning-gym has no data set {args.dataset!r}: {_hint(args.dataset, DATASETS)}")
    _, config = DATASETS[args.dataset]
    known = [field.name for field in fields(config)]
    if unknown := next((name for name in args.dataset_settings if name not in known), None):
        raise BadInput(
            f"the reasoning-gym data set {args.dataset} has no argument {unknown!r}: {_hint(unknown, known)}"
        )
    settings = {"seed": seed, **args.dataset_settings}
    try:
        return reasoning_gym.create_dataset(args.dataset, size=args.size, **settings)
    except BaseException as error:  # reasoning-gym validates few of its settings
        if is_stop(error):
            raise
        cause = (
            str(error)
            if isinstance(error, AssertionError | TypeError | ValueError) and str(error)
            else error_text(error)
        )
        raise BadInput(
            f"cannot create the reasoning-gym data set {args.dataset} with {short_repr(settings)}: {cause}"
        ) from error


def _hint(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
