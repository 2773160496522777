"""`digits`: the model repeats the digit in the prompt. Ten prompts, which a tiny model learns in half a minute.

The reward is dense: the fraction of the response tokens that are the digit, so that chance hits already give a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rljob_api.task_args import DigitsArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.task import Item


class Digits:
    """Prompts such as `7:`. The record contains the token id of the digit."""

    def __init__(self, tokenizer: Any) -> None:
        self._token_ids = [_only_token(tokenizer, str(digit)) for digit in range(10)]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Item:
        return Item(question=f"{index}:", record={"digit": index, "token_id": self._token_ids[index]})


def share_of_digit(record: dict[str, Any], completion_ids: Sequence[int]) -> float:
    """Fraction of the response tokens that are the digit; 0.0 for an empty response."""
    return list(completion_ids).count(record["token_id"]) / len(completion_ids) if completion_ids else 0.0


def items(_args: DigitsArgs, context: TaskContext) -> Digits:
    """The ten prompts, which need the tokenizer."""
    return Digits(context.tokenizer)


def reward(_args: DigitsArgs, _context: TaskContext) -> Callable[..., float]:
    """The share of the tokens that are the digit."""
    return share_of_digit


def _only_token(tokenizer: Any, text: str) -> int:
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(token_ids) != 1:
        raise BadInput(
            f"task digits: expected a tokenizer with one token for {text!r}, found {len(token_ids)}; use another model"
        )
    return int(token_ids[0])
