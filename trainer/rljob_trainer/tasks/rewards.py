"""Rewards by a function of the answer in a response."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.task import AnswerSpec
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.tasks.python_functions import load_function, require_reward_signature
from rljob_trainer.tasks.user_code import call


@dataclass(frozen=True, slots=True)
class AnswerReward:
    """Rewards a completion with `function(answer, record)`, which may be an `async def`."""

    name: str
    """Name in messages."""

    function: Callable[[str, dict[str, Any]], Any]

    answer_spec: AnswerSpec | None = None
    """Extracts the answer from the response. An answer may be empty."""

    def __call__(self, record: dict[str, Any], completion: Completion) -> Any:
        return call(self.function, extract_answer(completion.text, self.answer_spec), record)


def reward_from_manifest(reference: str, answer_spec: AnswerSpec | None, manifest_directory: Path) -> AnswerReward:
    """The reward function of `task.reward` ("module:function")."""
    function = load_function(reference, manifest_directory)
    require_reward_signature(function, reference)
    return AnswerReward(reference, function, answer_spec)


def extract_answer(response: str, spec: AnswerSpec | None) -> str:
    """The group of the first or last match of the manifest's pattern, stripped; empty without a match.

    Without a spec, the whole response, stripped.
    """
    if spec is None:
        return response.strip()
    matches = re.findall(spec.pattern, response, re.DOTALL)
    if not matches:
        return ""
    return str(matches[0] if spec.match == "First" else matches[-1]).strip()


def response_with(answer: str, spec: AnswerSpec | None) -> str | None:
    """A response from which `extract_answer` extracts `answer`; None if none was found."""
    candidates = [answer]
    if spec is not None:
        filled = re.sub(r"(?<!\\)\((?!\?).*(?<!\\)\)", lambda _: "\0", spec.pattern, count=1, flags=re.DOTALL)
        around = re.sub(r"\\s[*+?]*|[\^$]", "", filled)
        candidates.append(re.sub(r"\\(\W)", r"\1", around).replace("\0", answer))
    return next((text for text in candidates if extract_answer(text, spec) == answer.strip() != ""), None)
