"""The task: prompts and rewards."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.mounted_files import TaskFiles


class DigitsArgs(ApiModel):
    """Arguments of digits: none. Its ten prompts are fixed, and responses have algorithm.maxResponseTokens."""


class MixedDataset(ApiModel):
    """One data set of a mixture, and its own settings (`max_terms`, `min_digits`, …)."""

    model_config = ConfigDict(extra="allow")

    dataset: str = Field(min_length=1, max_length=253)
    """Name of a reasoning-gym data set, such as chain_sum."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of the items, in proportion to the weights of the other data sets."""

    @property
    def dataset_settings(self) -> dict[str, Any]:
        """Settings of the data set."""
        return dict(self.model_extra or {})


class ReasoningGymArgs(ApiModel):
    """Arguments of reasoning-gym: the name of a data set, and its own settings (`max_terms`, `min_digits`, …), or a
    mixture of data sets."""

    model_config = ConfigDict(extra="allow")

    dataset: str | None = Field(default=None, min_length=1, max_length=253)
    """Name of a reasoning-gym data set, such as chain_sum."""

    datasets: list[MixedDataset] = Field(default=[], max_length=100)
    """Data sets of a mixture, each with its weight and settings. Each may occur once."""

    size: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Number of items. Items are generated when they are drawn, so a large number costs nothing."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.dataset) != has(self.datasets)",
            holds=lambda args: (args.dataset is None) == bool(args.datasets),
            field="dataset",
            message="write the name of one reasoning-gym data set here, or several data sets in datasets",
        ),
    )

    @property
    def dataset_settings(self) -> dict[str, Any]:
        """Settings of the data set other than its size."""
        return dict(self.model_extra or {})


class RecordArgs(ApiModel):
    """Fields of the records of a file or data set."""

    prompt_field: str = Field(default="prompt", min_length=1, max_length=253)
    """Field with the prompt: text, or a conversation as a list of messages with role and content. Records without a
    field prompt may have the conversation in messages."""

    answer_field: str = Field(default="answer", min_length=1, max_length=253)
    """Field with the answer, which the reward function finds as answer. A dot leads into an object, as in
    reward_model.ground_truth. Records may omit it if the reward function does not need it."""


class JsonlArgs(RecordArgs):
    """Arguments of jsonl: a file of prompts in UTF-8, with one JSON object per line."""

    path: str = Field(min_length=1, max_length=4096)
    """Path of the file. A relative path starts at the manifest's directory, in pods at task.files."""


DATA_FORMATS = ("parquet", "json", "csv", "arrow")
"""Formats of data files. json is also JSON Lines."""


class DatasetArgs(RecordArgs):
    """Arguments of dataset, which reads data sets and data files with the package datasets."""

    path: str = Field(min_length=1, max_length=4096)
    """Data set of the Hugging Face hub, such as openai/gsm8k; a Parquet, JSON Lines, CSV or Arrow file; a directory of
    such files, or one that save_to_disk has written; or parquet, json, csv or arrow, the format of dataFiles. A
    relative path starts at the manifest's directory, in pods at task.files."""

    name: str | None = Field(default=None, min_length=1, max_length=253)
    """Configuration of the data set, such as main. Absent: the default one."""

    revision: str | None = Field(default=None, min_length=1, max_length=253)
    """Revision of a data set of the hub: a commit, tag or branch. Absent: main."""

    split: str = Field(default="train", min_length=1, max_length=1024)
    """Split or part of it, such as train[:90%], train[100:] or train+validation. Files without a split are train."""

    data_files: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default=[], max_length=1000)
    """Data files to read: paths like path, or patterns such as data/*.parquet. Absent: all."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"has(self.dataFiles) || !(self.path in {list(DATA_FORMATS)})",
            holds=lambda args: bool(args.data_files) or args.path not in DATA_FORMATS,
            field="dataFiles",
            message="required for this path, which is a format: write the files as a list, or one file as path",
        ),
    )


TaskArgs = DigitsArgs | ReasoningGymArgs | JsonlArgs | DatasetArgs


class BuiltInTask(NamedTuple):
    """A task by name. Its items, and its reward, are in the module of `rljob_trainer.tasks` with that name."""

    args: type[TaskArgs]

    has_reward: bool
    """False if the job must name a reward."""


TASKS: dict[str, BuiltInTask] = {
    "digits": BuiltInTask(DigitsArgs, has_reward=True),
    "reasoning-gym": BuiltInTask(ReasoningGymArgs, has_reward=True),
    "jsonl": BuiltInTask(JsonlArgs, has_reward=False),
    "dataset": BuiltInTask(DatasetArgs, has_reward=False),
}
_WITH_REWARD = [name for name, task in TASKS.items() if task.has_reward]
_NAMES = ", ".join(TASKS)

_FUNCTION = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"

PythonFunction = Annotated[
    str, Text(pattern=f"^{_FUNCTION}$", expected="a Python function as module:function, such as rewards:exact_match")
]
TaskName = Annotated[
    str,
    Text(
        pattern=f"^({'|'.join(TASKS)}|{_FUNCTION})$",
        expected=f"{_NAMES}, or a Python function as module:function",
    ),
]

_SET_BY_RLJOB = ("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "tokenize")
_RESERVED = PydanticCustomError("conflict", "{message}", {"message": "RLJob sets it itself: remove it"})


def _names_a_module(reference: str | None) -> bool:
    return reference is None or ".py:" not in reference


_NO_FILE = "must name a module, not a file: write the module without .py, such as rewards:exact_match"


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

    name: TaskName = Field(
        json_schema_extra=immutable(),
        description=f"{_NAMES}, or module:function for a Python function that returns the items.",
    )

    args: FreeForm = Field(default_factory=dict, json_schema_extra=immutable())
    """Arguments of the task: those of a built-in task, or the keyword arguments of the function."""

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
    """System message before every prompt. Requires a chat template. A conversation with its own keeps that."""

    prompt_template: Annotated[
        str, Text(pattern=r"\{question\}", expected="a string that contains {question}", max_length=65536)
    ] = Field(default="{question}", json_schema_extra=immutable())
    """Template of the prompt. {question} is replaced by the question of the item: its prompt, or the last message of the
    user in a conversation."""

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
        Rule(
            cel="!self.name.contains('.py:')",
            holds=lambda task: _names_a_module(task.name),
            field="name",
            message=_NO_FILE,
        ),
        Rule(
            cel="!self.reward.contains('.py:')",
            holds=lambda task: _names_a_module(task.reward),
            field="reward",
            message=_NO_FILE,
        ),
        Rule(
            cel=f"has(self.reward) || self.name in {_WITH_REWARD}",
            holds=lambda task: task.has_own_reward or task.reward is not None,
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
        problems = [
            InitErrorDetails(type=_RESERVED, loc=("chatTemplateArgs", name), input=None)
            for name in _SET_BY_RLJOB
            if name in self.chat_template_args
        ]
        try:
            self.typed_args()
        except ValidationError as error:
            problems += [_error_in_args(detail) for detail in error.errors(include_url=False)]
        return problems

    @property
    def has_own_reward(self) -> bool:
        """True for a built-in task that needs no `reward`."""
        return self.name in _WITH_REWARD

    def typed_args(self) -> TaskArgs | None:
        """The validated arguments of a built-in task; None for a Python function, whose arguments are its own."""
        task = TASKS.get(self.name)
        return task.args.model_validate(self.args, by_alias=True, by_name=False) if task else None


def _error_in_args(detail: ErrorDetails) -> InitErrorDetails:
    return InitErrorDetails(
        type=detail["type"], loc=("args", *detail["loc"]), input=detail["input"], ctx=detail.get("ctx", {})
    )
