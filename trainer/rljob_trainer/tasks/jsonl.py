"""`jsonl`: prompts from a file with one JSON object per line."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from rljob_api.task_args import JsonlArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.item_fields import answer_of, question_of, require_storable
from rljob_trainer.tasks.task import Item
from rljob_trainer.tasks.user_code import short_repr

_MOST_DIGITS = 4300
"""Longest text that Python converts to an integer (sys.set_int_max_str_digits)."""

_MOST_LEVELS = 100
_ANSWER = JsonlArgs.model_fields["answer_field"].default

_EXPORT = "export it as JSON Lines, for example with pandas.DataFrame.to_json(orient='records', lines=True)"
_DATASET = "write task.name: dataset"
_UTF_16 = "save the file as UTF-8"

_OTHER_FORMATS = (
    (b"PAR1", "a Parquet file", _DATASET),
    (b"ARROW1", "an Arrow file", _DATASET),
    (b"SQLite format 3", "an SQLite database", _EXPORT),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", f"unpack it, or {_EXPORT}"),
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (b"BZh", "a bzip2 file", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "an xz file", "unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it with unzstd"),
    (b"\xff\xfe", "UTF-16 text", _UTF_16),
    (b"\xfe\xff", "UTF-16 text", _UTF_16),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file with git lfs pull"),
)
"""First bytes, name and advice of files that are mistaken for JSON Lines."""


def items(args: JsonlArgs, context: TaskContext) -> list[Item]:
    """All items of the file. A record is the object of the line, with the answer field, if any, as `answer`.

    The file is UTF-8, with or without a byte order mark. Skips empty lines. Raises `BadInput`, with the line number,
    for a line that is not a JSON object with a prompt.
    """
    file = context.directory / args.path
    data = content_of(file).removeprefix(b"\xef\xbb\xbf")
    for magic, name, advice in _OTHER_FORMATS:
        if data.startswith(magic):
            raise BadInput(f"{file}, line 1: expected one JSON object per line, found {name}; {advice}")
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):  # JSON strings may hold other line separators
        if line.strip():
            try:
                found.append(_item(line, f"{file}, line {number}", args))
            except BadInput:
                _require_lines(data, file)
                raise
    named = args.answer_field != _ANSWER
    if named and found and all(answer_of(item.record, args.answer_field) is None for item in found):
        raise BadInput(
            f"expected the field {args.answer_field!r} (args.answerField) in {file}, found none in any line, but "
            f"{', '.join(map(short_repr, found[0].record))} in the first; correct the name, or remove args.answerField"
        )
    return found


def content_of(file: Path) -> bytes:
    """The content of a file of prompts. Raises `BadInput` if it cannot be read."""
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):  # reading a FIFO would wait
            kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO, socket or device"
            raise BadInput(f"task.args.path: expected a file with prompts in {file}, found {kind}; name a file")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(
            f"task.args.path: expected a file with prompts in {file}, found none; correct the path"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(
            f"task.args.path: cannot read the prompts in {file}: {cause}; correct the path, or make the "
            "file readable for this user"
        ) from error


def _require_lines(data: bytes, file: Path) -> None:
    """Raise `BadInput` if the whole file is one JSON value."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return
    if b"\n" in data.strip() or isinstance(whole, list):
        objects = ".[]" if isinstance(whole, list) else "."
        raise BadInput(
            f"{file}: expected one JSON object per line, found one JSON {_kind(whole)} as the whole file; "
            f"write each object on a line of its own, for example with jq -c '{objects}'"
        )


def _item(line: bytes, where: str, args: JsonlArgs) -> Item:
    record = _parsed(line, where)
    if not isinstance(record, dict):
        raise BadInput(f'{where}: expected a JSON object, found {_kind(record)}; write {{"prompt": …}}')
    for field, value in record.items():
        if problem := _problem(value):
            raise BadInput(f"{where}: {problem} in the field {short_repr(field)}; correct or remove it")
    question = question_of(record, args.prompt_field, where)
    if (answer := answer_of(record, args.answer_field)) is not None:
        record["answer"] = answer
        if isinstance(answer, str):
            require_storable(answer, args.answer_field, where)
    return Item(question, record)


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_int=_integer)
    except UnicodeDecodeError as error:
        if b"\0" in line:
            found = "zero bytes, as in UTF-16 text or in a binary file"
        else:
            found = f"the byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
        raise BadInput(f"{where}: expected UTF-8 text, found {found}; save the file as UTF-8") from error
    except RecursionError as error:
        raise BadInput(
            f"{where}: expected at most {_MOST_LEVELS} levels of lists and objects, found more; simplify the object"
        ) from error
    except ValueError as error:
        if b"\0" in line:
            raise BadInput(f"{where}: expected UTF-8 text, found a zero byte; save the file as UTF-8") from error
        beginning = short_repr(line[:40].decode("utf-8", "replace"))
        raise BadInput(
            f"{where}: expected one JSON object, found something else: {error}; the line begins with {beginning}"
        ) from error


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits: write it as text")
    return int(digits)


def _problem(value: Any) -> str | None:
    """Numbers that JSON lacks and Python reads, and depths at which other functions of Python fail."""
    below = [(value, 1)]
    while below:
        each, level = below.pop()
        if level > _MOST_LEVELS:
            return f"expected at most {_MOST_LEVELS} levels of lists and objects, found more"
        if isinstance(each, float) and not math.isfinite(each):
            return f"expected finite numbers, found {each}"
        if isinstance(each, dict | list):
            below += [(part, level + 1) for part in (each.values() if isinstance(each, dict) else each)]
    return None


def _kind(value: Any) -> str:
    names = {list: "list", dict: "object", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
