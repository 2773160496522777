"""The task: prompts and rewards."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.built_in_rewards import PatternWithGroup
from rljob_api.mounted_files import TaskFiles
from rljob_api.reward import (
    FUNCTION_PATTERN,
    PythonFunction,
    RewardSpec,
    conflict,
    error_in_args,
    module_rule,
)
from rljob_api.task_args import TASKS

_WITH_REWARD = [name for name, task in TASKS.items() if task.has_reward]
_NAMES = ", ".join(TASKS)

TaskName = Annotated[
    str,
    Text(
        pattern=f"^({'|'.join(TASKS)}|{FUNCTION_PATTERN})$",
        expected=f"{_NAMES}, or a Python function as module:function",
    ),
]

_SET_BY_RLJOB = ("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "tokenize")
_RESERVED = PydanticCustomError("conflict", "{message}", {"message": "RLJob sets it itself: remove it"})


class AnswerSpec(ApiModel):
    """Extraction of the answer from a response."""

    pattern: PatternWithGroup
    """Python regular expression with one group, which captures the answer. `.` also matches line ends. Without a match,
    the answer is empty."""

    match: Literal["First", "Last"] = "Last"
    """Match to use if there are several."""


class TaskSpec(ApiModel):
    """The task: prompts and rewards."""

    name: TaskName = Field(
        json_schema_extra=immutable(),
        description=f"{_NAMES}, or module:function for a Python function that returns the items.",
    )

    args: FreeForm = Field(default_factory=dict, json_schema_extra=immutable())
    """Arguments of the task: those of a built-in task, or the keyword arguments of the function."""

    reward: PythonFunction | None = Field(
        default=None,
        json_schema_extra=immutable(),
        description="Python function that returns the reward of a response, as module:function. The module is in the "
        "manifest's directory (in pods, in task.files) or in an installed package; the function may be async. Optional "
        f"for tasks with a reward of their own: {', '.join(_WITH_REWARD)}. Short for `rewards` with one function.",
    )

    rewards: Annotated[list[RewardSpec], Field(min_length=1, max_length=16)] | None = Field(
        default=None, json_schema_extra=immutable()
    )
    """Several reward functions, or built-in ones. The reward of a response is the sum of weight x reward over the
    functions that do not leave it out; each is logged as rewards/NAME."""

    files: TaskFiles | None = Field(default=None, json_schema_extra=immutable())
    """Source of reward modules and data files in pods. Pods look up relative paths and Python modules there.
    rljob run ignores this field and looks next to the manifest."""

    answer: AnswerSpec | None = Field(default=None, json_schema_extra=immutable())
    """Extraction of the answer from a response. Absent: the answer is the whole response without surrounding white
    space."""

    system_prompt: str | None = Field(default=None, min_length=1, max_length=65536, json_schema_extra=immutable())
    """System message before every prompt. Requires a chat template. A conversation with its own keeps that."""

    prompt_template: Annotated[
        str, Text(pattern=r"\{question\}", expected="a string that contains {question}", max_length=65536)
    ] = Field(default="{question}", json_schema_extra=immutable())
    """Template of the prompt. {question} is replaced by the question of the item: its prompt, or the last message of
    the user in a conversation."""

    chat_template: Literal["Auto", "Always", "Never"] = Field(default="Auto", json_schema_extra=immutable())
    """Use of the tokenizer's chat template for prompts. Auto: use it if the tokenizer has one."""

    chat_template_args: FreeForm = Field(default_factory=dict, json_schema_extra=immutable())
    """Variables for the chat template, such as enable_thinking: false."""

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
            cel=f"has(self.reward) || has(self.rewards) || self.name in {_WITH_REWARD}",
            holds=lambda task: task.has_own_reward or bool(task.reward or task.rewards),
            field="reward",
            message="required for this task: write the Python function that scores a response, as module:function",
        ),
        Rule(
            cel="!has(self.rewards) || !has(self.reward)",
            holds=lambda task: task.rewards is None or task.reward is None,
            field="rewards",
            message="write either reward or rewards",
        ),
        Rule(
            cel="self.rewards.exists(reward, reward.weight != 0.0)",
            holds=lambda task: task.rewards is None or any(reward.weight for reward in task.rewards),
            field="rewards",
            message="expected a weight other than 0: all rewards would be 0",
        ),
        Rule(
            cel="!has(self.systemPrompt) || self.chatTemplate != 'Never'",
            holds=lambda task: task.system_prompt is None or task.chat_template != "Never",
            field="systemPrompt",
            message="requires the chat template: remove chatTemplate: Never, or write the text into promptTemplate",
        ),
    )

    def further_problems(self) -> list[InitErrorDetails]:
        problems = [
            InitErrorDetails(type=_RESERVED, loc=("chatTemplateArgs", name), input=None)
            for name in _SET_BY_RLJOB
            if name in self.chat_template_args
        ]
        labels = [reward.label for reward in self.rewards or ()]
        if repeated := next((label for label in labels if labels.count(label) > 1), None):
            problems.append(conflict("rewards", f"two reward functions are named {repeated}: write a `name` for each"))
        if not self.has_own_reward and any(reward.source == "task" for reward in self.rewards or ()):
            problems.append(conflict("rewards", "this task has no reward of its own: remove `task` from the list"))
        try:
            self.typed_args()
        except ValidationError as error:
            problems += [error_in_args(detail) for detail in error.errors(include_url=False)]
        return problems

    @property
    def reward_functions(self) -> tuple[RewardSpec, ...]:
        """The reward functions, of `rewards`, `reward` or the task itself."""
        if self.rewards:
            return tuple(self.rewards)
        return (RewardSpec(function=self.reward) if self.reward else RewardSpec(name="task"),)

    @property
    def has_own_reward(self) -> bool:
        """True for a built-in task that needs no `reward`."""
        return self.name in _WITH_REWARD

    def typed_args(self) -> Any:
        """The validated arguments of a built-in task; None for a Python function, whose arguments are its own."""
        task = TASKS.get(self.name)
        return task.args.model_validate(self.args, by_alias=True, by_name=False) if task else None
