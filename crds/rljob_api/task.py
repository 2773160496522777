"""The task: prompts and rewards."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.mounted_files import TaskFiles


class DigitsArgs(ApiModel):
    """Arguments of digits: none. Its ten prompts are fixed, and responses have algorithm.maxResponseTokens."""


class ReasoningGymArgs(ApiModel):
    """Arguments of reasoning-gym: the name of a data set, and its own settings (`max_terms`, `min_digits`, …)."""

    model_config = ConfigDict(extra="allow")

    dataset: str = Field(min_length=1, max_length=253)
    """Name of a reasoning-gym data set, such as chain_sum."""

    size: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Number of items. Items are generated when they are drawn, so a large number costs nothing."""

    @property
    def dataset_settings(self) -> dict[str, Any]:
        """Settings of the data set other than its size and seed."""
        return dict(self.model_extra or {})


class JsonlArgs(ApiModel):
    """Arguments of jsonl: a file of prompts in UTF-8, with one JSON object per line."""

    path: str = Field(min_length=1, max_length=4096)
    """Path of the file. A relative path starts at the manifest's directory, in pods at task.files."""

    prompt_field: str = Field(default="prompt", min_length=1, max_length=253)
    """Field with the prompt, as text."""

    answer_field: str = Field(default="answer", min_length=1, max_length=253)
    """Field with the answer. Lines may omit it if the reward function does not need it."""


TaskArgs = DigitsArgs | ReasoningGymArgs | JsonlArgs

ARGS_OF_TASK: dict[str, type[TaskArgs]] = {
    "digits": DigitsArgs,
    "reasoning-gym": ReasoningGymArgs,
    "jsonl": JsonlArgs,
}


_FUNCTION = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"

PythonFunction = Annotated[
    str, Text(pattern=f"^{_FUNCTION}$", expected="a Python function as module:function, such as rewards:exact_match")
]
TaskName = Annotated[
    str,
    Text(
        pattern=f"^(digits|reasoning-gym|jsonl|{_FUNCTION})$",
        expected="digits, reasoning-gym, jsonl, or a Python function as module:function",
    ),
]


def _names_a_module(reference: str | None) -> bool:
    return reference is None or ".py:" not in reference


_NO_FILE = "must name a module, not a file: write the module without .py, such as rewards:exact_match"


def module_rule(field: str) -> Rule:
    """A rule that refuses the name of a file in the Python function `field`."""
    return Rule(
        cel=f"!self.{field}.contains('.py:')",
        holds=lambda spec: _names_a_module(getattr(spec, field)),
        field=field,
        message=_NO_FILE,
    )


def _with_one_group(pattern: str) -> str:
    if control := re.search(r"[\x00-\x08\x0b-\x1f]", pattern):
        raise _expected(
            f"a pattern in single quotes (in double quotes, YAML reads an escape sequence as the character "
            f"U+{ord(control[0]):04X})"
        )
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise _expected(f"a Python regular expression ({error})") from None
    if groups != 1:
        raise _expected(f"one group, such as in <answer>(.*?)</answer> (it has {groups}; write the others as (?:…))")
    return pattern


def _expected(description: str) -> PydanticCustomError:
    return PydanticCustomError("text", "{expected}", {"expected": description})


class AnswerSpec(ApiModel):
    """Extraction of the answer from a response."""

    pattern: Annotated[str, AfterValidator(_with_one_group)] = Field(min_length=1, max_length=1024)
    """Python regular expression with one group, which captures the answer. `.` also matches line ends. Without a match,
    the answer is empty."""

    match: Literal["First", "Last"] = "Last"
    """Match to use if there are several."""


class TaskSpec(ApiModel):
    """The task: prompts and rewards."""

    name: TaskName = Field(json_schema_extra=immutable())
    """digits, reasoning-gym, jsonl, or module:function for a Python function that returns the items."""

    args: FreeForm = Field(default_factory=dict, json_schema_extra=immutable())
    """Arguments of the task. reasoning-gym: dataset, size, and the settings of that data set. jsonl: path, promptField
    and answerField. module:function: keyword arguments of the function. digits has no arguments."""

    reward: PythonFunction | None = Field(default=None, json_schema_extra=immutable())
    """Python function that returns the reward of a response, as module:function. The module is in the manifest's
    directory (in pods, in task.files) or in an installed package; the function may be async. Optional for digits and
    reasoning-gym, which have their own."""

    files: TaskFiles | None = Field(default=None, json_schema_extra=immutable())
    """Source of reward modules and data files in pods. Pods look up relative paths and Python modules there.
    rljob run ignores this field and looks next to the manifest."""

    answer: AnswerSpec | None = Field(default=None, json_schema_extra=immutable())
    """Extraction of the answer from a response. Absent: the answer is the whole response without surrounding white
    space."""

    system_prompt: str | None = Field(default=None, min_length=1, max_length=65536, json_schema_extra=immutable())
    """System message before every prompt. Requires a chat template."""

    prompt_template: Annotated[
        str, Text(pattern=r"\{question\}", expected="a string that contains {question}", max_length=65536)
    ] = Field(default="{question}", json_schema_extra=immutable())
    """Template of the prompt. {question} is replaced by the question of the item."""

    chat_template: Literal["Auto", "Always", "Never"] = Field(default="Auto", json_schema_extra=immutable())
    """Use of the tokenizer's chat template for prompts. Auto: use it if the tokenizer has one."""

    overlong_prompts: Literal["Fail", "Skip"] = Field(default="Fail", json_schema_extra=immutable())
    """Reaction to prompts longer than algorithm.maxPromptTokens. Fail: refuse the job before the first step, with the
    longest prompt. Skip: train on the other prompts."""

    on_reward_error: Literal["Fail", "Zero"] = "Fail"
    """Reaction to a reward function that raises an exception, returns no finite number, or exceeds
    rewardTimeoutSeconds. Fail: the job fails, with the prompt and the exception. Zero: the reward of that response is
    0; such responses are counted in the metrics. A function that fails for every prompt tried before the first step
    fails the job in any case."""

    reward_timeout_seconds: int = Field(default=30, ge=1, le=86400)
    """Maximum duration of one call of the reward function, in seconds. A process that exceeds it is killed."""

    rules: ClassVar[tuple[Rule, ...]] = (
        module_rule("name"),
        module_rule("reward"),
        Rule(
            cel="has(self.reward) || self.name in ['digits', 'reasoning-gym']",
            holds=lambda task: task.name in ("digits", "reasoning-gym") or task.reward is not None,
            field="reward",
            message="required for this task: write the Python function that scores a response, as module:function",
        ),
        Rule(
            cel="!has(self.systemPrompt) || self.chatTemplate != 'Never'",
            holds=lambda task: task.system_prompt is None or task.chat_template != "Never",
            field="systemPrompt",
            message="requires the chat template: remove chatTemplate: Never, or write the text into promptTemplate",
        ),
    )

    def further_problems(self) -> list[InitErrorDetails]:
        try:
            self.typed_args()
        except ValidationError as error:
            return [_error_in_args(detail) for detail in error.errors(include_url=False)]
        return []

    def typed_args(self) -> TaskArgs | None:
        """The validated arguments of a built-in task; None for a Python function, whose arguments are its own."""
        args = ARGS_OF_TASK.get(self.name)
        return args.model_validate(self.args, by_alias=True, by_name=False) if args else None


def _error_in_args(detail: ErrorDetails) -> InitErrorDetails:
    return InitErrorDetails(
        type=detail["type"], loc=("args", *detail["loc"]), input=detail["input"], ctx=detail.get("ctx", {})
    )
