"""`jsonl`: prompts from a file with one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljob_api.task_args import JsonlArgs
from rljob_trainer.errors import BadInput
from rljob_trainer.tasks.task import Item


def read_items(args: JsonlArgs, manifest_directory: Path) -> list[Item]:
    """All items of the file. A record is the object of the line, with the answer field, if any, as `answer`.

    Skips empty lines. Raises `BadInput`, with the line number, for a line that is not a JSON object with a prompt.
    """
    file = manifest_directory / args.path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the prompts of the task jsonl in {file}: {error}") from error
    return [_item(line, f"{file}, line {number}", args) for number, line in enumerate(lines, 1) if line.strip()]


def _item(line: str, where: str, args: JsonlArgs) -> Item:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: expected one JSON object, found something else: {error}") from error
    if not isinstance(record, dict):
        raise BadInput(f"{where}: expected a JSON object, found {type(record).__name__}")
    question = record.get(args.prompt_field)
    if not isinstance(question, str):
        found = "none" if question is None else type(question).__name__
        raise BadInput(f"{where}: expected the prompt as text in the field {args.prompt_field!r}, found {found}")
    if args.answer_field in record:
        record["answer"] = record[args.answer_field]
    return Item(question, record)
