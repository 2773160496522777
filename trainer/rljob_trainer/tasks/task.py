"""A task: items in a deterministic order, each with a prompt, and a reward for every response."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.tasks.item_fields import Conversation
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.rewards import Reward


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a task."""

    question: str | Conversation

    record: dict[str, Any]
    """Passed to the reward function."""


class ItemSource(Protocol):
    """The items of a task. Item i must always be the same.

    A source that is no list may have a range `compared`: the indices by which a resumed run recognizes a change.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts and rewards for the controller."""

    name: str
    items: ItemSource
    rewards: Sequence[Reward]
    prompt_format: PromptFormat

    max_prompt_tokens: int
    """Limit for each prompt, including special tokens."""

    seed: int
    """Seed of the order of the items."""

    kept: Sequence[int] | None = None
    """Indices of the items to train on; None: all."""

    def __post_init__(self) -> None:
        if len(self.items) == 0:
            raise BadInput(f"expected at least one item in the task {self.name}, found none")

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the items to train on."""
        return range(len(self.items)) if self.kept is None else self.kept

    def warnings(self) -> list[str]:
        """Messages about prompts that may be a mistake."""
        found, index = self.prompt_format.warnings(), self.indices[0]
        question = self.items[index].question
        if not isinstance(question, str) and question[-1]["role"] == "assistant":
            found.append(
                f"The conversation in prompt {index} of the task {self.name} ends with a message of the assistant, "
                "which the model continues. If that message is the answer, remove it"
            )
        return found

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of `step`, counted from 1. They are the same in every attempt."""
        return [self.prompt(index) for index in self.items_of_step(step, count)]

    def items_of_step(self, step: int, count: int) -> list[int]:
        """The indices of the items whose prompts are those of `step`."""
        indices = self.indices
        return [indices[place] for place in prompts_of_step(step, count, len(indices), self.seed)]

    def prompt(self, index: int) -> Prompt:
        """The prompt of an item. Raises `BadInput` if it is empty or longer than the limit."""
        prompt = self.prompt_of_any_length(index)
        found = len(prompt.token_ids)
        if found > self.max_prompt_tokens:
            raise BadInput(
                f"expected prompts of at most {self.max_prompt_tokens} tokens, found {found} in prompt {index} of the "
                f"task {self.name} ({shortened(prompt.text)}); write algorithm.maxPromptTokens: {found} or more"
            )
        return prompt

    def prompt_of_any_length(self, index: int) -> Prompt:
        """The prompt of an item. Raises `BadInput` if it is empty."""
        item = self.items[index]
        try:
            text, token_ids = self.prompt_format.tokens(item.question)
        except BadInput as error:
            field = error.field or ("spec", "task", "args")
            raise BadInput(f"prompt {index} of the task {self.name}: {error}").at(*field) from error
        if not token_ids:
            raise BadInput(f"expected text in prompt {index} of the task {self.name}, found none")
        return Prompt(index=index, token_ids=token_ids, text=text, item=item.record)


def shortened(text: str) -> str:
    """`text` in quotes, cut after 120 characters."""
    return repr(text if len(text) <= 120 else f"{text[:120]}…")


def prompts_of_step(step: int, prompts_per_step: int, size: int, seed: int) -> list[int]:
    """Indices (0 … size - 1) of the items of `step`, counted from 1. A pure function, so that a step can be repeated.

    The steps draw consecutive items from an endless sequence of epochs, each with its own permutation of all items. A
    step may span two or more epochs. Raises `ValueError` for a step or a size below 1.
    """
    if step < 1 or size < 1:
        raise ValueError(f"expected step and size from 1, found step {step} and size {size}")
    first = (step - 1) * prompts_per_step
    positions = range(first, first + prompts_per_step)
    if size > _LARGEST_SHUFFLED_SOURCE:
        return [_permuted(position % size, size, position // size, seed) for position in positions]
    permutations = {epoch: _permutation(epoch, size, seed) for epoch in {position // size for position in positions}}
    return [int(permutations[position // size][position % size]) for position in positions]


def _permutation(epoch: int, size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(size)


_LARGEST_SHUFFLED_SOURCE = 2**20
"""Number of items above which each index is permuted separately: shuffling a list of 2^31 indices would take 16 GiB in
every step."""

_FEISTEL_ROUNDS = 6


def _permuted(index: int, size: int, epoch: int, seed: int) -> int:
    """The place of `index` in a permutation of 0 … size - 1.

    A Feistel network permutes the numbers of an even number of bits; those outside of the range are permuted again
    until they are within (J. Black, P. Rogaway: "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half_bits = -(-(size - 1).bit_length() // 2)
    while True:
        left, right = index >> half_bits, index & ((1 << half_bits) - 1)
        for number in range(_FEISTEL_ROUNDS):
            key = f"{seed}/{epoch}/{number}/{right}".encode()
            mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
            left, right = right, left ^ (mixed & ((1 << half_bits) - 1))
        index = left << half_bits | right
        if index < size:
            return index
