"""A task: items in a deterministic order, each with a prompt, and a reward for every response."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rljob_trainer.errors import BadInput
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.tasks.scoring import Reward


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a task."""

    question: str

    record: dict[str, Any]
    """Passed to the reward function."""


class ItemSource(Protocol):
    """The items of a task. Item i must always be the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts and rewards for the controller."""

    name: str
    items: ItemSource
    reward: Reward
    prompt_format: PromptFormat

    max_prompt_tokens: int
    """Limit for each prompt, including special tokens."""

    seed: int
    """Of the order of the items."""

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
        text, token_ids = self.prompt_format.tokens(item.question)
        if not token_ids:
            raise BadInput(f"expected text in prompt {index} of the task {self.name}, found none")
        return Prompt(index=index, token_ids=token_ids, text=text, item=item.record)


def shortened(text: str) -> str:
    """`text` in quotes, cut after 120 characters."""
    return repr(text if len(text) <= 120 else f"{text[:120]}…")


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Formats questions as prompts. The fields, except the tokenizer, are those of the manifest."""

    tokenizer: Any
    """A Hugging Face tokenizer."""

    template: str = "{question}"
    system_prompt: str | None = None
    chat_template: Literal["Auto", "Always", "Never"] = "Auto"

    def __post_init__(self) -> None:
        has_template = bool(self.tokenizer.chat_template)
        if self.chat_template == "Always" and not has_template:
            raise BadInput(
                "task.chatTemplate: Always needs a tokenizer with a chat template, found none; write Auto or Never"
            )
        if self.system_prompt is not None and not has_template:
            raise BadInput(
                "task.systemPrompt: expected a tokenizer with a chat template, found none; "
                "put the text into task.promptTemplate"
            )

    def tokens(self, question: str) -> tuple[str, list[int]]:
        """The prompt as text and as token ids, including the special tokens of template or tokenizer."""
        text = self.template.replace("{question}", question)
        if self.chat_template == "Never" or not self.tokenizer.chat_template:
            return text, list(self.tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        chat = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # The template has already added the special tokens.
        return chat, list(self.tokenizer(chat, add_special_tokens=False).input_ids)


def prompts_of_step(step: int, prompts_per_step: int, size: int, seed: int) -> list[int]:
    """Indices (0 … size - 1) of the items of `step`, counted from 1. A pure function, so that a step can be repeated.

    The steps draw consecutive items from an endless sequence of epochs, each with its own permutation of all items. A
    step may span two or more epochs.
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
