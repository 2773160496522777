"""The built-in tasks and their arguments.

To add one, add the model of its arguments and a row, and a module of its name to `rljob_trainer.tasks`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field

from rljob_api.api_model import ApiModel, Rule


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


class TextArgs(ApiModel):
    """Arguments of text: a file of prompts in UTF-8, one in each line, for rewards that need no answer."""

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


class BuiltInTask(NamedTuple):
    """A task by name. Its items, and its reward, are in the module of `rljob_trainer.tasks` with that name."""

    prompts: str
    """Source of the prompts, for the table of tasks in the docs."""

    args: type[ApiModel]

    has_reward: bool
    """False if the job must name a reward."""


TASKS: dict[str, BuiltInTask] = {
    "digits": BuiltInTask("ten prompts, for tests", DigitsArgs, has_reward=True),
    "reasoning-gym": BuiltInTask("generated problems of one or several data sets", ReasoningGymArgs, has_reward=True),
    "jsonl": BuiltInTask("a JSON Lines file, without further packages", JsonlArgs, has_reward=False),
    "text": BuiltInTask("the lines of a text file", TextArgs, has_reward=False),
    "dataset": BuiltInTask(
        "a data set of the Hugging Face hub, a Parquet, JSON, CSV or Arrow file, or what `save_to_disk` has written",
        DatasetArgs,
        has_reward=False,
    ),
}
