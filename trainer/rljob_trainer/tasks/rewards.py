"""Reward functions: their arguments, by the names of their parameters, and the answer in a response."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rljob_api.api_model import ApiModel
from rljob_api.built_in_rewards import BuiltInReward
from rljob_api.task import AnswerSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt

_CONCURRENT_CALLS = 64

_QUESTIONS = ("prompt", "messages", "question", "problem")
"""Fields of a record that may have the question, without the template."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its prompt, for reward functions. Can be pickled if the record can."""

    prompt: str | list[dict[str, Any]]
    """The record's `prompt`, `messages`, `question` or `problem`; otherwise the text that the model received."""

    record: dict[str, Any]
    """The record of the item."""

    text: str
    token_ids: list[int]

    finished: bool
    """False if the response was cut at the token limit."""

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> Response:
        questions = (prompt.item.get(name) for name in _QUESTIONS)
        asked = next((each for each in questions if isinstance(each, str | list)), prompt.text)
        return cls(asked, prompt.item, completion.text, list(completion.token_ids), completion.finished)


def _ground_truth(record: dict[str, Any]) -> Any:
    of_verl = record.get("reward_model")
    return of_verl.get("ground_truth") if isinstance(of_verl, dict) else record.get("answer")


USER_FUNCTION = BuiltInReward(ApiModel, compares=True)

_ARGUMENTS: dict[str, Callable[[Response, AnswerSpec | None], Any]] = {
    "answer": lambda response, spec: extract_answer(response.text, spec),
    "record": lambda response, _: response.record,
    "prompt": lambda response, _: response.prompt,
    "completion": lambda response, _: response.text,
    "completion_ids": lambda response, _: response.token_ids,
    "finish_reason": lambda response, _: "stop" if response.finished else "length",
    # Those of verl.
    "data_source": lambda response, _: response.record.get("data_source"),
    "solution_str": lambda response, _: response.text,
    "ground_truth": lambda response, _: _ground_truth(response.record),
    "extra_info": lambda response, _: response.record.get("extra_info"),
}
"""Arguments of a function that scores one response, by the names of its parameters."""


def _columns(responses: Sequence[Response]) -> dict[str, Any]:
    """Arguments of a function that scores a group: lists with one value for each response. Those of TRL, which passes
    the fields of the records as columns, come first."""
    own = {f"{name}s": [_ARGUMENTS[name](each, None) for each in responses] for name in ("record", "finish_reason")}
    names = dict.fromkeys(name for response in responses for name in response.record if isinstance(name, str))
    columns = {name: [response.record.get(name) for response in responses] for name in names if name != "prompt"}
    completions = [
        response.text if isinstance(response.prompt, str) else [{"role": "assistant", "content": response.text}]
        for response in responses
    ]
    return {
        **own,
        **columns,
        "prompts": [response.prompt for response in responses],
        "completions": completions,
        "completion_ids": [response.token_ids for response in responses],
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, and the way to call it."""

    name: str
    """Name in messages."""

    function: Callable[..., Any]

    parameters: frozenset[str] | None = None
    """Parameters to pass by name; None: the answer and the record, by position."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the manifest."""

    answer_spec: AnswerSpec | None = None
    """Extracts the answer from the response. An answer may be empty."""

    label: str = ""
    """Name in metrics."""

    weight: float = 1.0

    batch: bool = False
    """True if it scores all responses to a prompt in one call."""

    any_column: bool = False
    """True if a function with `batch` receives all columns: it has the parameter **kwargs."""

    built_in: BuiltInReward = USER_FUNCTION

    @property
    def is_async(self) -> bool:
        """True if its calls can run concurrently in one process."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        )

    @property
    def concurrency(self) -> int:
        """Maximum number of calls of an async function at the same time."""
        return getattr(self.arguments.get("args"), "concurrency", _CONCURRENT_CALLS)

    def __call__(self, responses: Sequence[Response]) -> Any:
        """The result of the function for a group or, without `batch`, one response. Raises what the function raises."""
        if self.batch:
            columns = _columns(responses)
            if "answers" in (self.parameters or ()):
                columns["answers"] = [extract_answer(each.text, self.answer_spec) for each in responses]
            wanted = columns.keys() if self.any_column else (self.parameters or columns.keys()) & columns.keys()
            return self.function(**{name: columns[name] for name in wanted} | self.arguments)
        [response] = responses
        if self.parameters is None:
            return self.function(extract_answer(response.text, self.answer_spec), response.record, **self.arguments)
        passed = {name: _ARGUMENTS[name](response, self.answer_spec) for name in self.parameters & _ARGUMENTS.keys()}
        return self.function(**passed | self.arguments)


def with_signature(reward: Reward, batch: bool | None) -> Reward:
    """The reward with its way of calling. `batch`: as in the manifest. Raises `BadInput` if the function cannot be
    called with what there is."""
    try:
        signature = inspect.signature(reward.function)
    except (TypeError, ValueError):
        return replace(reward, batch=bool(batch))  # a builtin of Python without a signature
    parameters = signature.parameters.values()
    named = frozenset(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    any_name = any(each.kind == each.VAR_KEYWORD for each in parameters)
    needed = {each.name for each in parameters if each.name in named and each.default is each.empty}
    if not any_name and (unknown := next(iter(reward.arguments.keys() - named), None)):
        raise BadInput(f"args: {reward.name}{signature} has no parameter {unknown!r}; remove it")
    if batch or (batch is None and named & {"completions", "prompts"}):
        return replace(reward, batch=True, parameters=named, any_column=any_name)
    wanted = (needed or named) - reward.arguments.keys()
    of_trl = batch is None and any_name and wanted == {"completion_ids"}
    if wanted and wanted <= _ARGUMENTS.keys() and not of_trl:
        return replace(reward, parameters=named - reward.arguments.keys())
    try:
        signature.bind("", {}, **reward.arguments)
    except TypeError as error:
        if any_name and batch is None:
            return replace(reward, batch=True, parameters=named, any_column=True)
        name = reward.name.rpartition(":")[2]
        raise BadInput(
            f"{reward.name}: expected {name}(answer: str, record: dict) -> float, or parameters among "
            f"{', '.join(list(_ARGUMENTS)[:6])}, or lists as in TRL ({name}(completions, **kwargs) -> list[float]), "
            f"found {name}{signature} ({error})"
        ) from None
    return replace(reward, parameters=None)


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
