"""A task: items in a deterministic order, each with a prompt, and a reward for every response."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rljob_client.errors import BadInput
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


_PROBE, _SYSTEM_PROBE = "This is the question.", "This is the instruction."
"""Messages with which a chat template is tried out."""

_NEVER = "correct the template, or write task.chatTemplate: Never"

_DATE = (
    "The chat template of the tokenizer writes the date into prompts: those of a resumed run differ from those of an "
    "earlier day. For the same prompts on all days, write a fixed date into the template"
)


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Formats questions as prompts. The fields, except the tokenizer, are those of the manifest."""

    tokenizer: Any
    """A Hugging Face tokenizer."""

    template: str = "{question}"
    system_prompt: str | None = None
    chat_template: Literal["Auto", "Always", "Never"] = "Auto"

    vocabulary: int | None = None
    """Rows of the model's embedding, which every token id must be below; None: not checked."""

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
            ).at("spec", "task", "systemPrompt")
        if self.system_prompt is not None and not self._is_chat:
            raise BadInput(
                "task.systemPrompt: expected task.chatTemplate: Auto or Always, found Never, which leaves it out; "
                "put the text into task.promptTemplate"
            ).at("spec", "task", "systemPrompt")
        if self.vocabulary is not None and (end := self.tokenizer.eos_token_id or 0) >= self.vocabulary:
            raise BadInput(
                f"expected the end-of-sequence token of the tokenizer below {self.vocabulary}, the rows of the model's "
                f"embedding, found {end} ({self.tokenizer.eos_token!r}): no response would end; correct eos_token in "
                f"{Path(self.tokenizer.name_or_path) / 'tokenizer_config.json'}"
            )
        if self._is_chat:
            self._require_complete_chat()

    def tokens(self, question: str) -> tuple[str, list[int]]:
        """The prompt as text and as token ids, including the special tokens of template or tokenizer, but no token
        after the text. Raises `BadInput`."""
        text = self.template.replace("{question}", question)
        if not self._is_chat:
            return text, self._open(text)
        chat = self._rendered(text, self.system_prompt)
        # The template has already added the special tokens.
        return chat, self._encoded(chat, special=False)

    def warnings(self) -> list[str]:
        """Messages about a chat template whose prompts may be a mistake: they contain the day on which they are made,
        so that another attempt may have others, or end with the end-of-sequence token."""
        if not self._is_chat:
            return []
        found = [_DATE] if "strftime_now" in self.tokenizer.get_chat_template() else []
        text, end = self._rendered(_PROBE, None), self.tokenizer.eos_token
        if end and text.rstrip().endswith(end):
            found.append(
                f"The chat template of the tokenizer ends prompts with the end-of-sequence token {end!r}: the model "
                "may answer nothing. Write the beginning of an answer after it if add_generation_prompt is set, unless "
                "the model was trained without one"
            )
        return found

    @property
    def _is_chat(self) -> bool:
        return self.chat_template != "Never" and bool(self.tokenizer.chat_template)

    def _require_complete_chat(self) -> None:
        """Raise `BadInput` if the chat template refuses a message, or leaves one out."""
        try:
            chat = self._rendered(_PROBE, None if self.system_prompt is None else _SYSTEM_PROBE)
        except BadInput as error:
            if self.system_prompt is None:
                raise
            self._rendered(_PROBE, None)
            raise self._no_system_message(f"refuses one ({error.__cause__})") from error
        if _PROBE not in chat:
            raise BadInput(f"expected {self._chat_file} to contain the user's message, found it left out; {_NEVER}")
        if self.system_prompt is not None and _SYSTEM_PROBE not in chat:
            raise self._no_system_message("leaves it out")

    def _no_system_message(self, found: str) -> BadInput:
        return BadInput(
            f"task.systemPrompt: expected a tokenizer whose chat template accepts a system message, found one that "
            f"{found}; put the text into task.promptTemplate"
        ).at("spec", "task", "systemPrompt")

    def _rendered(self, text: str, system_prompt: str | None) -> str:
        messages = [{"role": "user", "content": text}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program
            raise BadInput(
                f"expected a prompt from {self._chat_file}, found {type(error).__name__}: {error}; {_NEVER}"
            ) from error

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        try:
            token_ids = list(self.tokenizer(text, add_special_tokens=special).input_ids)
        except Exception as error:  # the tokenizers library raises plain Exception
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise BadInput(
                    f"expected text that can be written as UTF-8, found half of a character in {shortened(text)}; "
                    "remove it, or do not cut the text within a character"
                ) from error
            raise BadInput(
                f"expected text that the tokenizer can encode, found {shortened(text)} ({type(error).__name__}: "
                f"{error}); change the text"
            ) from error
        if self.vocabulary is not None and token_ids and (largest := max(token_ids)) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise BadInput(
                f"expected tokens below {self.vocabulary}, the rows of the model's embedding, found {largest} "
                f"({token!r}) of a tokenizer with {len(self.tokenizer)} tokens in {shortened(text)}; enlarge the "
                "embedding (resize_token_embeddings of transformers), or remove the token from the prompt"
            )
        return token_ids

    def _open(self, text: str) -> list[int]:
        """The token ids of `text` after the special tokens that the tokenizer puts before it, unless the text has them
        already. Those that it puts after a text are left out: the model is to continue it."""
        plain = self._encoded(text, special=False)
        if not plain or not self.tokenizer.num_special_tokens_to_add():
            return plain
        whole = self._encoded(text, special=True)
        places = (place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
        start = whole[: next(places, 0)]
        return plain if plain[: len(start)] == start else start + plain

    @property
    def _chat_file(self) -> str:
        """The chat template and its file, for messages."""
        directory = Path(self.tokenizer.name_or_path)
        files = ("chat_template.jinja", "tokenizer_config.json")
        return f"the chat template in {next((directory / f for f in files if (directory / f).is_file()), directory)}"


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
