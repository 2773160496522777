"""`dataset`: prompts from a data set of the Hugging Face hub or from data files, read by the package `datasets`.

The rows stay in Arrow files, which are mapped into memory. The variables of the hub apply: `HF_HOME`,
`HF_DATASETS_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljob_api.task_args import DATA_FORMATS, DatasetArgs
from rljob_client.errors import BadInput, RunError
from rljob_trainer.models.hub import TOKEN, HubUnreachable, may_pass
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.item_fields import answer_of, question_of
from rljob_trainer.tasks.task import Item
from rljob_trainer.tasks.user_code import error_text, user_code

_ANSWER = DatasetArgs.model_fields["answer_field"].default
_FORMATS = {f".{name}": name for name in DATA_FORMATS} | {".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""Files by which a directory of `save_to_disk` is recognized: of one split, or of several."""

_MOST_COMPARED = 10_000
"""Rows, at even distances, by which a resumed run recognizes other data. Reading them takes a second."""

_LONGEST_CAUSE = 400
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+$")


class DatasetItems:
    """The rows of a data set. A record is the whole row, with the answer field, if any, as `answer`."""

    def __init__(self, args: DatasetArgs, directory: Path) -> None:
        self._args = args
        self._rows = _loaded(args, directory)
        columns, answer = self._rows.column_names, args.answer_field
        if answer != _ANSWER and not {answer, answer.partition(".")[0]} & set(columns):
            raise BadInput(
                f"expected the column {answer!r} (args.answerField) in the data set {args.path}, found "
                f"{', '.join(columns)}; correct the name, or remove args.answerField"
            )
        if len(self):
            self[0]  # a prompt that the first row lacks is missing in all

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        where = f"row {index} of the data set {self._args.path}"
        with user_code(where):
            record: dict[str, Any] = self._rows[index]
        question = question_of(record, self._args.prompt_field, where)
        if (answer := answer_of(record, self._args.answer_field)) is not None:
            record["answer"] = answer
        return Item(question, record)

    @property
    def compared(self) -> range:
        """Indices of the rows by which a resumed run recognizes other data."""
        return range(0, len(self), max(1, len(self) // _MOST_COMPARED))


def items(args: DatasetArgs, context: TaskContext) -> DatasetItems:
    """The rows. Raises `BadInput`, and `HubUnreachable` if a retry may help."""
    return DatasetItems(args, context.directory)


def _loaded(args: DatasetArgs, directory: Path) -> Any:
    """The rows as a `datasets.Dataset`."""
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            "the task dataset needs the package datasets, found none; install rljob-trainer[data], or export the data "
            "as JSON Lines for the task jsonl"
        ) from error
    path = directory / args.path
    source, options = args.path, {"name": args.name, "split": args.split, "data_files": args.data_files or None}
    try:
        if source in DATA_FORMATS:
            options["data_files"] = [file if "://" in file else str(directory / file) for file in args.data_files]
        elif path.is_file():
            source, options["data_files"] = _format(path), [str(path)]
        elif path.is_dir() and any((path / name).is_file() for name in _SAVED):
            return _part(datasets.load_from_disk(str(path)), args.split).with_format(None)
        elif path.is_dir():
            source = str(path)
        elif _HUB_NAME.match(source) and path.suffix not in _FORMATS:
            options["revision"] = args.revision
        else:
            raise BadInput(
                f"task.args: expected a file, a directory, or a data set of the hub as org/name, found none in "
                f"{path}; correct the path"
            )
        return datasets.load_dataset(source, **options)
    except BadInput:
        raise
    except Exception as error:
        raise _failure(error, args, path) from error


def _format(file: Path) -> str:
    if file.suffix.lower() not in _FORMATS:
        raise BadInput(
            f"task.args: expected a file that ends with {', '.join(_FORMATS)}, found {file}; rename it, or write "
            "its format as path and the file in dataFiles"
        )
    return _FORMATS[file.suffix.lower()]


def _part(saved: Any, split: str) -> Any:
    """The rows of `split` of what `save_to_disk` has written."""
    from datasets import DatasetDict, ReadInstruction, concatenate_datasets

    splits = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _failure(error: Exception, args: DatasetArgs, path: Path) -> RunError:
    """The error to raise for one of `datasets`, of the hub or of the file system."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from httpx2 import HTTPError
    from huggingface_hub.errors import LocalEntryNotFoundError

    text = " ".join(str(error).split())[:_LONGEST_CAUSE].rstrip(".")
    if isinstance(error, DatasetNotFoundError):
        return BadInput(
            f"task.args: there is no file or directory {path}, and the hub has no data set {args.path}, or it is "
            f"private or gated: check path and revision, or set {TOKEN} ({text})"
        )
    for cause in _causes(error):
        if isinstance(cause, ConnectionError | HTTPError | LocalEntryNotFoundError):
            if isinstance(cause, ConnectionError) or may_pass(cause):
                return HubUnreachable(
                    f"task.args: there is no file or directory {path}, and the data set {args.path} is not in the "
                    "local cache, and the hub is not reachable: check the network and HF_HUB_OFFLINE, or download the "
                    f"data set in advance ({text})"
                )
            return BadInput(f"the hub refuses the data set {args.path}: check {TOKEN} ({text})")
    if isinstance(error, FileNotFoundError):
        return BadInput(
            f"task.args: expected data files in the data set {args.path}, found none; correct the path or dataFiles "
            f"({text})"
        )
    if isinstance(error, IndexError):  # of load_from_disk
        text = "found no rows"
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        text = error_text(error.__cause__).removeprefix("raised ")[:_LONGEST_CAUSE]
    advice = "correct the arguments or the files"
    if isinstance(error, PermissionError):
        advice = "make the files readable, or set HF_HOME to a directory that this user can write to"
    return BadInput(f"task.args: cannot read the data set {args.path}: {text}; {advice}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
